#pragma once
// Tensors of ggml without data, and at most one graph of them.
//
// Their descriptions lie in memory of C++: where ggml_init() finds none for them, it ends the process instead of
// failing.

#include "ggml-cpp.h"
#include "ggml.h"

#include <cstddef>
#include <memory>
#include <new>

namespace mtp {

class TensorContext {
public:
    TensorContext() = default;

    // Room for `n_tensors` tensors and, unless `n_nodes` is 0, for a graph of `n_nodes`. Throws std::bad_alloc.
    explicit TensorContext(size_t n_tensors, size_t n_nodes = 0) {
        const size_t graph = n_nodes == 0 ? 0 : ggml_graph_overhead_custom(n_nodes, false);
        const size_t size = n_tensors * ggml_tensor_overhead() + graph;
        memory_.reset(new std::byte[size]);
        if (n_nodes != 0) { // what ggml's allocator of a graph takes is less, and where it finds none, it ends the process too
            ::operator delete(::operator new(size));
        }
        context_.reset(ggml_init({size, memory_.get(), true}));
    }

    ggml_context * get() const { return context_.get(); }

private:
    std::unique_ptr<std::byte[]> memory_;
    ggml_context_ptr context_;
};

} // namespace mtp
