// Products of types with blocks of 256 and many columns, see lanes-kernels.h. A panel of rows is unpacked
// block by block, each block once for all columns; each 32-bit element of a vector belongs to one row.
// The products have the same bits as those of super_blocks.

#pragma once

#include "lanes-super-blocks.h"

namespace mtp {
namespace {

// Weights to fetch, so many bytes with each part of a stretch. The number of lines is constant, so that it is predicted; it is
// usually 1.
struct fetching {
    const char * at;
    int bytes, lines;

    LANES_ALWAYS inline void fetch_some() {
        fetch<1, 2>(at);
        for (int i = 1; __builtin_expect(i < lines, 0); i++) {
            fetch<1, 2>(at + 64 * i);
        }
        at += bytes;
    }
};

// The product of rows with many columns, stretch by stretch of a panel of rows.
//
//     P::rows               of a panel, and tile_columns: the most columns that a tile takes
//     P::length, parts      elements of a stretch, and parts of it that a tile takes one by one
//     P::bytes(n)           that n elements of a row take; a stretch at the end of a row may be shorter
//     P::unpacked           a stretch of the rows
//     P::unpack(p, stride, parts, to)
//     P::column             a stretch of a column; P::columns(n, cols, nc, memory, again) has them all, in columns::size(n, nc)
//                           bytes, which the call before filled if `again`
//     P::tile<C>(w, columns, parts, acc, next)   acc[c] += the stretch of the rows times that of each of C columns
//     P::sums               floats of acc for each row and column, and sum(acc) adds them up for a vector of rows
template <class V, class P> struct panel_product {
    static constexpr int rows = P::rows;

    static void product(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc,
                        bool again) {
        const size_t columns_size = GGML_PAD(P::columns::size(n, nc), 64), acc_size = nc * rows * P::sums * sizeof(float);
        const size_t stretch_size = P::bytes(P::length);
        char * memory = (char *) scratch(sizeof(typename P::unpacked) + columns_size + acc_size + rows * stretch_size);
        auto * unpacked = (typename P::unpacked *) memory;
        const typename P::columns from(n, cols, nc, memory + sizeof(*unpacked), again);
        float * acc = (float *) (memory + sizeof(*unpacked) + columns_size);
        char * apart = (char *) acc + acc_size;

        for (int64_t r0 = 0; r0 < nr; r0 += rows) {
            const int take = nr - r0 < rows ? (int) (nr - r0) : rows;
            memset(acc, 0, acc_size);
            for (int64_t k = 0; k < n; k += P::length) {
                const int parts = (int) ((n - k < P::length ? n - k : P::length) / (P::length / P::parts));
                const size_t size = P::bytes(parts * (P::length / P::parts));
                const char * p = w + r0 * stride + P::bytes(k);
                size_t step = stride;
                if (take < rows) {
                    memset(apart, 0, rows * stretch_size);
                    for (int r = 0; r < take; r++) {
                        memcpy(apart + r * stretch_size, p + r * stride, size);
                    }
                    p = apart;
                    step = stretch_size;
                }
                // The next stretch of each row is in the L2 cache.
                for (int r = 0; r < rows && k + P::length < n; r++) {
                    fetch<P::bytes(P::length)>(w + (r0 + r) * stride + P::bytes(k + P::length) + 63);
                }
                P::unpack(p, step, parts, unpacked);
                // Meanwhile, prefetch the next panel into the L2 cache, at an even pace: other loads wait for bursts.
                const int tiles = (nc + P::tile_columns - 1) / P::tile_columns;
                const int bytes = (int) ((rows * size + tiles * parts - 1) / (tiles * parts));
                fetching next = { w + (r0 + rows) * stride + P::bytes(k) * rows, bytes, (bytes + 63) / 64 };
                for (int c = 0, t = tiles; c < nc; t--) {
                    const int some = (nc - c + t - 1) / t;
                    typename P::column y[P::tile_columns];
                    for (int i = 0; i < some; i++) {
                        y[i] = from.at(c + i, k);
                        // The stores at the end of the panel shall find their cache lines.
                        for (int r = 0; k == 0 && r < take; r += vector_rows<V>) {
                            __builtin_prefetch(dst[c + i] + r0 + r, 1);
                        }
                    }
                    columns(some, unpacked, y, parts, acc + c * rows * P::sums, next);
                    next.at += parts * next.bytes;
                    c += some;
                }
            }
            for (int c = 0; c < nc; c++) {
                store(acc + c * rows * P::sums, dst[c] + r0, take);
            }
        }
    }

    // The sums of the first n rows of a column
    LANES_INLINE void store(const float * acc, float * to, int n) {
        alignas(64) float all[rows];
        LANES_UNROLL
        for (int v = 0; v < P::vectors; v++) {
            V::store_f32((n < rows ? all : to) + v * vector_rows<V>, P::sum(acc + v * vector_rows<V>));
        }
        if (n < rows) {
            memcpy(to, all, n * sizeof(float));
        }
    }

    LANES_INLINE void columns(int n, const typename P::unpacked * w, const typename P::column * y, int parts, float * acc, fetching next) {
        static_assert(P::tile_columns <= 6, "cases");
        switch (n) {
            case 1: return P::template tile<1>(w, y, parts, acc, next);
            case 2: return P::template tile<2>(w, y, parts, acc, next);
            case 3: return P::template tile<P::tile_columns < 3 ? 1 : 3>(w, y, parts, acc, next);
            case 4: return P::template tile<P::tile_columns < 4 ? 1 : 4>(w, y, parts, acc, next);
            case 5: return P::template tile<P::tile_columns < 5 ? 1 : 5>(w, y, parts, acc, next);
            case 6: return P::template tile<P::tile_columns < 6 ? 1 : 6>(w, y, parts, acc, next);
        }
    }
};

// A vector of rows as addresses: where the rows of each lane begin.
template <class V> LANES_INLINE void row_lanes(size_t stride, size_t * lane) {
    LANES_UNROLL
    for (int l = 0; l < V::count; l++) {
        lane[l] = 4 * l * stride;
    }
}

// Blocks of 256 in T's layout.
template <class V, class T> struct super_panels {
    using I = typename V::I;
    using block = typename T::block;
    static constexpr int vectors = V::panel_vectors;
    static constexpr int rows = vectors * vector_rows<V>, tile_columns = V::panel_columns;
    static constexpr int length = QK_K, parts = QK_K / T::sub_block, sums = 1;
    static constexpr size_t bytes(int64_t n) { return n / QK_K * sizeof(block); }
    struct unpacked { unpacked_rows<V> of[vectors]; };

    // A block of a column
    struct column {
        const block_q8_K * y;
        const int16_t * sums;    // without biases: of 32 elements, or of 16 where T::least takes these
        const int32_t * biases;  // with biases: minus T::bias times the activations of each part
    };

    // Whether the sum of each part begins with its bias, so that no product with T::least is needed.
    static constexpr bool has_biases = V::wide_dots && !T::has_min && T::template least<V> > 0;

    template <bool Biases> struct columns_with {
        const void * const * cols;
        char * memory;
        int64_t blocks;

        // of a block, in memory
        static constexpr size_t block_size = Biases ? parts * sizeof(int32_t) : T::template least<V> == 4 ? 8 * sizeof(int16_t) : 0;
        static size_t size(int64_t n, int nc) { return nc * (n / QK_K) * block_size; }

        columns_with(int64_t n, const void * const * cols, int nc, char * memory, bool again) :
            cols(cols), memory(memory), blocks(n / QK_K) {
            for (int c = 0; c < nc && block_size > 0 && !again; c++) {
                const block_q8_K * y = (const block_q8_K *) cols[c];
                for (int64_t b = 0; b < blocks; b++, y++, memory += block_size) {
                    if constexpr (Biases) {
                        for (int i = 0; i < parts; i++) {
                            ((int32_t *) memory)[i] = -T::bias * (parts == 16 ? y->bsums[i] : y->bsums[2 * i] + y->bsums[2 * i + 1]);
                        }
                    } else {
                        const auto half = [y](int i) { return _mm_loadu_si128((const __m128i *) y->bsums + i); };
                        _mm_storeu_si128((__m128i *) memory, _mm_hadd_epi16(half(0), half(1)));
                    }
                }
            }
        }
        column at(int c, int64_t k) const {
            const block_q8_K * y = (const block_q8_K *) cols[c] + k / QK_K;
            const char * own = memory + (c * blocks + k / QK_K) * block_size;
            return { y, block_size > 0 ? (const int16_t *) own : y->bsums, (const int32_t *) own };
        }
    };
    using columns = columns_with<has_biases>;

    LANES_INLINE typename V::F sum(const float * acc) { return V::load_f32(acc); }

    // Unpacks a block of each row. It and tile are functions of their own, and aligned: such long code runs up to a
    // fifth slower elsewhere.
    static __attribute__((noinline, aligned(64))) void unpack(const char * p, size_t stride, int, unpacked * to) {
        size_t lane[V::count];
        row_lanes<V>(stride, lane);
        for (int v = 0; v < vectors; v++) {
            T::template unpack<V>(p + v * vector_rows<V> * stride, stride, lane, to->of[v]);
        }
    }

    // acc += a block of each row times one of C columns
    template <int C> static __attribute__((noinline, aligned(64))) void tile(const unpacked * panel, const column * columns, int, float * acc, fetching next) {
        const unpacked_rows<V> * w = panel->of;
        constexpr int steps = V::template steps<T>, least = T::template least<V>;
        const char * y[C];
        I sum[vectors][C];
        LANES_UNROLL
        for (int c = 0; c < C; c++) {
            y[c] = (const char *) columns[c].y->qs;
            LANES_UNROLL
            for (int v = 0; v < vectors; v++) {
                sum[v][c] = V::zero();
            }
        }
        if constexpr (least > 0 && !T::has_min && !has_biases) {
            least_sums<C>(w, columns, sum);
        }
        const I * codes = w[0].codes;
        const I * scales = w[0].scales;
        constexpr int64_t other = sizeof(unpacked_rows<V>) / sizeof(I);
        for (int s = 0; s < parts; s++, scales++) {
            next.fetch_some();
            LANES_UNROLL
            for (int part = 0; part < T::sub_block / 4 / steps; part++) {
                I dot[vectors][C];
                LANES_UNROLL
                for (int c = 0; c < C; c++) {
                    LANES_UNROLL
                    for (int v = 0; v < vectors; v++) {
                        dot[v][c] = has_biases ? V::broadcast(columns[c].biases + s) : V::zero();
                    }
                }
                LANES_UNROLL
                for (int i = 0; i < steps; i++) {
                    I wi[vectors];
                    LANES_UNROLL
                    for (int v = 0; v < vectors; v++) {
                        wi[v] = at_once(codes[v * other + part * steps + i]);
                    }
                    LANES_UNROLL
                    for (int c = 0; c < C; c++) {
                        const I yi = at_once(V::broadcast(y[c] + 4 * (part * steps + i)));
                        LANES_UNROLL
                        for (int v = 0; v < vectors; v++) {
                            dot[v][c] = at_once(V::template dot4<T>(dot[v][c], wi[v], yi));
                        }
                    }
                }
                LANES_UNROLL
                for (int v = 0; v < vectors; v++) {
                    LANES_UNROLL
                    for (int c = 0; c < C; c++) {
                        sum[v][c] = V::scaled_sum(sum[v][c], dot[v][c], scales[v * other]);
                    }
                }
            }
            codes += T::sub_block / 4;
            LANES_UNROLL
            for (int c = 0; c < C; c++) {
                y[c] += T::sub_block;
            }
        }
        I low[vectors][C];
        if constexpr (T::has_min) {
            LANES_UNROLL
            for (int c = 0; c < C; c++) {
                LANES_UNROLL
                for (int v = 0; v < vectors; v++) {
                    low[v][c] = V::zero();
                }
            }
            least_sums<C>(w, columns, low);
        }
        LANES_UNROLL
        for (int c = 0; c < C; c++) {
            const auto d = V::setf(columns[c].y->d);
            LANES_UNROLL
            for (int v = 0; v < vectors; v++) {
                auto x = V::mul(V::to_float(sum[v][c]), w[v].d);
                if constexpr (T::has_min) {
                    x = V::fnma(w[v].dmin, V::to_float(low[v][c]), x);
                }
                float * to = acc + c * rows + v * vector_rows<V>;
                V::store_f32(to, V::fma(x, d, V::load_f32(to)));
            }
        }
    }

    // sum += word pairs of w times those of the columns
    template <int C> LANES_INLINE void least_sums(const unpacked_rows<V> * w, const column * columns, I (*sum)[C]) {
        LANES_UNROLL
        for (int i = 0; i < T::template least<V>; i++) {
            LANES_UNROLL
            for (int c = 0; c < C; c++) {
                const I y = V::broadcast(columns[c].sums + 2 * i);
                LANES_UNROLL
                for (int v = 0; v < vectors; v++) {
                    sum[v][c] = V::add_madd16(sum[v][c], w[v].least[i], y);
                }
            }
        }
    }
};

// The product with any number of columns: K's with few of them, P's with many.
template <class V, class K, class P>
void rows_or_panels(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc,
                    reading how) {
    if (uses_panels(how, nc)) {
        panel_product<V, P>::product(n, w, stride, nr, cols, dst, nc, how.again);
    } else {
        mul_mat<V, K>(n, w, stride, nr, cols, dst, nc, how);
    }
}

}  // namespace
}  // namespace mtp
