#include "columns.h"

#include "choices.h"
#include "ggml_api.h"
#include "self_test.h"

#include <algorithm>
#include <cstring>

namespace mtp {

namespace {

// What the kernels multiply weights of this type with; F32: the activations as they are.
ggml_type column_type(ggml_type weights) {
    const int64_t block = ggml().traits(weights)->block_size;
    return block == QK_K ? GGML_TYPE_Q8_K : block > 1 ? GGML_TYPE_Q8_0 : GGML_TYPE_F32;
}

// Whether the ggml that runs has the type with the blocks that the kernels read. Older versions lack the youngest types, and
// forks have other types under these numbers, and other blocks under the name Q2_0.
bool is_known(ggml_type type) {
    const auto has = [type](const char * name, int64_t elements, size_t bytes) {
        const type_traits * traits = ggml().traits(type);  // perhaps behind an older version's table, where the sizes differ
        return traits->block_size == elements && traits->type_size == bytes && !strcmp(traits->name, name);
    };
    switch (type) {
        case GGML_TYPE_F32:     return has("f32", 1, 4);
        case GGML_TYPE_F16:     return has("f16", 1, 2);
        case GGML_TYPE_BF16:    return has("bf16", 1, 2);
        case GGML_TYPE_Q8_0:    return has("q8_0", 32, sizeof(block_q8_0));
        case GGML_TYPE_Q4_0:    return has("q4_0", 32, sizeof(block_q4_0));
        case GGML_TYPE_Q4_1:    return has("q4_1", 32, sizeof(block_q4_1));
        case GGML_TYPE_Q5_0:    return has("q5_0", 32, sizeof(block_q5_0));
        case GGML_TYPE_Q5_1:    return has("q5_1", 32, sizeof(block_q5_1));
        case GGML_TYPE_IQ4_NL:  return has("iq4_nl", 32, sizeof(block_q4_0));
        case GGML_TYPE_MXFP4:   return has("mxfp4", 32, sizeof(block_mxfp4));
        case GGML_TYPE_NVFP4:   return has("nvfp4", 64, sizeof(block_nvfp4));
        case GGML_TYPE_Q2_0:    return has("q2_0", 64, sizeof(block_q2_0));
        case GGML_TYPE_Q2_K:    return has("q2_K", QK_K, sizeof(block_q2_K));
        case GGML_TYPE_Q3_K:    return has("q3_K", QK_K, sizeof(block_q3_K));
        case GGML_TYPE_Q4_K:    return has("q4_K", QK_K, sizeof(block_q4_K));
        case GGML_TYPE_Q5_K:    return has("q5_K", QK_K, sizeof(block_q5_K));
        case GGML_TYPE_Q6_K:    return has("q6_K", QK_K, sizeof(block_q6_K));
        case GGML_TYPE_IQ4_XS:  return has("iq4_xs", QK_K, sizeof(block_iq4_xs));
        case GGML_TYPE_TQ2_0:   return has("tq2_0", QK_K, sizeof(block_tq2_0));
        case GGML_TYPE_IQ2_XXS: return has("iq2_xxs", QK_K, sizeof(block_iq2_xxs));
        case GGML_TYPE_IQ2_XS:  return has("iq2_xs", QK_K, sizeof(block_iq2_xs));
        case GGML_TYPE_IQ2_S:   return has("iq2_s", QK_K, sizeof(block_iq2_s));
        case GGML_TYPE_IQ3_XXS: return has("iq3_xxs", QK_K, sizeof(block_iq3_xxs));
        case GGML_TYPE_IQ3_S:   return has("iq3_s", QK_K, sizeof(block_iq3_s));
        default:                return false;
    }
}

size_t block_bytes(ggml_type column) { return column == GGML_TYPE_Q8_K ? sizeof(block_q8_K) : sizeof(block_q8_0); }
int64_t block_elements(ggml_type column) { return column == GGML_TYPE_Q8_K ? QK_K : QK8_0; }

void quantize(const kernel_set & kernels, ggml_type type, const float * x, void * y, int64_t n) {
    if (type == GGML_TYPE_Q8_K && kernels.quantize_q8_K) {
        kernels.quantize_q8_K(x, (block_q8_K *) y, n / QK_K);
    } else {
        ggml().traits_cpu(type)->from_float(x, y, n);
    }
}

}  // namespace

size_t columns_size(const ggml_tensor * weights, const ggml_tensor * activations) {
    const ggml_type type = column_type(weights->type);
    if (type == GGML_TYPE_F32) {
        return 0;
    }
    return rows_of(activations) * (activations->ne[0] / block_elements(type)) * block_bytes(type);
}

columns prepare_columns(const kernel_set & kernels, const task & task, const ggml_tensor * weights,
                        const ggml_tensor * activations, char * memory) {
    const ggml_type type = column_type(weights->type);
    const int64_t * ne = activations->ne;
    if (type == GGML_TYPE_F32) {
        const size_t * nb = activations->nb;
        return { (const char *) activations->data, { nb[0], nb[1], nb[2], nb[3] } };
    }
    const int64_t block = block_elements(type), blocks = ne[0] / block;
    const size_t row = blocks * block_bytes(type);
    // Of many rows, a thread takes those that are its part of the operation before, too: its caches have them.
    const int64_t all = rows_of(activations) * blocks;
    for (int64_t at = task.first(all), last; at < task.last(all); at = last) {
        last = std::min(task.last(all), (at / blocks + 1) * blocks);
        quantize(kernels, type, (const float *) row_at(activations, at / blocks) + at % blocks * block,
                 memory + at * block_bytes(type), (last - at) * block);
    }
    return { memory, { block_bytes(type), row, row * ne[1], row * ne[1] * ne[2] } };
}

bool have_products(const kernel_set & kernels, ggml_type weights) { return kernels.product(weights) && is_known(weights); }

bool fit_together(const kernel_set & kernels, const ggml_tensor * weights, const ggml_tensor * activations) {
    return !weights->extra && is_float(activations) && have_products(kernels, weights->type) &&
           weights->ne[0] == activations->ne[0] && weights->nb[0] == ggml().traits(weights->type)->type_size;
}

double try_out_candidates(const operation & operation, const ggml_tensor * op, int n_threads) {
    const ggml_tensor * weights = op->src[0];
    candidate all[most_candidates];
    const int count = candidates_for(op, op->src[2] ? op->src[2]->ne[1] : rows_of(op->src[1]) / (weights->ne[2] * weights->ne[3]), all);
    small_graph graph(operation, op, n_threads);
    std::vector<char> first;
    double apart = -1;
    for (int i = 0; i < count; i++) {
        const forced_candidate forced(&all[i]);
        const std::vector<char> found = graph.compute(true);
        if (i == 0) {
            first = found;
            apart = graph.difference(graph.compute(false), first);
        } else if (found.empty() || found != first) {
            exclude(weights->type, all[i]);
            const std::string line = std::string(operation.name) + " of " + ggml().type_name(weights->type) +
                                     " is not computed with " + name_of(all[i]) + ": its results differ from those with " +
                                     name_of(all[0]);
            tell_failure(line.c_str());
        }
    }
    return apart;
}

int64_t most_columns(const ggml_tensor * weights) {
#if defined(__x86_64__)
    return column_type(weights->type) == GGML_TYPE_F32 ? 2 * LANES_COLS - 1 : INT64_MAX;
#else
    (void) weights;
    return INT64_MAX;
#endif
}

}  // namespace mtp
