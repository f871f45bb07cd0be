// The activations of a matrix product as the kernels read them.

#pragma once

#include "operation.h"

namespace mtp {

// How far products may be from ggml's, which rounds the activations of F16 and BF16 weights to their type; the kernels do
// not. In a small case of BF16 that made a little more than 1e-5.
constexpr double product_bound = 1e-4;

// The columns of src1, quantized where the kernel wants quants, in the order of its dimensions.
struct columns {
    const char * data;
    size_t nb[4];
};

// The work memory that columns for weights of this type need; 0 where they are read as they are.
size_t columns_size(const ggml_tensor * weights, const ggml_tensor * activations);

// Quantizes this thread's part of the columns into `memory`; the threads wait for each other before they read them.
columns prepare_columns(const kernel_set & kernels, const task & task, const ggml_tensor * weights,
                        const ggml_tensor * activations, char * memory);

// Whether the kernels multiply weights of this type.
bool have_products(const kernel_set & kernels, ggml_type weights);

// Whether there is a kernel for these weights and their activations.
bool fit_together(const kernel_set & kernels, const ggml_tensor * weights, const ggml_tensor * activations);

// Proves a product once with each of its candidates, and leaves out those whose bits are not the first one's. Of MUL_MAT and
// MUL_MAT_ID: how far the first one's result is from ggml's.
double try_out_candidates(const operation & operation, const ggml_tensor * op, int n_threads);

// More columns than these are faster with ggml's kernels where they are compiled for a CPU with FMA.
int64_t most_columns(const ggml_tensor * weights);

}  // namespace mtp
