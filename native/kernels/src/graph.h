// The graph whose operations are computed, and its nodes. ggml names them to operations nowhere; where a pool keeps its graph
// is found out when the library plugs in.

#pragma once

#include "ggml_api.h"
#include "operation.h"

#include <cstring>

namespace mtp {

// The word of a ggml_threadpool that is the graph which its threads compute; 0: not known.
extern size_t graph_word;
constexpr size_t most_graph_word = 16;  // behind a mutex and a condition variable

// ggml's number of an operation; 0: it has none of this name.
int op_number(const char * name);

// The graph that an operation belongs to, or NULL if that is not known.
inline const ggml_cgraph * graph_of(const ggml_compute_params * params) {
    return graph_word && ggml().has_graphs() ? ((const ggml_cgraph * const *) params->threadpool)[graph_word] : nullptr;
}

inline bool is(const ggml_tensor * node, const char * operation) { return !strcmp(ggml().op_name(node->op), operation); }

inline int n_nodes(const ggml_cgraph * graph) { return ggml().graph_n_nodes(const_cast<ggml_cgraph *>(graph)); }
inline ggml_tensor * node_at(const ggml_cgraph * graph, int i) { return ggml().graph_node(const_cast<ggml_cgraph *>(graph), i); }

// Whether a node writes nothing, whatever its flags.
inline bool is_view(const ggml_tensor * node) {
    return is(node, "VIEW") || is(node, "RESHAPE") || is(node, "PERMUTE") || is(node, "TRANSPOSE") || node->ne[0] == 0 ||
           rows_of(node) == 0;
}

// Whether ggml computes nothing for this node. Versions without this flag seem to have such nodes only.
inline bool is_empty_node(const ggml_tensor * node) { return is_view(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0; }

// Bytes from the first to the last element.
inline size_t bytes(const ggml_tensor * t) {
    const type_traits & type = *ggml().traits(t->type);
    size_t size = t->ne[0] / type.block_size * type.type_size;
    if (type.block_size == 1) {
        size = type.type_size + (t->ne[0] - 1) * t->nb[0];
    }
    for (int i = 1; i < 4; i++) {
        size += (t->ne[i] - 1) * t->nb[i];
    }
    return size;
}

}  // namespace mtp
