// product TYPE ELEMENTS ROWS COLUMNS TIMES plain|repacked: one product, computed TIMES times by one
// thread, with the weights as a file has them or as llama.cpp repacks them.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cstdlib>
#include <cstring>
#include <vector>

int main(int count, char ** words) {
    if (count != 7) {
        return 2;
    }
    const ggml_type type = (ggml_type) atoi(words[1]);
    const int64_t n = atoi(words[2]), rows = atoi(words[3]), columns = atoi(words[4]);
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, 1);
    ggml_backend_reg_t cpu = ggml_backend_cpu_reg();
    ggml_backend_buffer_type_t buffers = ggml_backend_cpu_buffer_type();
    if (strcmp(words[6], "repacked") == 0) {
        const auto more = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
            cpu, "ggml_backend_dev_get_extra_bufts");
        for (ggml_backend_buffer_type_t * each = more(ggml_backend_reg_dev_get(cpu, 0)); *each; each++) {
            buffers = *each;
        }
    }

    ggml_context * of_weights = ggml_init({ 1 << 20, nullptr, true });
    ggml_tensor * w = ggml_new_tensor_2d(of_weights, type, n, rows);
    ggml_backend_alloc_ctx_tensors_from_buft(of_weights, buffers);
    const std::vector<char> zeros(ggml_nbytes(w));
    ggml_backend_tensor_set(w, zeros.data(), 0, zeros.size());

    ggml_context * context = ggml_init({ 1 << 20, nullptr, true });
    ggml_tensor * x = ggml_new_tensor_2d(context, GGML_TYPE_F32, n, columns);
    ggml_cgraph * graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, ggml_mul_mat(context, w, x));
    ggml_backend_alloc_ctx_tensors(context, backend);
    const std::vector<float> ones(n * columns, 1);
    ggml_backend_tensor_set(x, ones.data(), 0, ggml_nbytes(x));
    for (int i = 0; i < atoi(words[5]); i++) {
        ggml_backend_graph_compute(backend, graph);
    }
    return 0;
}
