// Before the kernels compute a kind of operation, they prove themselves: ggml and the kernels compute the same small case, and
// the results are compared.

#pragma once

#include "operation.h"

#include <memory>
#include <string>
#include <vector>

namespace mtp {

// For operations that have their own test (operation.h: try_out)

// Pseudorandom numbers, the same on every machine.
struct random_numbers {
    uint64_t state = 0x9E3779B97F4A7C15u;
    uint32_t next();
    float between(float low, float high);
};

void fill(ggml_tensor * t, const small_case::tensor & like, random_numbers & random);
small_case case_of(const operation & operation, const ggml_tensor * op);

// place: a tensor of zeros in memory of its own, with the layout of a small case's tensor. size_of: the bytes of a context that
// this takes.
ggml_tensor * place(ggml_context * context, const small_case::tensor & like, ggml_tensor ** memory = nullptr);
size_t size_of(const small_case::tensor & t);

// Memory for the tensors of a small case; NULL if there is none left.
using small_context = std::unique_ptr<ggml_context, void (*)(ggml_context *)>;
small_context make_context(size_t size);

// Computes a graph in one thread, or in two that have to wait for each other. False if that fails.
bool compute_graph(ggml_cgraph * graph, int n_threads);

// The small case of an operation.
class small_graph {
public:
    small_graph(const operation & operation, const ggml_tensor * op, int n_threads);

    // The memory of the result, with the gaps between its elements, computed by the kernels or by ggml; empty if that fails.
    std::vector<char> compute(bool by_kernels);

    // The mean squared difference over the mean square of `expected`; negative if one of the results is empty.
    double difference(const std::vector<char> & expected, const std::vector<char> & found) const;

private:
    const int n_threads;
    ggml_type type;
    small_context context{nullptr, nullptr};
    ggml_tensor *tensor, *memory;
    ggml_cgraph * graph;
    std::vector<char> before;  // the result's memory before it is computed, which may be that of a source
};

// Adds a sentence to `failures`, which goes to the standard error stream, too.
void tell_failure(const char * line) noexcept;

// While it lives, `op` counts as proved, so that the kernels compute it.
struct candidate_scope {
    explicit candidate_scope(const ggml_tensor * op);
    ~candidate_scope();
};

// A kind of operation is the operation, its parameters, its small case, and whether there are several threads. A process that
// computes in one thread is tested in one, because forked children would wait for threads that they do not have.

// Whether the kernels' result agreed with ggml's. What was proved for several threads holds for one, too. Called by every thread
// for every operation; takes no lock.
bool is_proved(const operation & operation, const ggml_tensor * op, int n_threads);

// Tests the kind of `op` and remembers the outcome; does nothing if the kind was tested before. A failure, lack of memory among
// them, writes a line to the standard error stream. Must not be called by a thread that computes a graph.
void prove(const operation & operation, const ggml_tensor * op, int n_threads) noexcept;

// Whether this thread is testing a kind.
bool is_proving();

// Whether `op` is a small case that the kernels have to compute.
bool is_tried(const ggml_tensor * op);

// Whether `op` is a small case that ggml has to compute.
bool is_reference(const ggml_tensor * op);

// Called after the kernels have computed `op`, which may be a small case.
void was_computed(const ggml_tensor * op);

// One sentence for each kind that is left to ggml.
std::string failures();

}  // namespace mtp
