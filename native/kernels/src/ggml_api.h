// The functions of the ggml that is loaded in this process. They are looked up, because the library is linked with
// nothing of ggml: one file serves every version.

#pragma once

#include "ggml_abi.h"

#include <vector>

namespace mtp {

// What ggml_graph_plan returns. Newer versions may have more at its end, for which there is room.
struct graph_plan {
    size_t work_size;
    uint8_t * work_data;
    int n_threads;
    ggml_threadpool * threadpool;
    void * abort_callback;
    void * abort_callback_data;
    char more[208];
};

// The beginning of ggml_type_traits and of ggml_type_traits_cpu
struct type_traits {
    const char * name;
    int64_t block_size, interleaved;
    size_t type_size;
    bool is_quantized;
    void (*to_float)(const void * x, float * y, int64_t n);
};

struct type_traits_cpu {
    void (*from_float)(const float * x, void * y, int64_t n);
    void * vec_dot;
    ggml_type vec_dot_type;
};

// What the patched ggml-cpu lets a library do in its loop over the nodes of a graph; see ggml_cpu_graph_hooks there.
struct graph_hooks {
    int (*compute)(const ggml_cgraph * graph, int i, ggml_compute_params * params);
    void (*prefetch)(const ggml_cgraph * graph, int i, const ggml_compute_params * params, int lines);
    int (*begin)(const ggml_cgraph * graph, int n_threads);
    void (*end)(int n_threads);
};

// ggml-cpu's list of entries: `ggml_backend_cpu_get_extra_buffer_types()`, and what it was called in the first half of 2025.
constexpr const char buffer_types_function[] = "_Z39ggml_backend_cpu_get_extra_buffer_typesv";
constexpr const char former_buffer_types_function[] = "_Z39ggml_backend_cpu_get_extra_buffers_typev";

using buffer_types = std::vector<ggml_backend_buffer_type *>;

struct ggml_api {
    const char * (*op_name)(int op);
    const char * (*type_name)(int type);
    const type_traits * (*traits)(int type);
    const type_traits_cpu * (*traits_cpu)(int type);
    size_t (*row_size)(int type, int64_t n);
    size_t (*quantize_chunk)(int type, const float * src, void * dst, int64_t start, int64_t rows, int64_t n,
                             const float * imatrix);

    ggml_context * (*init)(ggml_init_params params);
    void (*free)(ggml_context * context);
    ggml_tensor * (*new_tensor)(ggml_context * context, int type, int n_dims, const int64_t * ne);
    size_t (*tensor_overhead)();
    size_t (*graph_overhead)();
    ggml_cgraph * (*new_graph)(ggml_context * context);
    void (*build_forward_expand)(ggml_cgraph * graph, ggml_tensor * tensor);

    graph_plan (*plan)(const ggml_cgraph * graph, int n_threads, ggml_threadpool * pool);
    int (*compute)(ggml_cgraph * graph, graph_plan * plan);
    buffer_types & (*extra_buffer_types)();
    void * (*cpu_reg)();
    void * (*reg_device)(void * reg, size_t index);
    void * (*cpu_buffer_type)();
    void * (*buffer_type_device)(void * type);

    ggml_tensor * (*rms_norm)(ggml_context * context, ggml_tensor * x, float eps);
    ggml_tensor * (*view)(ggml_context * context, ggml_tensor * x, int64_t n, size_t offset);
    ggml_tensor * (*set_name)(ggml_tensor * tensor, const char * name);

    // Whether a graph's nodes, and who uses them, can be seen.
    bool has_graphs() const { return graph_n_nodes && graph_node && can_fuse_subgraph; }

    // optional
    void (*barrier)(ggml_threadpool * pool);
    void * set_use_ref;
    void * glu;
    void * gated_delta_net_replay;

    // of the patched ggml-cpu, and what serves its hooks
    void (*set_graph_hooks)(const graph_hooks * hooks);
    int (*graph_n_uses)(const ggml_cgraph * graph, int i);
    int (*graph_n_nodes)(ggml_cgraph * graph);
    ggml_tensor * (*graph_node)(ggml_cgraph * graph, int i);
    bool (*can_fuse_subgraph)(const ggml_cgraph * graph, const int * nodes, int n, const ggml_op * ops, const int * outputs,
                              int n_outputs);
    void (*silu)(int n, float * y, const float * x);
    const char * (*unary_op_name)(int op);

    bool has_graph_loop() const {
        return set_graph_hooks && graph_n_uses && graph_n_nodes && graph_node && can_fuse_subgraph && silu &&
               unary_op_name;
    }

    // whether ggml_compute_params has use_ref
    bool has_use_ref() const { return set_use_ref; }
};

// The functions that find_ggml found.
const ggml_api & ggml();

// Looks the functions up in a library (of dlopen) and those that it is linked with. Returns the first name that is missing, or NULL if all were found.
const char * find_ggml(void * library);

}  // namespace mtp
