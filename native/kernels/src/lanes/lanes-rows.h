// Rows of floats: sums, maxima, copies, convolutions. Mostly plain loops that compilers vectorize, for the instruction set of
// the file that includes this; V has `floats` elements and `transposed`.

#pragma once

#include "lanes-delta-net.h"
#include "lanes-kernels.h"

#include <math.h>

namespace mtp {
namespace {

// In 16 independent sums, in double precision.
double sum_of_squares(const float * x, int64_t n) {
    double sums[16] = {};
    int64_t i = 0;
    for (; i + 15 < n; i += 16) {
        for (int j = 0; j < 16; j++) {
            sums[j] += (double) (x[i + j] * x[i + j]);
        }
    }
    double sum = 0;
    for (double part : sums) {
        sum += part;
    }
    for (; i < n; i++) {
        sum += (double) (x[i] * x[i]);
    }
    return sum;
}

void scale_row(const float * x, const float * w, float * y, int64_t n, float by) {
    if (w) {
        for (int64_t i = 0; i < n; i++) {
            y[i] = x[i] * by * w[i];
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        y[i] = x[i] * by;
    }
}

void weighted_sum(int64_t n, float * y, const float * const * x, const float * w, int count) {
    constexpr int64_t block = 64;
    float sums[block], products[block];
    for (int64_t first = 0; first < n; first += block) {
        const int64_t here = n - first < block ? n - first : block;
        for (int i = 0; i < count; i++) {
            float * to = i == 0 ? sums : products;
            for (int64_t j = 0; j < here; j++) {
                to[j] = x[i][first + j] * w[i];
            }
            __asm__("" : : "r"(to) : "memory");  // the compiler may not fuse a product and its sum, which changes the rounding
            for (int64_t j = 0; i > 0 && j < here; j++) {
                sums[j] += products[j];
            }
        }
        memcpy(y + first, sums, here * sizeof(float));
    }
}

float largest(const float * x, int64_t n) {
    float parts[32];
    for (float & part : parts) {
        part = -INFINITY;
    }
    int64_t i = 0;
    for (; i + 31 < n; i += 32) {
        for (int j = 0; j < 32; j++) {
            parts[j] = x[i + j] > parts[j] ? x[i + j] : parts[j];
        }
    }
    float most = -INFINITY;
    for (; i < n; i++) {
        most = x[i] > most ? x[i] : most;
    }
    for (float part : parts) {
        most = part > most ? part : most;
    }
    return most;
}

// The last part of 256 that has the maximum, then the last element there.
int64_t last_largest(const float * x, int64_t n) {
    float most = -INFINITY;
    int64_t first = 0;
    for (int64_t i = 0; i < n; i += 256) {
        const float here = largest(x + i, n - i < 256 ? n - i : 256);
        if (here >= most) {
            most = here;
            first = i;
        }
    }
    int64_t at = 0;
    for (int64_t i = first; i < n && i < first + 256; i++) {
        if (x[i] == most) {
            at = i;
        }
    }
    return at;
}

// n0 x n1 elements of 4 bytes; n1 side by side in x and n0 in y, as when a matrix is transposed. The rest is left: the
// number of columns, of n1, that are done.
template <class V>
int64_t copy_transposed(char * y, size_t nb1, const char * x, size_t nb00, int64_t n0, int64_t n1) {
    constexpr int64_t line = 16;  // columns whose cache lines of x are read together
    const int64_t e1 = n1 / line * line;
    for (int64_t b1 = 0; b1 < e1; b1 += line) {
        int64_t i0 = 0;
        for (; i0 + V::floats <= n0; i0 += V::floats) {
            for (int64_t i1 = b1; i1 < b1 + line; i1 += 4) {
                typename V::F a[4];
                V::transposed(x + i0 * nb00 + i1 * sizeof(float), nb00, a);
                LANES_UNROLL
                for (int j = 0; j < 4; j++) {
                    V::store_f32((float *) (y + (i1 + j) * nb1) + i0, a[j]);
                }
            }
        }
        for (; i0 < n0; i0++) {
            for (int64_t i1 = b1; i1 < b1 + line; i1++) {
                *((float *) (y + i1 * nb1) + i0) = *((const float *) (x + i0 * nb00) + i1);
            }
        }
    }
    return e1;
}

// n0 x n1 elements of 4 bytes. Short or strided rows go column by column, so that the long loop is the inner one, in
// blocks of rows whose cache lines stay until the next column.
template <class V>
void copy_block(char * y, size_t nb0, size_t nb1, const char * x, size_t nb00, size_t nb01, int64_t n0, int64_t n1) {
    constexpr int64_t block = 128;
    if (n0 >= 32 && nb0 == sizeof(float) && nb00 == sizeof(float)) {
        for (int64_t i1 = 0; i1 < n1; i1++) {
            memcpy(y + i1 * nb1, x + i1 * nb01, n0 * sizeof(float));
        }
        return;
    }
    if (n0 >= V::floats && nb0 == sizeof(float) && nb01 == sizeof(float)) {
        const int64_t done = copy_transposed<V>(y, nb1, x, nb00, n0, n1);
        y += done * nb1;
        x += done * nb01;
        n1 -= done;
    }
    for (int64_t b1 = 0; b1 < n1; b1 += block) {
        const int64_t e1 = b1 + block < n1 ? b1 + block : n1;
        for (int64_t i0 = 0; i0 < n0; i0++) {
            for (int64_t i1 = b1; i1 < e1; i1++) {
                *(float *) (y + i0 * nb0 + i1 * nb1) = *(const float *) (x + i0 * nb00 + i1 * nb01);
            }
        }
    }
}

// Tokens t0 to t1 of nr channels with any number of taps; of V::floats channels with row_taps, four tokens at a time. Each
// product is rounded with its sum, whatever a compiler makes of a loop: a token is convolved alike alone and in a batch.
void convolve_channels(const float * s, const float * c, float * x, int nc, int ncs, int64_t xs, int nr, int t0, int t1) {
    for (int i1 = 0; i1 < nr; i1++, s += ncs, c += nc) {
        for (int t = t0; t < t1; t++) {
            float sum = 0.0f;
            for (int i0 = 0; i0 < nc; i0++) {
                sum = __builtin_fmaf(s[t + i0], c[i0], sum);
            }
            x[t * xs + i1] = sum;
        }
    }
}

template <class V> void convolve_vectors(const float * s, const float * c, float * x, int ncs, int64_t xs, int t0, int t1) {
    typename V::F w[row_taps], in[4 + row_taps];
    V::transposed((const char *) c, row_taps * sizeof(float), w);
    int t = t0;
    for (; t + 4 <= t1; t += 4) {
        V::transposed((const char *) (s + t), ncs * sizeof(float), in);
        V::transposed((const char *) (s + t + 3), ncs * sizeof(float), in + 3);  // the row may end after it
        LANES_UNROLL
        for (int j = 0; j < 4; j++) {
            auto sum = V::zerof();
            LANES_UNROLL
            for (int tap = 0; tap < row_taps; tap++) {
                sum = V::fma(in[j + tap], w[tap], sum);
            }
            V::store_f32(x + (t + j) * xs, sum);
        }
    }
    convolve_channels(s, c, x, row_taps, ncs, xs, V::floats, t, t1);
}

template <class V>
void convolve(const float * s, const float * c, float * x, int nc, int ncs, int64_t xs, int nr, int t0, int t1) {
    for (; nc == row_taps && nr >= V::floats; nr -= V::floats) {
        convolve_vectors<V>(s, c, x, ncs, xs, t0, t1);
        s += V::floats * ncs;
        c += V::floats * nc;
        x += V::floats;
    }
    convolve_channels(s, c, x, nc, ncs, xs, nr, t0, t1);
}

void convolve_row(int64_t n, float * y, const float * const * x, const float * c, int64_t stride) {
    for (int64_t i = 0; i < n; i++) {
        float sum = 0.0f;
        for (int tap = 0; tap < row_taps; tap++) {
            sum = __builtin_fmaf(x[tap][i], c[tap * stride + i], sum);
        }
        y[i] = sum;
    }
}

// The kernels of an instruction set: V's of floats, and those that its vectors of bytes have.
template <class V>
constexpr kernel_set kernels_of(const char * name, decltype(kernel_set::product) product, decltype(kernel_set::multiply) multiply,
                                decltype(kernel_set::attention) attention = nullptr,
                                decltype(kernel_set::quantize_q8_K) quantize = nullptr) {
    return { name,           product,   attention,    quantize,     delta_net_rows<V>, delta_net_fits<V>, convolve<V>, convolve_row,
             sum_of_squares, scale_row, weighted_sum, last_largest, copy_block<V>,     multiply };
}

}  // namespace
}  // namespace mtp
