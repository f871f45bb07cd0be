// In place of the kernels of native/kernels/src/lanes: no products, sums of squares that are twice what they should be,
// weighted sums without the last row, no convolutions, and the right maxima and scaled rows. Built by test_plugged.py.

#include "lanes/lanes.h"

namespace mtp {

static product_kernel no_product(ggml_type) { return nullptr; }

static double twice_the_sum(const float * x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += 2 * (double) x[i] * x[i];
    }
    return sum;
}

static void scale(const float * x, const float * w, float * y, int64_t n, float by) {
    for (int64_t i = 0; i < n; i++) {
        y[i] = w ? x[i] * by * w[i] : x[i] * by;
    }
}

static void without_last(int64_t n, float * y, const float * const * x, const float * w, int count) {
    for (int64_t i = 0; i < n; i++) {
        y[i] = x[0][i] * w[0];
        for (int j = 1; j < count - 1; j++) {
            y[i] += x[j][i] * w[j];
        }
    }
}

static void convolve(const float *, const float *, float *, int, int, int64_t, int, int, int) {}

static void convolve_row(int64_t, float *, const float * const *, const float *, int64_t) {}

static int64_t last_largest(const float * x, int64_t n) {
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        at = x[i] >= x[at] ? i : at;
    }
    return at;
}

const kernel_set * choose_kernels(const char *) {
    static const kernel_set wrong = { "WRONG",  no_product,   nullptr,       nullptr, nullptr,      nullptr,
                                      convolve, convolve_row, twice_the_sum, scale,   without_last, last_largest, nullptr };
    return &wrong;
}

int candidates_of(ggml_type, int64_t, int, const kernel_set &, const char *, candidate (&)[most_candidates]) { return 0; }

bool has_word(const char *, const char *) { return false; }

}  // namespace mtp
