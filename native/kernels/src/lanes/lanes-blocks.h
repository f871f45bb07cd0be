// Products of the formats of lanes-formats.h, which have blocks of 32, and block_q8_0; see lanes-kernels.h.
//
// The product of a row and a column has four sums, of the blocks 0, 4, 8, … of the row, of 1, 5, 9, … and so on, each added up
// in that order: acc = fma(sum of code * activation, d * d of the activations, acc), and for formats with minima
// acc = fma(m, sum of activations, acc). The result is (first + third) + (second + fourth).

#pragma once

#include "lanes-formats.h"
#include "lanes-panels.h"

#include <type_traits>

namespace mtp {
namespace {

// What has to be taken off codes that are unsigned.
template <class V, class T> constexpr int code_bias = T::is_signed ? V::offset_codes ? 128 : 0 : T::bias;

// Of a block of activations: -code_bias times their sum or, where there are minima, d times their sum.
template <class T> using block_sum = std::conditional_t<T::has_min, float, int32_t>;

template <class V, class T> LANES_INLINE block_sum<T> sum_of(const block_q8_0 & y, float d) {
    const __m256i q = _mm256_loadu_si256((const __m256i *) y.qs);
    const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), q), _mm256_set1_epi16(1));
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1));
    const int32_t sum = _mm_cvtsi128_si32(x);
    if constexpr (T::has_min) {
        return d * (float) sum;
    } else {
        return -code_bias<V, T> * sum;
    }
}

// Four consecutive blocks of a column; zeros beyond its end. d and sum are there for each element of a lane.
template <class V, class T> struct alignas(64) four_blocks {
    int8_t qs[2][4][16];
    float d[4][4];
    block_sum<T> sum[4][4];

    static void arrange(const block_q8_0 * from, int64_t blocks, four_blocks * to) {
        for (int64_t b = 0; b < blocks; b += 4, to++) {
            if (blocks - b < 4) {
                memset(to, 0, sizeof(*to));
            }
            for (int l = 0; l < 4 && b + l < blocks; l++) {
                const block_q8_0 & y = from[b + l];
                memcpy(to->qs[0][l], y.qs, 16);
                memcpy(to->qs[1][l], y.qs + 16, 16);
                const float d = _cvtsh_ss(y.d);
                const auto sum = sum_of<V, T>(y, d);
                LANES_UNROLL
                for (int i = 0; i < 4; i++) {
                    to->d[l][i] = d;
                    to->sum[l][i] = sum;
                }
            }
        }
    }
};

