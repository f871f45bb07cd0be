// Kernels for one instruction set each, and the choice among them.
//
// Products: each block of a weight row is unpacked in registers once for up to LANES_COLS columns, so that a few columns
// cost about what one does. With AVX2 and AVX-512 a vector holds consecutive blocks of weights, one in each of its
// 128-bit lanes: they are read in the order of their addresses. For more columns, quants are unpacked to memory
// (lanes-panels.h). With NEON a vector holds some bytes of each of a few rows. The result of a column does not depend on
// the number of columns, rows or threads; for quants of 256 it is also bit for bit the same on all instruction sets, and for
// those of 32 on all of x86-64.

#pragma once

#include "../ggml_abi.h"
#include "../thread_team.h"

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace mtp {

constexpr int LANES_COLS = 8;        // columns that share an unpacked block in registers
constexpr int LANES_MAX_COLS = 256;  // the most columns of a call
constexpr int row_taps = 4;          // of convolve_row

// How a product reads its weights and columns. Nothing of it changes a bit of the result, so it may differ from call to call;
// which is fastest depends on the CPU and is measured (choices.h). Only `again` is not chosen: choice::how() knows it.
struct reading {
    bool once = false;    // prefetch with the hint that the weights are read once, only into the L1 cache
    bool two = false;     // for one column: both halves of the rows in alternation, so that two places of memory are read
    bool panels = false;  // for five columns and more: rows are unpacked to memory once; more than LANES_COLS always do
    bool again = false;   // the columns are those of this thread's last call of the product, still arranged in scratch()
};

constexpr bool uses_panels(reading how, int nc) { return nc > LANES_COLS || (how.panels && nc > 4); }

// dst[c][r] = row r of w times column c, for 0 <= r < nr and 0 <= c < nc <= LANES_MAX_COLS.
//   n:      elements of a row, a multiple of the type's block
//   stride: bytes from row to row
//   cols:   columns of n elements in the type's vec_dot_type, or of floats if that is not a quantized type
using product_kernel = void (*)(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols,
                                float * const * dst, int nc, reading how);

// The steps of attention over keys and values of one type.
struct attention_kernels {
    int floats;           // in a vector; the number of elements of a value is a multiple of it
    product_kernel keys;  // the products of keys with queries
    // s = s * scale + mask * slope for n scores, with room for whole vectors, and -INFINITY in those beyond n; the largest
    float (*scores)(int64_t n, float * s, float scale, const uint16_t * mask, float slope);
    // s = exp(s - most) for n scores, a multiple of `floats`; their sum
    double (*weights)(int64_t n, float * s, float most);
    // dst[c] += p[c][r] * row r of v, for 0 <= r < nr in this order, 0 <= c < nc
    void (*mix)(int64_t n, const char * v, size_t stride, int64_t nr, const float * const * p, float * const * dst, int nc);
    void (*to_floats)(int64_t n, const char * row, float * y);  // of n elements; NULL for types that are no quants
};

struct delta_net_head;

struct kernel_set {
    const char * name;  // of the instruction set
    product_kernel (*product)(ggml_type type);
    const attention_kernels * (*attention)(ggml_type type);  // keys and values of this type; NULL: none
    void (*quantize_q8_K)(const float * x, block_q8_K * y, int64_t blocks);
    void (*delta_net)(const delta_net_head & head, float * work);
    bool (*delta_net_fits)(int64_t size);  // of a row of the state
    // tokens t0 to t1 of nr channels of a convolution over nc tokens: x[t * xs + i] = s[i * ncs + t ...] . c[i * nc ...]
    void (*convolve)(const float * s, const float * c, float * x, int nc, int ncs, int64_t xs, int nr, int t0, int t1);
    // the same of n channels of one token, whose inputs are side by side: y[i] = the sum of x[tap][i] * c[tap * stride + i]
    void (*convolve_row)(int64_t n, float * y, const float * const * x, const float * c, int64_t stride);
    double (*sum_of_squares)(const float * x, int64_t n);
    void (*scale)(const float * x, const float * w, float * y, int64_t n, float by);  // y = x * by, times w if not NULL
    // y = the sum of x[i] * w[i] in the order of i < count, of n elements; each product is rounded, then each sum
    void (*weighted_sum)(int64_t n, float * y, const float * const * x, const float * w, int count);
    int64_t (*last_largest)(const float * x, int64_t n);  // the last element that is the largest
    void (*copy_block)(char * y, size_t nb0, size_t nb1, const char * x, size_t nb00, size_t nb01, int64_t n0, int64_t n1);
    double (*multiply)(int64_t n);  // nothing but products of bytes, in n rounds: how many, see limits.cpp
};

// Of this CPU, or less if `restriction` (a word such as "avx2", "dotprod" or "all") says so; NULL if there is none.
const kernel_set * choose_kernels(const char * restriction);

extern const kernel_set avx512_kernels, avx2_kernels, neon_i8mm_kernels, neon_dotprod_kernels;

// A way to multiply with weights of a type. Candidates for the same columns have the same bits.
struct candidate {
    const char * set;  // of instructions
    product_kernel product;
    reading how;
    int id;  // below 64, the same for every type and number of columns
};
constexpr int most_candidates = 33;

// Columns are put into classes, within which the same candidate is used. The most columns of each; of the last class, the fewest
constexpr int class_columns[] = { 1, 3, 4, 6, 8, 15, 31, 63, 64 };
constexpr int n_column_classes = sizeof(class_columns) / sizeof(*class_columns);
constexpr int column_class(int64_t nc) {
    int i = 0;
    while (i < n_column_classes - 1 && nc > class_columns[i]) {
        i++;
    }
    return i;
}

// The candidates for a class of columns, the first of which is used where nothing was measured. block: elements of a block of
// the type. The words of `restriction`, such as "avx2,hint,one_stream", leave out the others; how many there are.
int candidates_of(ggml_type type, int64_t block, int columns, const kernel_set & kernels, const char * restriction,
                  candidate (&to)[most_candidates]);

// Whether `word` is one of the words, which commas separate.
bool has_word(const char * words, const char * word);

// Products of quants with VNNI, in place of those of avx512_kernels and avx2_kernels.
product_kernel avx512_vnni_product(ggml_type type);
product_kernel avx_vnni_product(ggml_type type);
double avx512_vnni_multiply(int64_t n);
double avx_vnni_multiply(int64_t n);

// Products of blocks of 256 with any number of columns, by tiles of 16; and whether this process may use them.
product_kernel amx_product(ggml_type type);
double amx_multiply(int64_t n);
bool has_amx();

// Compilers that know AVX-VNNI, and those that offer intrinsics of NEON to a function of their target, whatever the target of
// the file
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define LANES_AVX_VNNI
#endif
#if defined(__aarch64__) && defined(__ARM_NEON)
#if defined(__apple_build_version__) ? __clang_major__ >= 15 : defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 10
#define LANES_NEON
#endif
#endif

}  // namespace mtp

// What a file compiles from LANES_TARGET to LANES_END_TARGET is for these instructions, so it includes headers before whose
// functions are the same for every instruction set. gcc and clang name those of ARM differently.
#define LANES_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define LANES_TARGET(features) LANES_TARGETS(features, features)
#if defined(__clang__)
#define LANES_TARGETS(of_gcc, of_clang) LANES_PRAGMA(clang attribute push(__attribute__((target(of_clang))), apply_to = function))
#define LANES_END_TARGET LANES_PRAGMA(clang attribute pop)
#else
// gcc takes the undefined operands of its own intrinsics for uninitialized variables
#define LANES_TARGETS(of_gcc, of_clang)                    \
    LANES_PRAGMA(GCC target(of_gcc))                       \
    LANES_PRAGMA(GCC diagnostic ignored "-Wuninitialized") \
    LANES_PRAGMA(GCC diagnostic ignored "-Wmaybe-uninitialized")
#define LANES_END_TARGET
#endif
