// Each kind of operation is computed once by ggml and once by the kernels, on small data, before the kernels are used for it.

#pragma once

#include "operation.h"

#include <string>

namespace mtp {

// The kinds differ in the operation, its parameters, the types of its sources, its path, and whether there are several threads:
// a process that computes with one must not get others, which forked children would wait for.

// Whether the kernels' result was found to be ggml's. Called by every thread for every operation; locks nothing.
bool is_proved(const operation & operation, const ggml_tensor * op, int n_threads);

// Computes a small case of `op` in both ways, unless its kind is known, and remembers the result. A failure goes to the
// standard error stream, one line for each kind. Not to be called while a graph is computed by this thread.
void prove(const operation & operation, const ggml_tensor * op, int n_threads);

// Whether ggml has to compute this operation: it is the small case's second computation.
bool is_reference(const ggml_tensor * op);

// To be called when the kernels have computed `op`, which may be a small case.
void was_computed(const ggml_tensor * op);

// The kinds that were left to ggml, a sentence for each.
std::string failures();

}  // namespace mtp
