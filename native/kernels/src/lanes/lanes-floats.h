// Products of f32, f16 and bf16 weights with columns of floats, see lanes.h. Each element of a vector
// accumulates a sum of its own over the row; the sums are added at the end.

#pragma once

#include "lanes-kernels.h"

#include <string.h>

namespace mtp {
namespace {

struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

// Elements of a row as floats, as ggml converts them. per: elements of a T; scale: what they are all multiplied with;
// load: a vector from element i of a T on, a multiple of V::floats
template <class T> struct float_row {
    static constexpr int per = 1;
    template <class V> LANES_INLINE typename V::F scale(const T &) { return V::zerof(); }
    template <class V> LANES_INLINE typename V::F load(const float * of, int i, typename V::F) { return V::load_f32(of + i); }
    template <class V> LANES_INLINE typename V::F load(const f16 * of, int i, typename V::F) { return V::load_f16(of + i); }
    template <class V> LANES_INLINE typename V::F load(const bf16 * of, int i, typename V::F) { return V::load_bf16(of + i); }
};

template <> struct float_row<block_q8_0> {
    static constexpr int per = 32;
    template <class V> LANES_INLINE typename V::F scale(const block_q8_0 & of) { return V::set_half(of.d); }
    template <class V> LANES_INLINE typename V::F load(const block_q8_0 * of, int i, typename V::F scale) {
        return V::mul(V::to_float(V::load_i8(of->qs + i)), scale);
    }
};

template <> struct float_row<block_q4_0> {
    static constexpr int per = 32;
    template <class V> LANES_INLINE typename V::F scale(const block_q4_0 & of) { return V::set_half(of.d); }
    template <class V> LANES_INLINE typename V::F load(const block_q4_0 * of, int i, typename V::F scale) {
        const auto pairs = V::srlv32(V::load_u8(of->qs + i % 16), V::set32(i / 16 * 4));
        return V::mul(V::to_float(V::add32(V::and_(pairs, V::set32(15)), V::set32(-8))), scale);
    }
};

// Elements that have one scale, a vector or more
template <class V, class T> constexpr int64_t float_step = float_row<T>::per > V::floats ? float_row<T>::per : V::floats;

// K vectors from element i of a row on. The scale of a T is read once for those of them that are in it.
template <class V, class T, int K> LANES_INLINE void load_floats(const T * row, size_t i, typename V::F * to) {
    constexpr int per = float_row<T>::per, in_one = float_step<V, T> / V::floats, step = in_one < K ? in_one : K;
    LANES_UNROLL
    for (int k = 0; k < K; k += step) {
        const T * of = row + (i + k * V::floats) / per;
        const int first = step < in_one ? (int) (i % per) : 0;
        const auto scale = float_row<T>::template scale<V>(*of);
        LANES_UNROLL
        for (int j = 0; j < step; j++) {
            to[k + j] = float_row<T>::template load<V>(of, first + j * V::floats, scale);
        }
    }
}

// What float_sums prefetches: nothing; the next rows, which follow these in memory; or the rows so many bytes from these, which
// have others between them, as the keys of one head: a line of each in each step, until these rows are over. All lines at once
// would wait for each other. They go to the L2 cache, as so many bytes may be half of the L1 cache.
struct no_fetch {
    template <class V, class T, int R> LANES_ALWAYS void lines(const T * const *, int64_t) const {}
};
struct fetch_next {
    rows_ahead ahead;
    template <class V, class T, int R> LANES_ALWAYS void lines(const T * const * w, int64_t k) const {
        constexpr int64_t step = float_step<V, T>, bytes = step * sizeof(T) / float_row<T>::per;
        fetch<R * bytes>((const char *) w[0] + R * k / step * bytes, ahead);
    }
};
struct fetch_strided {
    size_t bytes;
    int64_t n;
    template <class V, class T, int R> LANES_ALWAYS void lines(const T * const * w, int64_t k) const {
        constexpr int64_t step = float_step<V, T>;
        if (k / step * 64 < n / float_row<T>::per * (int64_t) sizeof(T)) {
            LANES_UNROLL
            for (int r = 0; r < R; r++) {
                fetch<64, 2>((const char *) w[r] + bytes + k / step * 64);
            }
        }
    }
};

// R rows, M columns, the first n elements.
template <class V, class T, int R, int M, class Fetch>
LANES_INLINE void float_sums(int64_t n, const T * const * w, const float * const * x, typename V::F (*acc)[M], Fetch next) {
    constexpr int per = float_row<T>::per;
    constexpr int64_t step = float_step<V, T>;
    for (int64_t k = 0; k < n; k += step) {
        next.template lines<V, T, R>(w, k);
        typename V::F scale[R];
        LANES_UNROLL
        for (int r = 0; r < R; r++) {
            scale[r] = float_row<T>::template scale<V>(w[r][k / per]);
        }
        LANES_UNROLL
        for (int v = 0; v < step / V::floats; v++) {
            typename V::F wk[R];
            LANES_UNROLL
            for (int r = 0; r < R; r++) {
                wk[r] = float_row<T>::template load<V>(w[r] + k / per, v * V::floats, scale[r]);
            }
            LANES_UNROLL
            for (int m = 0; m < M; m++) {
                const auto xk = V::load_f32(x[m] + k + v * V::floats);
                LANES_UNROLL
                for (int r = 0; r < R; r++) {
                    acc[r][m] = V::fma(wk[r], xk, acc[r][m]);
                }
            }
        }
    }
}

// The sums of N vectors, each with the bits that V::sum has.
template <class V, int N> LANES_INLINE void sums_of(const typename V::F * a, float * sums) {
    constexpr int together = V::sums_as_rows ? N - N % V::state_rows : 0;
    LANES_UNROLL
    for (int i = 0; i < together; i += V::state_rows) {
        V::row_sums(a + i, sums + i);
    }
    LANES_UNROLL
    for (int i = together; i < N; i++) {
        sums[i] = V::sum(a[i]);
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
    const bool strided = stride != bytes;  // as the keys of one head
    const rows_ahead ahead(R, stride, how);
    const size_t far_ahead = 16384 / stride * stride;
    for (int64_t r0 = 0; r0 < nr; r0 += R) {
        const T * row[R];
        typename V::F acc[R][M];
        for (int r = 0; r < R; r++) {
            row[r] = (const T *) (w + (r0 + r < nr ? r0 + r : nr - 1) * stride);
            for (int m = 0; m < M; m++) {
                acc[r][m] = V::zerof();
            }
        }
        if (strided) {
            float_sums<V, T, R, M>(whole, row, x, acc, fetch_strided{ far_ahead, whole });
        } else {
            float_sums<V, T, R, M>(whole, row, x, acc, fetch_next{ ahead });
        }
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
                float_sums<V, T, R, M>(V::floats, w_ends, x_ends, acc, no_fetch{});
            }
        }
        float sums[R][M];
        sums_of<V, R * M>(acc[0], sums[0]);
        for (int r = 0; r < R && r0 + r < nr; r++) {
            for (int m = 0; m < M; m++) {
                dst[m][r0 + r] = sums[r][m];
            }
        }
    }
}

// How many columns are multiplied at a time: the registers hold the sums of four with V::float_rows rows. Quants take longer to
// convert, so they take twice as many columns with half of the rows, where there are registers for four rows.
template <class V, class T> constexpr int most_columns = float_row<T>::per > 1 && V::float_rows == 4 ? 8 : 4;

template <class V, class T>
void float_mul_mat(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc,
                   reading how) {
    constexpr int R = V::float_rows, most = most_columns<V, T>;
    for (; nc >= most; nc -= most, cols += most, dst += most) {
        float_rows<V, T, R * 4 / most, most>(n, w, stride, nr, cols, dst, how);
    }
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
