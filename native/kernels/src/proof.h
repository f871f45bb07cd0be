// Each kind of operation is computed once by ggml and once by the kernels, on small data, before the kernels are used for it.

#pragma once

#include "operation.h"

#include <memory>
#include <string>
#include <vector>

namespace mtp {

// For operations with a proof of their own

// Numbers that are the same on every machine.
struct random_numbers {
    uint64_t state = 0x9E3779B97F4A7C15u;
    uint32_t next();
    float between(float low, float high);
};

void fill(ggml_tensor * t, const small_case::tensor & like, random_numbers & random);
small_case case_of(const operation & operation, const ggml_tensor * op);

// A tensor that lies as one of a small case does, in memory of its own, full of zeros; what it takes of a context.
ggml_tensor * place(ggml_context * context, const small_case::tensor & like, ggml_tensor ** memory = nullptr);
size_t size_of(const small_case::tensor & t);

// Memory for the tensors of a small case; NULL: there is none.
using small_context = std::unique_ptr<ggml_context, void (*)(ggml_context *)>;
small_context make_context(size_t size);

// Computes a graph; two threads have to wait for each other. False if that fails.
bool compute_graph(ggml_cgraph * graph, int n_threads);

// The small case of an operation.
class small_graph {
public:
    small_graph(const operation & operation, const ggml_tensor * op, int n_threads);

    // The bytes of the result and those between its elements, computed by the kernels or by ggml; none if that fails.
    std::vector<char> compute(bool by_kernels);

    // The mean squared difference over the mean square; negative if one of them could not be computed.
    double difference(const std::vector<char> & expected, const std::vector<char> & found) const;

private:
    const int n_threads;
    ggml_type type;
    small_context context{nullptr, nullptr};
    ggml_tensor *tensor, *memory;
    ggml_cgraph * graph;
    std::vector<char> before;  // in the memory of the result, which may be that of a source
};

// Adds a sentence to `failures`, which goes to the standard error stream, too.
void tell_failure(const char * line) noexcept;

// While it lives, what is to be proved for `op` counts as proved.
struct candidate_scope {
    explicit candidate_scope(const ggml_tensor * op);
    ~candidate_scope();
};

// The kinds differ in the operation, its parameters, its small case, and whether there are several threads: a process that
// computes with one must not get others, which forked children would wait for.

// Whether the kernels' result was found to be ggml's; with several threads, it holds for one, too. Called by every thread for
// every operation; locks nothing.
bool is_proved(const operation & operation, const ggml_tensor * op, int n_threads);

// Computes a small case of `op` in both ways, unless its kind is known, and remembers the result. A failure goes to the
// standard error stream, one line for each kind, and so does a lack of memory. Not to be called while a graph is computed by
// this thread.
void prove(const operation & operation, const ggml_tensor * op, int n_threads) noexcept;

// Whether this thread computes a small case.
bool is_proving();

// Whether this is the small case's first computation, by the kernels.
bool is_tried(const ggml_tensor * op);

// Whether ggml has to compute this operation: it is the small case's second computation.
bool is_reference(const ggml_tensor * op);

// To be called when the kernels have computed `op`, which may be a small case.
void was_computed(const ggml_tensor * op);

// The kinds that were left to ggml, a sentence for each.
std::string failures();

}  // namespace mtp
