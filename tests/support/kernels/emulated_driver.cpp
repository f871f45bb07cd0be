// Computes on ggml's CPU backend what emulated_ggml.py asks for, until its standard input ends.
//
// A request: eight int32 (kind, type, elements of a row, rows, experts, columns, experts used by a
// column, threads), then the bytes of its inputs in ggml's order, which these numbers tell. The
// answer: its bytes.
//
//     encode   float weights                        -> weights of the type
//     product  weights, float columns               -> floats [columns, rows]
//     apart    2 * rows rows of weights, columns    -> of every other of these rows
//     experts  weights, columns, int32 [columns, used]  -> floats [columns, used, rows]
//     kernels                                       -> 16 bytes: the name of our kernels, zeros behind it

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <vector>

namespace {

enum kind { ENCODE, PRODUCT, APART, EXPERTS, KERNELS };

struct request {
    int32_t kind, type, n, rows, experts, columns, used, threads;
};

using bytes = std::vector<char>;

bytes take(size_t size) {
    bytes data(size);
    if (fread(data.data(), 1, size, stdin) != size) {
        fprintf(stderr, "the request ends early\n");
        exit(1);
    }
    return data;
}

void give(const bytes & data) {
    fwrite(data.data(), 1, data.size(), stdout);
    fflush(stdout);
}

bytes encode(const request & r) {
    const ggml_type type = (ggml_type) r.type;
    const int64_t count = (int64_t) r.n * r.rows;
    const bytes from = take(count * sizeof(float));
    bytes to(ggml_row_size(type, r.n) * r.rows);
    if (type == GGML_TYPE_BF16) {
        ggml_fp32_to_bf16_row((const float *) from.data(), (ggml_bf16_t *) to.data(), count);
    } else if (type == GGML_TYPE_F32) {
        to = from;
    } else {
        ggml_quantize_chunk(type, (const float *) from.data(), to.data(), 0, r.rows, r.n, nullptr);
    }
    return to;
}

bytes compute(const request & r, ggml_backend_t backend) {
    const ggml_init_params memory = { 16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
    ggml_context * context = ggml_init(memory);
    const int64_t whole = r.kind == APART ? 2 * r.rows : r.rows;
    ggml_tensor * w = ggml_new_tensor_3d(context, (ggml_type) r.type, r.n, whole, r.experts);
    ggml_tensor * x = ggml_new_tensor_3d(context, GGML_TYPE_F32, r.n, r.kind == EXPERTS ? 1 : r.columns,
                                         r.kind == EXPERTS ? r.columns : 1);
    ggml_tensor * ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, r.used, r.columns);
    ggml_tensor * y;
    switch (r.kind) {
        case APART:
            y = ggml_mul_mat(context, ggml_view_2d(context, w, r.n, r.rows, 2 * w->nb[1], 0), x);
            break;
        case EXPERTS: y = ggml_mul_mat_id(context, w, x, ids); break;
        default:      y = ggml_mul_mat(context, w, x); break;
    }
    ggml_cgraph * graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, y);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(context, backend);
    for (ggml_tensor * input : { w, x, ids }) {
        if (input != ids || r.kind == EXPERTS) {
            const bytes data = take(ggml_nbytes(input));
            ggml_backend_tensor_set(input, data.data(), 0, data.size());
        }
    }
    ggml_backend_cpu_set_n_threads(backend, r.threads);
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
        fprintf(stderr, "the graph was not computed\n");
        exit(1);
    }
    bytes out(ggml_nbytes(y));
    ggml_backend_tensor_get(y, out.data(), 0, out.size());
    ggml_backend_buffer_free(buffer);
    ggml_free(context);
    return out;
}

bytes kernels() {
    bytes name(16);
    void * library = dlopen("libmtp_kernels.so", RTLD_NOW | RTLD_NOLOAD);  // libggml-cpu has loaded it
    const auto own_name = library ? (const char * (*) ()) dlsym(library, "mtp_kernels_name") : nullptr;
    if (own_name && own_name()) {
        strncpy(name.data(), own_name(), name.size() - 1);
    }
    return name;
}

}  // namespace

int main() {
    ggml_backend_t backend = ggml_backend_cpu_init();
    request r;
    while (fread(&r, sizeof(r), 1, stdin) == 1) {
        switch (r.kind) {
            case ENCODE: give(encode(r)); break;
            case KERNELS: give(kernels()); break;
            default:     give(compute(r, backend)); break;
        }
    }
    ggml_backend_free(backend);
    return 0;
}
