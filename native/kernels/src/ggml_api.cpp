#include "ggml_api.h"

#include <dlfcn.h>

namespace mtp {

static ggml_api found;

const ggml_api & ggml() { return found; }

const char * find_ggml(void * library) {
    ggml_api api = {};
    const char * missing = nullptr;
    const auto look_up = [&](auto & function, const char * name, bool required = true) {
        void * symbol = dlsym(library, name);
        function = reinterpret_cast<std::decay_t<decltype(function)>>(symbol);
        if (!symbol && required && !missing) {
            missing = name;
        }
    };
    // First the list that operations are registered in: a program linked with no shared ggml-cpu lacks all of this.
    look_up(api.extra_buffer_types, buffer_types_function, false);
    if (!api.extra_buffer_types) {
        look_up(api.extra_buffer_types, former_buffer_types_function, false);
    }
    if (!api.extra_buffer_types) {
        missing = "ggml_backend_cpu_get_extra_buffer_types";
    }
    look_up(api.op_name, "ggml_op_name");
    look_up(api.type_name, "ggml_type_name");
    look_up(api.traits, "ggml_get_type_traits");
    look_up(api.traits_cpu, "ggml_get_type_traits_cpu");
    look_up(api.row_size, "ggml_row_size");
    look_up(api.quantize_chunk, "ggml_quantize_chunk");
    look_up(api.init, "ggml_init");
    look_up(api.free, "ggml_free");
    look_up(api.new_tensor, "ggml_new_tensor");
    look_up(api.tensor_overhead, "ggml_tensor_overhead");
    look_up(api.graph_overhead, "ggml_graph_overhead");
    look_up(api.new_graph, "ggml_new_graph");
    look_up(api.build_forward_expand, "ggml_build_forward_expand");
    look_up(api.plan, "ggml_graph_plan");
    look_up(api.compute, "ggml_graph_compute");
    look_up(api.cpu_reg, "ggml_backend_cpu_reg");
    look_up(api.reg_device, "ggml_backend_reg_dev_get");
    look_up(api.cpu_buffer_type, "ggml_backend_cpu_buffer_type");
    look_up(api.buffer_type_device, "ggml_backend_buft_get_device");
    look_up(api.rms_norm, "ggml_rms_norm");
    look_up(api.view, "ggml_view_1d");
    look_up(api.set_name, "ggml_set_name");
    look_up(api.barrier, "ggml_barrier", false);
    look_up(api.set_use_ref, "ggml_backend_cpu_set_use_ref", false);
    look_up(api.glu, "ggml_glu", false);
    look_up(api.gated_delta_net_replay, "ggml_gated_delta_net_replay", false);
    look_up(api.set_graph_hooks, "ggml_cpu_set_graph_hooks", false);
    look_up(api.graph_n_uses, "ggml_cpu_graph_n_uses", false);
    look_up(api.graph_n_nodes, "ggml_graph_n_nodes", false);
    look_up(api.graph_node, "ggml_graph_node", false);
    look_up(api.can_fuse_subgraph, "ggml_can_fuse_subgraph_ext", false);
    look_up(api.unary_op_name, "ggml_unary_op_name", false);
    look_up(api.silu, "ggml_vec_silu_f32", false);
    if (!missing) {
        found = api;
    }
    return missing;
}

}  // namespace mtp
