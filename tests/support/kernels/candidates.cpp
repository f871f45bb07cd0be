// Prints the candidates for products of Q4_K, in place of whose kernels there is nothing to call. The argument "no_avx512"
// takes away what the CPU has of AVX-512. Built by test_choices.py with native/kernels/src/lanes/lanes.cpp.

#include "lanes/lanes.h"

#include <cstdio>
#include <cstring>

// What __builtin_cpu_supports reads, in libgcc and in compiler-rt alike
extern "C" struct {
    unsigned vendor, type, subtype, features[1];
} __cpu_model;

namespace mtp {

static void nothing(int64_t, const char *, size_t, int64_t, const void * const *, float * const *, int, reading) {}
static product_kernel product(ggml_type) { return nothing; }

product_kernel avx512_vnni_product(ggml_type) { return nothing; }
product_kernel avx_vnni_product(ggml_type) { return nothing; }
product_kernel amx_product(ggml_type) { return nothing; }
bool has_amx() { return true; }
double avx512_vnni_multiply(int64_t) { return 0; }
double avx_vnni_multiply(int64_t) { return 0; }
double amx_multiply(int64_t) { return 1; }

extern const kernel_set avx512_kernels = { "AVX512", product, nullptr, nullptr, nullptr, nullptr, nullptr,
                                           nullptr,  nullptr, nullptr, nullptr, nullptr, nullptr, nullptr };
extern const kernel_set avx2_kernels   = { "AVX2",  product, nullptr, nullptr, nullptr, nullptr, nullptr,
                                           nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr };

}  // namespace mtp

int main(int argc, char ** argv) {
    __builtin_cpu_init();
    if (argc > 1 && !strcmp(argv[1], "no_avx512")) {
        __cpu_model.features[0] &= (1u << 15) - 1; // AVX-512F and all that came after it
    }
    const mtp::kernel_set * best = mtp::choose_kernels(nullptr);
    printf("%s\n", best ? best->name : "none");
    for (int columns = 0; best && columns < mtp::n_column_classes; columns++) {
        mtp::candidate found[mtp::most_candidates];
        const int n = mtp::candidates_of(GGML_TYPE_Q4_K, QK_K, columns, *best, nullptr, found);
        for (int i = 0; i < n; i++) {
            printf("%s\n", found[i].set);
        }
    }
}
