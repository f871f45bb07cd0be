// What the patched ggml-cpu lets a library do in its loop over the nodes of a graph, beside computing single operations.

#pragma once

#include "operation.h"

namespace mtp {

// Nodes that are computed together.
struct fusion {
    const char * first;  // the operation of the first node

    // Computes node i and those that belong to it, by each thread. Returns how many nodes that are; 0, before anything is
    // written and in every thread, if they do not fit.
    int (*compute)(const kernel_set & kernels, const ggml_compute_params * params, const ggml_cgraph * graph, int i);

    // Whether kernels that only this calls have the bits of those of the single operations; NULL: there are none.
    bool (*agrees)(const kernel_set & kernels);
};

constexpr int n_fusions = 4;
extern const fusion all_fusions[n_fusions];

// Prefetches up to so many cache lines of the weights that this thread reads first in the next product after node i.
// mul_mat: ggml's number of that operation.
void prefetch_next_product(const kernel_set & kernels, const ggml_compute_params * params, const ggml_cgraph * graph, int i,
                           int lines, int mul_mat);

// GATED_DELTA_NET_REPLAY and the copy of its new rows to the memory, where that copies each row to where it comes from:
// computed there. False, before anything is written and in every thread, if it does not.
bool replay_in_place(const kernel_set & kernels, const task & task, const ggml_tensor * op, const ggml_tensor * copy);

}  // namespace mtp
