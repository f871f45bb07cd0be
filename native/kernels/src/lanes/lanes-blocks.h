// Products of the formats of lanes-formats.h, which have blocks of 32 or 64, and block_q8_0; see lanes-kernels.h.
//
// The product of a row and a column has four sums, of the blocks 0, 4, 8, … of the row, of 1, 5, 9, … and so on, each added up
// in that order, and in the order of their elements, sub-block by sub-block:
// acc = fma(sum of code * activation, d * d of the activations, acc), where the sum is a whole number, and for formats with
// minima acc = fma(m, sum of activations, acc). The result is (first + third) + (second + fourth).

#pragma once

#include "lanes-formats.h"
#include "lanes-panels.h"

#include <type_traits>

namespace mtp {
namespace {

// What has to be taken off codes that are unsigned.
template <class V, class T> constexpr int code_bias = T::is_signed ? V::offset_codes ? 128 : 0 : T::bias;

// Sub-blocks of a piece
template <class T> constexpr int halves = QK8_0 / T::sub_block;

// Which four elements of a piece are in the 32 bits i of the codes of a lane
template <class T> constexpr int four(int i) { return halves<T> == 1 ? i : (i & 1) | (i & 2) << 1 | (i & 4) >> 1; }

// Of a sub-block of activations: -code_bias times their sum or, where there are minima, d times their sum.
template <class T> using block_sum = std::conditional_t<T::has_min, float, int32_t>;

template <class V, class T> LANES_INLINE block_sum<T> sum_of(__m128i fours, float d) {
    __m128i x = _mm_add_epi32(fours, _mm_shuffle_epi32(fours, 0x4e));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1));
    const int32_t sum = _mm_cvtsi128_si32(x);
    if constexpr (T::has_min) {
        return d * (float) sum;
    } else {
        return -code_bias<V, T> * sum;
    }
}

template <class V, class T> LANES_INLINE void sums_of(const block_q8_0 & y, float d, block_sum<T> * to) {
    const __m256i q = _mm256_loadu_si256((const __m256i *) y.qs);
    const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), q), _mm256_set1_epi16(1));
    const __m128i first = _mm256_castsi256_si128(fours), last = _mm256_extracti128_si256(fours, 1);
    if constexpr (halves<T> == 1) {
        to[0] = sum_of<V, T>(_mm_add_epi32(first, last), d);
    } else {
        to[0] = sum_of<V, T>(first, d);
        to[1] = sum_of<V, T>(last, d);
    }
}

// The activations for four consecutive blocks of a row, in the order of the codes; zeros beyond the end of a column. d and
// sum are there for each element of a lane.
template <class V, class T> struct alignas(64) four_blocks {
    int8_t qs[T::pieces][2][4][16];
    float d[T::pieces][4][4];
    block_sum<T> sum[T::pieces][halves<T>][4][4];

    static void arrange(const block_q8_0 * from, int64_t blocks, four_blocks * to) {
        for (int64_t b = 0; b < blocks; b += 4, to++) {
            if (blocks - b < 4) {
                memset(to, 0, sizeof(*to));
            }
            for (int l = 0; l < 4 && b + l < blocks; l++) {
                for (int piece = 0; piece < T::pieces; piece++) {
                    const block_q8_0 & y = from[(b + l) * T::pieces + piece];
                    if constexpr (halves<T> == 1) {
                        memcpy(to->qs[piece][0][l], y.qs, 16);
                        memcpy(to->qs[piece][1][l], y.qs + 16, 16);
                    } else {
                        LANES_UNROLL
                        for (int i = 0; i < 4; i++) {
                            memcpy(to->qs[piece][i % 2][l] + 8 * (i / 2), y.qs + 8 * i, 8);
                        }
                    }
                    const float d = _cvtsh_ss(y.d);
                    block_sum<T> sums[halves<T>];
                    sums_of<V, T>(y, d, sums);
                    LANES_UNROLL
                    for (int i = 0; i < 4; i++) {
                        to->d[piece][l][i] = d;
                        LANES_UNROLL
                        for (int half = 0; half < halves<T>; half++) {
                            to->sum[piece][half][l][i] = sums[half];
                        }
                    }
                }
            }
        }
    }
};

// As lane_sums, but of the first two elements of each lane, and of the last two.
template <class V> LANES_INLINE void lane_half_sums(const typename V::I * a, typename V::I * to) {
    typename V::I b[4];
    transpose<V>(a, b);
    to[0] = V::add32(b[0], b[1]);
    to[1] = V::add32(b[2], b[3]);
}

