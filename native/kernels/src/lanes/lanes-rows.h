// Rows of floats: sums, maxima, copies, convolutions. Plain loops that compilers vectorize, for the instruction set of the
// file that includes this.

#pragma once

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

// n0 x n1 elements of 4 bytes. Short or strided rows go column by column, so that the long loop is the inner one, in
// blocks of rows whose cache lines stay until the next column.
void copy_block(char * y, size_t nb0, size_t nb1, const char * x, size_t nb00, size_t nb01, int64_t n0, int64_t n1) {
    constexpr int64_t block = 128;
    if (n0 >= 32 && nb0 == sizeof(float) && nb00 == sizeof(float)) {
        for (int64_t i1 = 0; i1 < n1; i1++) {
            memcpy(y + i1 * nb1, x + i1 * nb01, n0 * sizeof(float));
        }
        return;
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

// D: the number of taps where it is known when this is compiled, 0 where it is nc.
template <int D>
void convolve_taps(const float * s, const float * c, float * x, int nc, int ncs, int64_t xs, int nr, int t0, int t1) {
    for (int i1 = 0; i1 < nr; i1++, s += ncs, c += nc) {
        float w[D > 0 ? D : 1];
        for (int i0 = 0; i0 < D; i0++) {
            w[i0] = c[i0];
        }
        for (int t = t0; t < t1; t++) {
            float sum = 0.0f;
            for (int i0 = 0; i0 < (D > 0 ? D : nc); i0++) {
                sum += s[t + i0] * (D > 0 ? w[i0] : c[i0]);
            }
            x[t * xs + i1] = sum;
        }
    }
}

void convolve(const float * s, const float * c, float * x, int nc, int ncs, int64_t xs, int nr, int t0, int t1) {
    if (nc == 4) {
        convolve_taps<4>(s, c, x, nc, ncs, xs, nr, t0, t1);
    } else {
        convolve_taps<0>(s, c, x, nc, ncs, xs, nr, t0, t1);
    }
}

void convolve_row(int64_t n, float * y, const float * const * x, const float * c, int64_t stride) {
    for (int64_t i = 0; i < n; i++) {
        float sum = 0.0f;
        for (int tap = 0; tap < row_taps; tap++) {
            sum += x[tap][i] * c[tap * stride + i];
        }
        y[i] = sum;
    }
}

}  // namespace
}  // namespace mtp
