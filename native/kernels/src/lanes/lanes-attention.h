// Attention of a few queries, see lanes.h.

#pragma once

#include "lanes-floats.h"

#include <math.h>

namespace mtp {
namespace {

// s * scale + mask * slope for whole vectors.
template <class V>
LANES_INLINE typename V::F score_vectors(int64_t n, float * s, float scale, const uint16_t * mask, float slope, typename V::F most) {
    for (int64_t i = 0; i < n; i += V::floats) {
        const auto si = V::fma(V::load_f16(mask + i), V::setf(slope), V::mul(V::load_f32(s + i), V::setf(scale)));
        V::store_f32(s + i, si);
        most = V::maxf(si, most);
    }
    return most;
}

template <class V> float attention_scores(int64_t n, float * s, float scale, const uint16_t * mask, float slope) {
    const int64_t whole = n - n % V::floats;
    auto most = score_vectors<V>(whole, s, scale, mask, slope, V::setf(-INFINITY));
    if (whole < n) {
        constexpr uint16_t hidden = 0xfc00;  // minus infinity
        uint16_t mask_end[V::floats];
        for (int64_t i = 0; i < V::floats; i++) {
            mask_end[i] = whole + i < n ? mask[whole + i] : hidden;
        }
        memset(s + n, 0, (whole + V::floats - n) * sizeof(float));
        most = score_vectors<V>(V::floats, s + whole, scale, mask_end, slope, most);
    }
    float each[V::floats];
    V::store_f32(each, most);
    float max = -INFINITY;
    for (float x : each) {
        max = x > max ? x : max;
    }
    return max;
}

// exp(x) for x <= 0: 2^n times exp(r) for x = n * ln 2 + r, where |r| is at most half of ln 2. The polynomial is Taylor's;
// what it leaves out is less than a tenth of a unit in the last place. ln 2 is taken off in two parts, the first of which
// has so few bits that its product with n is exact.
template <class V> LANES_INLINE typename V::F exp_negative(typename V::F x) {
    x = V::maxf(x, V::setf(-120.0f));  // its exponential is 0
    const auto n = V::nearest(V::mul(x, V::setf(1.44269504f)));
    auto r = V::fnma(n, V::setf(0.693145752f), x);
    r = V::fnma(n, V::setf(1.42860677e-6f), r);
    constexpr float taylor[] = { 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f };
    auto e = V::setf(taylor[0]);
    LANES_UNROLL
    for (int i = 1; i < 8; i++) {
        e = V::fma(e, r, V::setf(taylor[i]));
    }
    return V::times_power(e, n);
}

// exp(s - most), and the sum. What each addition rounds away is kept, so that the sum in single precision is the same wherever
// the positions lie: a sequence may have others after its state was restored.
template <class V> double attention_weights(int64_t n, float * s, float most) {
    auto sum = V::zerof(), lost = V::zerof();
    for (int64_t i = 0; i < n; i += V::floats) {
        const auto e = exp_negative<V>(V::subf(V::load_f32(s + i), V::setf(most)));
        V::store_f32(s + i, e);
        const auto next = V::addf(sum, e);
        const auto added = V::subf(next, sum);
        lost = V::addf(lost, V::addf(V::subf(sum, V::subf(next, added)), V::subf(e, added)));
        sum = next;
    }
    float sums[V::floats], rests[V::floats];
    V::store_f32(sums, sum);
    V::store_f32(rests, lost);
    double all = 0;
    for (int64_t i = 0; i < V::floats; i++) {
        all += (double) sums[i] + rests[i];
    }
    return all;
}

// Adds rows [0, nr) to the floats [d, d + K * V::floats) of M sums, which stay in registers.
template <class V, class T, int K, int M>
LANES_INLINE void mix_rows(int64_t d, const char * v, size_t stride, int64_t nr, const float * const * p, float * const * dst) {
    typename V::F acc[M][K];
    LANES_UNROLL
    for (int m = 0; m < M; m++) {
        LANES_UNROLL
        for (int k = 0; k < K; k++) {
            acc[m][k] = V::load_f32(dst[m] + d + k * V::floats);
        }
    }
    for (int64_t r = 0; r < nr; r++) {
        const T * row = (const T *) (v + r * stride);
        fetch<K * V::floats * sizeof(T) / float_row<T>::per, 2>((const char *) (row + d / float_row<T>::per) + V::mix_block * stride);
        typename V::F vk[K];
        load_floats<V, T, K>(row, (size_t) d, vk);
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            const auto pm = V::setf(p[m][r]);
            LANES_UNROLL
            for (int k = 0; k < K; k++) {
                acc[m][k] = V::fma(vk[k], pm, acc[m][k]);
            }
        }
    }
    LANES_UNROLL
    for (int m = 0; m < M; m++) {
        LANES_UNROLL
        for (int k = 0; k < K; k++) {
            V::store_f32(dst[m] + d + k * V::floats, acc[m][k]);
        }
    }
}

// The next floats are taken from the same V::mix_block rows, while these are in the L1 cache. The next rows, as many again, are
// prefetched into the L2 cache, because both may be more than the L1 cache has.
template <class V, class T, int M>
void mix_columns(int64_t n, const char * v, size_t stride, int64_t nr, const float * const * p, float * const * dst) {
    constexpr int K = M > 4 ? V::float_rows * 4 / M : V::float_rows;
    for (int64_t r = 0; r < nr; r += V::mix_block) {
        const char * at = v + r * stride;
        const int64_t here = nr - r < V::mix_block ? nr - r : V::mix_block;
        const float * pr[M];
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            pr[m] = p[m] + r;
        }
        int64_t d = 0;
        for (; d + K * V::floats <= n; d += K * V::floats) {
            mix_rows<V, T, K, M>(d, at, stride, here, pr, dst);
        }
        for (; d < n; d += V::floats) {
            mix_rows<V, T, 1, M>(d, at, stride, here, pr, dst);
        }
    }
}

template <class V, class T>
void attention_mix(int64_t n, const char * v, size_t stride, int64_t nr, const float * const * p, float * const * dst, int nc) {
    constexpr int most = most_columns<V, T>;
    for (; nc >= most; nc -= most, p += most, dst += most) {
        mix_columns<V, T, most>(n, v, stride, nr, p, dst);
    }
    for (; nc > 4; nc -= 4, p += 4, dst += 4) {
        mix_columns<V, T, 4>(n, v, stride, nr, p, dst);
    }
    switch (nc) {
        case 1: return mix_columns<V, T, 1>(n, v, stride, nr, p, dst);
        case 2: return mix_columns<V, T, 2>(n, v, stride, nr, p, dst);
        case 3: return mix_columns<V, T, 3>(n, v, stride, nr, p, dst);
        case 4: return mix_columns<V, T, 4>(n, v, stride, nr, p, dst);
    }
}

template <class V, class T> void row_to_floats(int64_t n, const char * row, float * y) {
    constexpr int K = float_step<V, T> / V::floats;
    for (int64_t i = 0; i < n; i += K * V::floats) {
        typename V::F x[K];
        load_floats<V, T, K>((const T *) row, (size_t) i, x);
        LANES_UNROLL
        for (int k = 0; k < K; k++) {
            V::store_f32(y + i + k * V::floats, x[k]);
        }
    }
}

template <class V, class T> const attention_kernels * attention_steps() {
    static const attention_kernels kernels = { V::floats, float_mul_mat<V, T>, attention_scores<V>, attention_weights<V>,
                                               attention_mix<V, T>, float_row<T>::per > 1 ? row_to_floats<V, T> : nullptr };
    return &kernels;
}

}  // namespace
}  // namespace mtp