// Up to eight columns: four rows at a time, V::count blocks of each.
template <class T> struct small_blocks {
    using block = typename T::block;

    template <class V, int M>
    static void product(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst,
                        reading how) {
        const int64_t blocks = n / (T::pieces * QK8_0), groups = (blocks + 3) / 4;
        auto * arranged = (four_blocks<V, T> *) scratch(M * groups * sizeof(four_blocks<V, T>));
        for (int m = 0; !how.again && m < M; m++) {
            four_blocks<V, T>::arrange((const block_q8_0 *) cols[m], blocks, arranged + m * groups);
        }
        const rows_ahead ahead(4, stride, how);
        for (int64_t r0 = 0; r0 < nr; r0 += 4) {
            const int take = nr - r0 < 4 ? (int) (nr - r0) : 4;
            const char * row[4];
            for (int r = 0; r < 4; r++) {
                row[r] = w + (r0 + (r < take ? r : take - 1)) * stride;
            }
            __m128 result[M];
            four_rows<V, M>(blocks, row, ahead, arranged, groups, result);
            LANES_UNROLL
            for (int m = 0; m < M; m++) {
                float sums[4];
                _mm_storeu_ps(sums, result[m]);
                memcpy(dst[m] + r0, sums, take * sizeof(float));
            }
        }
    }

    template <class V, int M>
    LANES_INLINE void four_rows(int64_t blocks, const char * const * row, const rows_ahead & ahead, const four_blocks<V, T> * y,
                                int64_t groups, __m128 * result) {
        constexpr int vectors = 4 / V::count;
        typename V::F acc[M][vectors];
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            LANES_UNROLL
            for (int v = 0; v < vectors; v++) {
                acc[m][v] = V::zerof();
            }
        }
        size_t lane[V::count];
        block_lanes<V, block>(V::count, lane);
        int64_t b = 0;
        for (; b + 4 <= blocks; b += 4, y++) {
            fetch<16 * sizeof(block)>(row[0] + 4 * b * sizeof(block), ahead);
            LANES_UNROLL
            for (int v = 0; v < vectors; v++) {
                add<V, M>(row, (b + v * V::count) * sizeof(block), lane, v, y, groups, acc);
            }
        }
        for (int v = 0; b < blocks; b += V::count, v++) {
            block_lanes<V, block>(blocks - b < V::count ? (int) (blocks - b) : V::count, lane);
            add<V, M>(row, b * sizeof(block), lane, v, y, groups, acc);
        }
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            result[m] = V::add_lanes(vectors == 1 ? acc[m][0] : V::addf(acc[m][0], acc[m][vectors - 1]));
        }
    }

    // Vector v of four blocks of each row, and of the columns, which are `groups` apart.
    template <class V, int M>
    LANES_INLINE void add(const char * const * row, size_t at, const size_t * lane, int v, const four_blocks<V, T> * y,
                          int64_t groups, typename V::F (*acc)[4 / V::count]) {
        LANES_UNROLL
        for (int piece = 0; piece < T::pieces; piece++) {
            typename V::I head[4], w[4][2];
            LANES_UNROLL
            for (int i = 0; i < 4; i++) {
                head[i] = V::lanes(row[i] + at, lane);
                T::template codes<V>(row[i] + at, lane, head[i], piece, w[i]);
            }
            const auto heads = lane_heads<V>(head);
            typename V::F d[halves<T>];
            T::template d<V>(heads, piece, d);
            LANES_UNROLL
            for (int m = 0; m < M; m++) {
                const four_blocks<V, T> & ym = y[m * groups];
                const auto y0 = V::all(ym.qs[piece][0][v * V::count]), y1 = V::all(ym.qs[piece][1][v * V::count]);
                typename V::I dot[4], sum[halves<T>];
                LANES_UNROLL
                for (int i = 0; i < 4; i++) {
                    dot[i] = V::template sums<T::is_signed>(w[i][0], y0, w[i][1], y1);
                }
                if constexpr (halves<T> == 1) {
                    sum[0] = lane_sums<V>(dot);
                } else {
                    lane_half_sums<V>(dot, sum);
                }
                LANES_UNROLL
                for (int half = 0; half < halves<T>; half++) {
                    if constexpr (code_bias<V, T> != 0) {
                        sum[half] = V::add32(sum[half], V::all(ym.sum[piece][half][v * V::count]));
                    }
                    const auto d_both = V::mul(d[half], V::load_f32(ym.d[piece][v * V::count]));
                    acc[m][v] = V::fma(V::to_float(sum[half]), d_both, acc[m][v]);
                }
                if constexpr (T::has_min) {
                    acc[m][v] = V::fma(T::template m<V>(heads), V::load_f32(ym.sum[piece][0][v * V::count]), acc[m][v]);
                }
            }
        }
    }
};

