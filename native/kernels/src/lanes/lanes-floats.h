// Products of f32, f16 and bf16 weights with columns of floats, see lanes.h. Each element of a vector
// accumulates a sum of its own over the row; the sums are added at the end.

#pragma once

#include "lanes-kernels.h"

#include <string.h>

namespace mtp {
namespace {

// A vector of floats from element i of a row on, which is a multiple of V::floats. per: elements of a T
template <class T> struct float_row;

template <> struct float_row<float> {
    static constexpr int per = 1;
    template <class V> LANES_INLINE typename V::F load(const float * row, size_t i) { return V::load_f32(row + i); }
};

struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

template <> struct float_row<f16> {
    static constexpr int per = 1;
    template <class V> LANES_INLINE typename V::F load(const f16 * row, size_t i) { return V::load_f16(row + i); }
};

template <> struct float_row<bf16> {
    static constexpr int per = 1;
    template <class V> LANES_INLINE typename V::F load(const bf16 * row, size_t i) { return V::load_bf16(row + i); }
};

// Quants of a KV cache, as ggml converts them
template <> struct float_row<block_q8_0> {
    static constexpr int per = 32;
    template <class V> LANES_INLINE typename V::F load(const block_q8_0 * row, size_t i) {
        const block_q8_0 & of = row[i / per];
        return V::mul(V::to_float(V::load_i8(of.qs + i % per)), V::set_half(of.d));
    }
};

template <> struct float_row<block_q4_0> {
    static constexpr int per = 32;
    template <class V> LANES_INLINE typename V::F load(const block_q4_0 * row, size_t i) {
        const block_q4_0 & of = row[i / per];
        const auto pairs = V::srlv32(V::load_u8(of.qs + i % 16), V::set32((int) (i % per / 16 * 4)));
        return V::mul(V::to_float(V::add32(V::and_(pairs, V::set32(15)), V::set32(-8))), V::set_half(of.d));
    }
};

// R rows, M columns, from element n0 to n1. ahead: how to prefetch the next rows, or NULL.
template <class V, class T, int R, int M>
LANES_INLINE void float_sums(int64_t n0, int64_t n1, const T * const * w, const float * const * x, typename V::F (*acc)[M],
                             const rows_ahead * ahead) {
    for (int64_t k = n0; k < n1; k += V::floats) {
        if (ahead) {
            fetch<R * V::floats * sizeof(T)>((const char *) w[0] + R * k * sizeof(T), *ahead);
        }
        typename V::F wk[R];
        LANES_UNROLL
        for (int r = 0; r < R; r++) {
            wk[r] = float_row<T>::template load<V>(w[r], (size_t) k);
        }
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            const auto xk = V::load_f32(x[m] + k);
            LANES_UNROLL
            for (int r = 0; r < R; r++) {
                acc[r][m] = V::fma(wk[r], xk, acc[r][m]);
            }
        }
    }
}

template <class V, class T, int R, int M>
void float_rows(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst,
                reading how) {
    const float * x[M];
    LANES_UNROLL
    for (int m = 0; m < M; m++) {
        x[m] = (const float *) cols[m];
    }
    const int64_t whole = n - n % V::floats;
    const size_t bytes = n * sizeof(T) / float_row<T>::per;
    const bool apart = stride != bytes;  // as the keys of one head
    const rows_ahead ahead(R, stride, how);
    const size_t far_ahead = 8192 / stride * stride;
    for (int64_t r0 = 0; r0 < nr; r0 += R) {
        const T * row[R];
        typename V::F acc[R][M];
        for (int r = 0; r < R; r++) {
            row[r] = (const T *) (w + (r0 + r < nr ? r0 + r : nr - 1) * stride);
            for (int m = 0; m < M; m++) {
                acc[r][m] = V::zerof();
            }
        }
        if (apart) {
            for (int r = 0; r < R; r++) {
                for (size_t at = 0; at < bytes; at += 64) {
                    fetch<64>((const char *) row[r] + far_ahead + at);
                }
            }
        }
        float_sums<V, T, R, M>(0, whole, row, x, acc, apart ? NULL : &ahead);
        if constexpr (float_row<T>::per == 1) {
            if (whole < n) {
                T w_end[R][V::floats] = {};
                float x_end[M][V::floats] = {};
                const T * w_ends[R];
                const float * x_ends[M];
                for (int r = 0; r < R; r++) {
                    memcpy(w_end[r], row[r] + whole, (n - whole) * sizeof(T));
                    w_ends[r] = w_end[r];
                }
                for (int m = 0; m < M; m++) {
                    memcpy(x_end[m], x[m] + whole, (n - whole) * sizeof(float));
                    x_ends[m] = x_end[m];
                }
                float_sums<V, T, R, M>(0, V::floats, w_ends, x_ends, acc, NULL);
            }
        }
        for (int r = 0; r < R && r0 + r < nr; r++) {
            for (int m = 0; m < M; m++) {
                dst[m][r0 + r] = V::sum(acc[r][m]);
            }
        }
    }
}

// Four columns at a time: the registers hold no more sums.
template <class V, class T>
void float_mul_mat(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc,
                   reading how) {
    constexpr int R = V::float_rows;
    for (; nc > 4; nc -= 4, cols += 4, dst += 4) {
        float_rows<V, T, R, 4>(n, w, stride, nr, cols, dst, how);
    }
    switch (nc) {
        case 1: return float_rows<V, T, R, 1>(n, w, stride, nr, cols, dst, how);
        case 2: return float_rows<V, T, R, 2>(n, w, stride, nr, cols, dst, how);
        case 3: return float_rows<V, T, R, 3>(n, w, stride, nr, cols, dst, how);
        case 4: return float_rows<V, T, R, 4>(n, w, stride, nr, cols, dst, how);
    }
}

}  // namespace
}  // namespace mtp