// Up to eight columns: four rows at a time, V::count blocks of each.
template <class T> struct small_blocks {
    using block = typename T::block;

    template <class V, int M>
    static void product(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst) {
        const int64_t blocks = n / QK8_0, groups = (blocks + 3) / 4;
        auto * arranged = (four_blocks<V, T> *) scratch(M * groups * sizeof(four_blocks<V, T>));
        for (int m = 0; m < M; m++) {
            four_blocks<V, T>::arrange((const block_q8_0 *) cols[m], blocks, arranged + m * groups);
        }
        const rows_ahead ahead(4, stride);
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
        typename V::I head[4], w[4][2];
        LANES_UNROLL
        for (int i = 0; i < 4; i++) {
            head[i] = V::lanes(row[i] + at, lane);
            T::template codes<V>(row[i] + at, lane, head[i], w[i]);
        }
        const auto heads = lane_heads<V>(head);
        const auto d = T::template d<V>(heads);
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            const four_blocks<V, T> & ym = y[m * groups];
            const auto y0 = V::all(ym.qs[0][v * V::count]), y1 = V::all(ym.qs[1][v * V::count]);
            typename V::I dot[4];
            LANES_UNROLL
            for (int i = 0; i < 4; i++) {
                dot[i] = V::template sums<T::is_signed>(w[i][0], y0, w[i][1], y1);
            }
            auto sum = lane_sums<V>(dot);
            if constexpr (code_bias<V, T> != 0) {
                sum = V::add32(sum, V::all(ym.sum[v * V::count]));
            }
            acc[m][v] = V::fma(V::to_float(sum), V::mul(d, V::load_f32(ym.d[v * V::count])), acc[m][v]);
            if constexpr (T::has_min) {
                acc[m][v] = V::fma(T::template m<V>(heads), V::load_f32(ym.sum[v * V::count]), acc[m][v]);
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
    static constexpr size_t bytes(int64_t n) { return n / QK8_0 * sizeof(block); }

    // Blocks of the rows. Element i of a vector belongs to row i, and codes has four elements of each row.
    struct alignas(64) unpacked {
        I codes[parts][8][vectors];
        F d[parts][vectors];
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

        static size_t size(int64_t n, int nc) { return nc * (n / QK8_0) * (sizeof(float) + sizeof(block_sum<T>)); }

        columns(int64_t n, const void * const * cols, int nc, char * memory) :
            cols(cols), d((float *) memory), sum((block_sum<T> *) (d + nc * (n / QK8_0))), blocks(n / QK8_0) {
            for (int c = 0; c < nc; c++) {
                const block_q8_0 * y = (const block_q8_0 *) cols[c];
                for (int64_t b = 0; b < blocks; b++) {
                    d[c * blocks + b] = _cvtsh_ss(y[b].d);
                    sum[c * blocks + b] = sum_of<V, T>(y[b], d[c * blocks + b]);
                }
            }
        }
        column at(int c, int64_t k) const {
            const int64_t b = k / QK8_0;
            return { (const block_q8_0 *) cols[c] + b, d + c * blocks + b, sum + c * blocks + b };
        }
    };

    static __attribute__((noinline, aligned(64))) void unpack(const char * p, size_t stride, int blocks, unpacked * to) {
        size_t lane[V::count];
        row_lanes<V>(stride, lane);
        for (int b = 0; b < blocks; b++) {
            LANES_UNROLL
            for (int v = 0; v < vectors; v++) {
                const char * from = p + v * vector_rows<V> * stride + b * sizeof(block);
                I head[4], w[4][2];
                LANES_UNROLL
                for (int i = 0; i < 4; i++) {
                    head[i] = V::lanes(from + i * stride, lane);
                    T::template codes<V>(from + i * stride, lane, head[i], w[i]);
                }
                const auto heads = lane_heads<V>(head);
                to->d[b][v] = T::template d<V>(heads);
                if constexpr (T::has_min) {
                    to->m[b][v] = T::template m<V>(heads);
                }
                LANES_UNROLL
                for (int half = 0; half < 2; half++) {
                    const I row[4] = { w[0][half], w[1][half], w[2][half], w[3][half] };
                    I fours[4];
                    transpose<V>(row, fours);
                    LANES_UNROLL
                    for (int i = 0; i < 4; i++) {
                        to->codes[b][4 * half + i][v] = fours[i];
                    }
                }
            }
        }
    }

    template <int C>
    static __attribute__((noinline, aligned(64))) void tile(const unpacked * w, const column * y, int blocks, float * acc, fetching next) {
        constexpr int steps = V::template steps<T>;
        for (int first = 0; first < 4; first++, acc += rows) {
            F total[C][vectors];
            LANES_UNROLL
            for (int c = 0; c < C; c++) {
                LANES_UNROLL
                for (int v = 0; v < vectors; v++) {
                    total[c][v] = V::load_f32(acc + c * sums * rows + v * vector_rows<V>);
                }
            }
            for (int b = first; b < blocks; b += 4) {
                for (int i = 0; i < next.lines; i++) {
                    fetch<1, 2>(next.at + 64 * i);
                }
                next.at += next.bytes;
                I sum[C][vectors];
                LANES_UNROLL
                for (int c = 0; c < C; c++) {
                    LANES_UNROLL
                    for (int v = 0; v < vectors; v++) {
                        if constexpr (code_bias<V, T> != 0) {
                            sum[c][v] = V::broadcast(y[c].sum + b);
                        } else {
                            sum[c][v] = V::zero();
                        }
                    }
                }
                LANES_UNROLL
                for (int part = 0; part < 8 / steps; part++) {
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
                        I wi[vectors];
                        LANES_UNROLL
                        for (int v = 0; v < vectors; v++) {
                            wi[v] = at_once(w->codes[b][part * steps + i][v]);
                        }
                        LANES_UNROLL
                        for (int c = 0; c < C; c++) {
                            const I yi = at_once(V::broadcast(y[c].y[b].qs + 4 * (part * steps + i)));
                            LANES_UNROLL
                            for (int v = 0; v < vectors; v++) {
                                dot[c][v] = at_once(V::template dot4<T>(dot[c][v], wi[v], yi));
                            }
                        }
                    }
                    LANES_UNROLL
                    for (int c = 0; c < C; c++) {
                        LANES_UNROLL
                        for (int v = 0; v < vectors; v++) {
                            sum[c][v] = V::wide_dots ? dot[c][v] : V::widened(sum[c][v], dot[c][v]);
                        }
                    }
                }
                LANES_UNROLL
                for (int c = 0; c < C; c++) {
                    const F d = V::setf(y[c].d[b]);
                    LANES_UNROLL
                    for (int v = 0; v < vectors; v++) {
                        total[c][v] = V::fma(V::to_float(sum[c][v]), V::mul(w->d[b][v], d), total[c][v]);
                        if constexpr (T::has_min) {
                            total[c][v] = V::fma(w->m[b][v], V::setf(y[c].sum[b]), total[c][v]);
                        }
                    }
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

    static void finish(const float * acc, float * to, int n) {
        for (int r = 0; r < n; r++) {
            to[r] = (acc[r] + acc[2 * rows + r]) + (acc[rows + r] + acc[3 * rows + r]);
        }
    }
};

template <class V, class T>
void block_mul_mat(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc) {
    constexpr int from = V::count == 2 && !V::wide_dots ? 6 : LANES_COLS + 1;  // as in panels_pay
    if (nc < from) {
        mul_mat<V, small_blocks<T>>(n, w, stride, nr, cols, dst, nc);
    } else {
        panel_product<V, block_panels<V, T>>::product(n, w, stride, nr, cols, dst, nc);
    }
}

}  // namespace
}  // namespace mtp