// More columns, see lanes-panels.h.
template <class V, class T> struct block_panels {
    using I = typename V::I;
    using F = typename V::F;
    using block = typename T::block;
    static constexpr int vectors = V::panel_vectors;
    static constexpr int rows = vectors * vector_rows<V>;
    static constexpr int length = 512, parts = length / QK8_0, sums = 4;
    static constexpr size_t bytes(int64_t n) { return n / (T::pieces * QK8_0) * sizeof(block); }

    static constexpr bool has_magnitudes = V::template has_magnitudes<T>;
    static constexpr int tile_columns = has_magnitudes && V::count == 2 ? 4 : V::panel_columns;

    // Pieces of the rows' blocks. Element i of a vector belongs to row i, and codes has four elements of each row, in order;
    // where has_magnitudes, it has -1 for negative ones and 0 for others, and `negative` the sum of the magnitudes of these.
    struct alignas(64) unpacked {
        I codes[parts][8][vectors];
        I magnitudes[has_magnitudes ? parts : 1][8][vectors];
        I negative[has_magnitudes ? parts : 1][halves<T>][vectors];
        F d[parts][halves<T>][vectors];
        F m[T::has_min ? parts : 1][vectors];
    };

    struct column {
        const block_q8_0 * y;
        const float * d;
        const block_sum<T> * sum;
    };

    struct columns {
        const void * const * cols;
        float * d;
        block_sum<T> * sum;
        int64_t blocks;

        static size_t size(int64_t n, int nc) { return nc * (n / QK8_0) * (sizeof(float) + halves<T> * sizeof(block_sum<T>)); }

        columns(int64_t n, const void * const * cols, int nc, char * memory, bool again) :
            cols(cols), d((float *) memory), sum((block_sum<T> *) (d + nc * (n / QK8_0))), blocks(n / QK8_0) {
            for (int c = 0; c < nc && !again; c++) {
                const block_q8_0 * y = (const block_q8_0 *) cols[c];
                for (int64_t b = 0; b < blocks; b++) {
                    d[c * blocks + b] = _cvtsh_ss(y[b].d);
                    if constexpr (T::has_min || code_bias<V, T> != 0) {
                        sums_of<V, T>(y[b], d[c * blocks + b], sum + (c * blocks + b) * halves<T>);
                    }
                }
            }
        }
        column at(int c, int64_t k) const {
            const int64_t b = k / QK8_0;
            return { (const block_q8_0 *) cols[c] + b, d + c * blocks + b, sum + (c * blocks + b) * halves<T> };
        }
    };

    static __attribute__((noinline, aligned(64))) void unpack(const char * p, size_t stride, int n, unpacked * to) {
        size_t lane[V::count];
        row_lanes<V>(stride, lane);
        for (int b = 0; b < n / T::pieces; b++) {
            LANES_UNROLL
            for (int v = 0; v < vectors; v++) {
                const char * from = p + v * vector_rows<V> * stride + b * sizeof(block);
                LANES_UNROLL
                for (int piece = 0; piece < T::pieces; piece++) {
                    const int part = b * T::pieces + piece;
                    I head[4], w[4][2];
                    LANES_UNROLL
                    for (int i = 0; i < 4; i++) {
                        head[i] = V::lanes(from + i * stride, lane);
                        T::template codes<V>(from + i * stride, lane, head[i], piece, w[i]);
                    }
                    const auto heads = lane_heads<V>(head);
                    F d[halves<T>];
                    T::template d<V>(heads, piece, d);
                    LANES_UNROLL
                    for (int half = 0; half < halves<T>; half++) {
                        to->d[part][half][v] = d[half];
                    }
                    if constexpr (T::has_min) {
                        to->m[part][v] = T::template m<V>(heads);
                    }
                    I negative = V::zero();
                    LANES_UNROLL
                    for (int i = 0; i < 2; i++) {
                        const I row[4] = { w[0][i], w[1][i], w[2][i], w[3][i] };
                        I fours[4];
                        transpose<V>(row, fours);
                        LANES_UNROLL
                        for (int j = 0; j < 4; j++) {
                            I & codes = to->codes[part][four<T>(4 * i + j)][v];
                            if constexpr (has_magnitudes) {
                                const I magnitudes = V::abs8(fours[j]);
                                to->magnitudes[part][four<T>(4 * i + j)][v] = magnitudes;
                                codes = V::negative8(fours[j]);
                                negative = V::sub16(negative, V::dot16(magnitudes, codes));
                            } else {
                                codes = fours[j];
                            }
                        }
                    }
                    if constexpr (has_magnitudes) {
                        static_assert(halves<T> == 1, "negative");
                        to->negative[part][0][v] = V::widened(V::zero(), negative);
                    }
                }
            }
        }
    }

    // total += part b of the rows times that of C columns
    template <int C> LANES_INLINE void add(const unpacked * w, const column * y, int b, F (*total)[vectors]) {
        constexpr int steps = V::template steps<T>;
        LANES_UNROLL
        for (int half = 0; half < halves<T>; half++) {
            I sum[C][vectors];
            LANES_UNROLL
            for (int c = 0; c < C; c++) {
                LANES_UNROLL
                for (int v = 0; v < vectors; v++) {
                    if constexpr (code_bias<V, T> != 0) {
                        sum[c][v] = V::broadcast(y[c].sum + b * halves<T> + half);
                    } else if constexpr (has_magnitudes) {
                        sum[c][v] = in_order(w->negative[b][half][v]);
                    } else {
                        sum[c][v] = V::zero();
                    }
                }
            }
            const I (*codes)[vectors] = w->codes[b] + half * (T::sub_block / 4);
            const I (*magnitudes)[vectors] = w->magnitudes[has_magnitudes ? b : 0] + half * (T::sub_block / 4);
            LANES_UNROLL
            for (int part = 0; part < T::sub_block / 4 / steps; part++) {
                I dot[C][vectors];
                LANES_UNROLL
                for (int c = 0; c < C; c++) {
                    LANES_UNROLL
                    for (int v = 0; v < vectors; v++) {
                        dot[c][v] = V::wide_dots ? sum[c][v] : V::zero();
                    }
                }
                LANES_UNROLL
                for (int i = 0; i < steps; i++) {
                    I wi[vectors], mi[vectors];
                    LANES_UNROLL
                    for (int v = 0; v < vectors; v++) {
                        if constexpr (has_magnitudes) {
                            wi[v] = in_order(codes[part * steps + i][v]);
                            mi[v] = in_order(magnitudes[part * steps + i][v]);
                        } else {
                            wi[v] = at_once(codes[part * steps + i][v]);
                        }
                    }
                    LANES_UNROLL
                    for (int c = 0; c < C; c++) {
                        const int8_t * from = y[c].y[b].qs + half * T::sub_block;
                        const I four_of_y = V::broadcast(from + 4 * (part * steps + i));
                        const I yi = has_magnitudes ? in_order(four_of_y) : at_once(four_of_y);
                        LANES_UNROLL
                        for (int v = 0; v < vectors; v++) {
                            if constexpr (has_magnitudes) {
                                sum[c][v] = in_order(V::widened(sum[c][v], V::signed_dot4(wi[v], mi[v], yi)));
                            } else {
                                dot[c][v] = at_once(V::template dot4<T>(dot[c][v], wi[v], yi));
                            }
                        }
                    }
                }
                LANES_UNROLL
                for (int c = 0; c < C && !has_magnitudes; c++) {
                    LANES_UNROLL
                    for (int v = 0; v < vectors; v++) {
                        sum[c][v] = V::wide_dots ? dot[c][v] : at_once(V::widened(sum[c][v], dot[c][v]));
                    }
                }
            }
            LANES_UNROLL
            for (int c = 0; c < C; c++) {
                const F d = V::setf(y[c].d[b]);
                LANES_UNROLL
                for (int v = 0; v < vectors; v++) {
                    total[c][v] = V::fma(V::to_float(sum[c][v]), V::mul(w->d[b][half][v], d), total[c][v]);
                    if constexpr (T::has_min) {
                        total[c][v] = V::fma(w->m[b][v], V::setf(y[c].sum[b]), total[c][v]);
                    }
                }
            }
        }
    }

    template <int C>
    static __attribute__((noinline, aligned(64))) void tile(const unpacked * w, const column * y, int n, float * acc, fetching next) {
        for (int first = 0; first < 4 * T::pieces; first += T::pieces, acc += rows) {
            F total[C][vectors];
            LANES_UNROLL
            for (int c = 0; c < C; c++) {
                LANES_UNROLL
                for (int v = 0; v < vectors; v++) {
                    total[c][v] = V::load_f32(acc + c * sums * rows + v * vector_rows<V>);
                }
            }
            for (int block = first; block < n; block += 4 * T::pieces) {
                for (int b = block; b < block + T::pieces; b++) {
                    next.fetch_some();
                    add<C>(w, y, b, total);
                }
            }
            LANES_UNROLL
            for (int c = 0; c < C; c++) {
                LANES_UNROLL
                for (int v = 0; v < vectors; v++) {
                    V::store_f32(acc + c * sums * rows + v * vector_rows<V>, total[c][v]);
                }
            }
        }
    }

    LANES_INLINE F sum(const float * acc) {
        const auto part = [acc](int i) LANES_ALWAYS { return V::load_f32(acc + i * rows); };
        return V::addf(V::addf(part(0), part(2)), V::addf(part(1), part(3)));
    }
};

template <class V, class T> constexpr product_kernel block_mul_mat = rows_or_panels<V, small_blocks<T>, block_panels<V, T>>;

}  // namespace
}  // namespace mtp
