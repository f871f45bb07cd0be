// In place of the kernels of native/kernels/src/lanes: products of F32, of which the first candidate sleeps, the second does
// not, and the third has other results. Built by test_choices.py.

#include "lanes/lanes.h"

#include <chrono>
#include <string>
#include <thread>

namespace mtp {

static void products(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc,
                     float more) {
    for (int c = 0; c < nc; c++) {
        for (int64_t r = 0; r < nr; r++) {
            const float * row = (const float *) (w + r * stride);
            float sums[8] = {};
            for (int64_t i = 0; i < n; i++) {
                sums[i % 8] += row[i] * ((const float *) cols[c])[i];
            }
            dst[c][r] = sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7] + more;
        }
    }
}

static void slow(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc,
                 reading) {
    products(n, w, stride, nr, cols, dst, nc, 0);
    std::this_thread::sleep_for(std::chrono::microseconds(300));
}

static void fast(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc,
                 reading) {
    products(n, w, stride, nr, cols, dst, nc, 0);
}

static void wrong(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc,
                  reading) {
    products(n, w, stride, nr, cols, dst, nc, 1e-3f);
}

static product_kernel product(ggml_type type) { return type == GGML_TYPE_F32 ? slow : nullptr; }

const kernel_set * choose_kernels(const char *) {
    static const kernel_set set = { "SLOW",  product, nullptr, nullptr, nullptr, nullptr, nullptr,
                                    nullptr, nullptr, nullptr, nullptr, nullptr, nullptr };
    return &set;
}

int candidates_of(ggml_type, int64_t, int, const kernel_set &, const char *, candidate (&to)[most_candidates]) {
    to[0] = { "SLOW", slow, {}, 0 };
    to[1] = { "FAST", fast, {}, 8 };
    to[2] = { "WRONG", wrong, {}, 16 };
    return 3;
}

bool has_word(const char * words, const char * word) { return words && std::string(words).find(word) != std::string::npos; }

}  // namespace mtp
