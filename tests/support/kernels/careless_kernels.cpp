// In place of the kernels of native/kernels/src/lanes: right where tensors are contiguous, begin at a multiple of 16 bytes and
// are not computed in place. Copies take rows to follow each other, rows scaled in place are scaled twice, and maxima are
// looked for from a multiple of 16 bytes on. Built by test_plugged.py.

#include "lanes/lanes.h"

#include <cstring>

namespace mtp {

static product_kernel no_product(ggml_type) { return nullptr; }

static void scale(const float * x, const float * w, float * y, int64_t n, float by) {
    for (int64_t i = 0; i < n; i++) {
        const float scaled = x == y ? x[i] * by * by : x[i] * by;
        y[i] = w ? scaled * w[i] : scaled;
    }
}

static int64_t last_largest(const float * x, int64_t n) {
    x = (const float *) ((uintptr_t) x & ~(uintptr_t) 15);
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        at = x[i] >= x[at] ? i : at;
    }
    return at;
}

static void copy_block(char * y, size_t nb0, size_t nb1, const char * x, size_t nb00, size_t, int64_t n0, int64_t n1) {
    for (int64_t i = 0; i < n0 * n1; i++) {
        memcpy(y + i % n0 * nb0 + i / n0 * nb1, x + i * nb00, sizeof(float));
    }
}

const kernel_set * choose_kernels(const char *) {
    static const kernel_set careless = { "CARELESS", no_product, nullptr, nullptr, nullptr, nullptr,      nullptr,
                                         nullptr,    nullptr,    scale,   nullptr, last_largest, copy_block };
    return &careless;
}

int candidates_of(ggml_type, int64_t, int, const kernel_set &, const char *, candidate (&)[most_candidates]) { return 0; }

bool has_word(const char *, const char *) { return false; }

}  // namespace mtp
