// Operations that are computed with those after them, with the same bits, where all of them are proved: RMS_NORM with MUL, MUL with the sum of the experts of each token, CONCAT
// with SSM_CONV and SiLU, and GATED_DELTA_NET_REPLAY with the copy of its states.

#include "graph.h"
#include "graph_loop.h"
#include "self_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace mtp {

namespace {

constexpr int most_together = 64;  // nodes

bool shares_memory(const ggml_tensor * a, const ggml_tensor * b) {
    const char * of_a = (const char *) a->data;
    const char * of_b = (const char *) b->data;
    return of_a < of_b + bytes(b) && of_b < of_a + bytes(a);
}

// Whether nothing but the last of n nodes from i on is used by others.
bool only_last_is_used(const ggml_cgraph * graph, int i, int n) {
    int nodes[most_together];
    ggml_op ops[most_together];
    for (int j = 0; j < n; j++) {
        nodes[j] = i + j;
        ops[j] = node_at(graph, i + j)->op;
    }
    return ggml().can_fuse_subgraph(graph, nodes, n, ops, nodes + n - 1, 1);
}

// RMS_NORM and MUL by a row of weights

int norm_times_weights(const kernel_set & kernels, const ggml_compute_params * params, const ggml_cgraph * graph, int i) {
    if (i + 1 >= n_nodes(graph)) {
        return 0;
    }
    const ggml_tensor * norm = node_at(graph, i);
    const ggml_tensor * product = node_at(graph, i + 1);
    if (!is(product, "MUL") || product->src[0] != norm || product->src[1]->ne[0] != norm->ne[0] || rows_of(product->src[1]) != 1 ||
        !will_compute(norm, params->nth) || !will_compute(product, params->nth) || !only_last_is_used(graph, i, 2)) {
        return 0;
    }
    const ggml_tensor * x = norm->src[0];
    const ggml_tensor * weights = product->src[1];
    const task task = { params, nullptr };
    float eps;
    memcpy(&eps, norm->op_params, sizeof(eps));
    const int64_t n = x->ne[0];
    for (int64_t row = task.first(rows_of(x)); row < task.last(rows_of(x)); row++) {
        const float * from = (const float *) row_at(x, row);
        const float mean = (float) (kernels.sum_of_squares(from, n) / n);
        kernels.scale(from, (const float *) weights->data, (float *) row_at(product, row), n, 1.0f / sqrtf(mean + eps));
    }
    return 2;
}

// MUL of experts' outputs, [n, experts, tokens], by the weight of each expert for the token; a VIEW of each expert's products;
// ADD of these in their order. The outputs are read once, and only the last sum is written, with the bits of the operations.

int weighted_sum_of_experts(const kernel_set & kernels, const ggml_compute_params * params, const ggml_cgraph * graph, int i) {
    const ggml_tensor * product = node_at(graph, i);
    const ggml_tensor * x = product->src[0];
    const ggml_tensor * weights = product->src[1];
    const int64_t n = product->ne[0], experts = product->ne[1], tokens = product->ne[2];
    const int all = (int) (2 * experts);  // the product, a view of each, and a sum for all but the first
    if (experts < 2 || 2 * experts > most_together || i + all > n_nodes(graph) || product->ne[3] != 1 ||
        weights->ne[0] != 1 || !will_compute(product, params->nth)) {
        return 0;
    }
    const ggml_tensor * sum = node_at(graph, i + 1);
    for (int64_t e = 0; e < experts; e++) {
        const ggml_tensor * view = node_at(graph, i + 1 + e);
        if (!is(view, "VIEW") || view->src[0] != product || view->view_offs != e * product->nb[1] || view->ne[0] != n ||
            view->ne[1] != tokens || rows_of(view) != tokens || view->nb[1] != product->nb[2] || !is_float(view)) {
            return 0;
        }
        if (e > 0) {
            const ggml_tensor * next = node_at(graph, (int) (i + experts + e));
            if (!is(next, "ADD") || next->src[0] != sum || next->src[1] != view || !is_float(next) || !same_shape(next, view)) {
                return 0;
            }
            sum = next;
        }
    }
    if (!only_last_is_used(graph, i, all) || shares_memory(sum, x)) {
        return 0;
    }
    const membership member(params->threadpool, params->ith);
    const task task = { params, &member.of };
    const int64_t first = task.first(tokens), last = task.last(tokens);
    // The sum may be written over the weights, which nobody needs after the product.
    float * by = (float *) scratch((last - first) * experts * sizeof(float));
    for (int64_t row = first * experts; row < last * experts; row++) {
        by[row - first * experts] = *(const float *) row_at(weights, row);
    }
    task.wait();
    for (int64_t t = first; t < last; t++, by += experts) {
        const float * from[most_together / 2];
        for (int64_t e = 0; e < experts; e++) {
            from[e] = (const float *) row_at(x, t * experts + e);
        }
        kernels.weighted_sum(n, (float *) row_at(sum, t), from, by, (int) experts);
    }
    return all;
}

// CONCAT of transposed states and tokens, SSM_CONV, SiLU: reads states and tokens as they lie in memory, a row of channels
// at a time, with the sums of SSM_CONV in their order and ggml's SiLU, so that the bits are the same.

constexpr int taps = row_taps;
constexpr int64_t block = 128;  // channels that are computed together
constexpr int64_t most_sequences = 16;  // whose states are kept meanwhile

// Inputs are [n, channels, sequences] with the channels side by side, as in rows of the result. True if no memory is
// shared, or only between whole rows: then a channel of the result shares memory with the same channel of the input.
bool shares_rows_only(const ggml_tensor * result, const ggml_tensor * input) {
    if (!shares_memory(result, input)) {
        return true;
    }
    const char * to = (const char *) result->data;
    const char * from = (const char *) input->data;
    return input->nb[0] == result->nb[1] && input->nb[2] % result->nb[1] == 0 && (from - to) % (ptrdiff_t) result->nb[1] == 0;
}

int convolution_of_joined(const kernel_set & kernels, const ggml_compute_params * params, const ggml_cgraph * graph, int i) {
    if (i + 2 >= n_nodes(graph)) {
        return 0;
    }
    const ggml_tensor * concat = node_at(graph, i);
    const ggml_tensor * convolution = node_at(graph, i + 1);
    const ggml_tensor * result = node_at(graph, i + 2);
    if (concat->op_params[0] != 0 || !is(convolution, "SSM_CONV") || !is(result, "UNARY") ||
        strcmp(ggml().unary_op_name(result->op_params[0]), "SILU") || convolution->src[0] != concat || result->src[0] != convolution) {
        return 0;
    }
    const ggml_tensor * states = concat->src[0];  // [taps - 1, channels, sequences]
    const ggml_tensor * tokens = concat->src[1];  // [tokens, channels, sequences]
    const ggml_tensor * weights = convolution->src[1];  // [taps, channels]
    const int64_t n_tokens = tokens->ne[0], channels = tokens->ne[1], sequences = tokens->ne[2];
    const auto is_transposed = [](const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && t->nb[1] == sizeof(float); };
    if (!is_transposed(states) || !is_transposed(tokens) || states->ne[0] != taps - 1 || weights->ne[0] != taps ||
        sequences > most_sequences || !is_contiguous(weights, sizeof(float)) || weights->type != GGML_TYPE_F32 ||
        !is_contiguous(result, sizeof(float)) || !only_last_is_used(graph, i, 3)) {
        return 0;
    }
    // The result may be written over the inputs, whose memory is free after the concatenation. A thread has read the states
    // and all tokens up to the current one then, so later tokens must not lie before it.
    const char * to = (const char *) result->data;
    const char * from = (const char *) tokens->data;
    if (!shares_rows_only(result, states) || !shares_rows_only(result, tokens) || (from < to && from + bytes(tokens) > to)) {
        return 0;
    }

    const task task = { params, nullptr };
    const int64_t blocks = (channels + block - 1) / block;
    float past[most_sequences][(taps - 1) * block];
    float w[taps * block];
    float x[taps * block];  // token t and those before it, each at its remainder by `taps`
    for (int64_t b = task.first(blocks); b < task.last(blocks); b++) {
        const int64_t first = b * block, n = std::min(block, channels - first);
        const float * all = (const float *) weights->data + first * taps;
        for (int64_t c = 0; c < n; c++) {
            for (int tap = 0; tap < taps; tap++) {
                w[tap * block + c] = all[c * taps + tap];
            }
        }
        for (int64_t s = 0; s < sequences; s++) {
            for (int64_t t = 0; t < taps - 1; t++) {
                const char * row = (const char *) states->data + s * states->nb[2] + t * states->nb[0];
                memcpy(past[s] + t * block, row + first * sizeof(float), n * sizeof(float));
            }
        }
        for (int64_t s = 0; s < sequences; s++) {
            memcpy(x + block, past[s], sizeof(past[s]));
            for (int64_t t = 0; t < n_tokens; t++) {
                const char * row = (const char *) tokens->data + s * tokens->nb[2] + t * tokens->nb[0];
                memcpy(x + t % taps * block, row + first * sizeof(float), n * sizeof(float));
                const float * inputs[taps];  // oldest first
                for (int tap = 0; tap < taps; tap++) {
                    inputs[tap] = x + (t + 1 + tap) % taps * block;
                }
                float * y = (float *) ((char *) result->data + s * result->nb[2] + t * result->nb[1]) + first;
                kernels.convolve_row(n, y, inputs, w, block);
                ggml().silu((int) n, y, y);
            }
        }
    }
    return 3;
}

// GATED_DELTA_NET_REPLAY and the copy of its new rows to the memory

int states_in_place(const kernel_set & kernels, const ggml_compute_params * params, const ggml_cgraph * graph, int i) {
    const ggml_tensor * op = node_at(graph, i);
    int copy = i + 1;
    while (copy < n_nodes(graph) && is_empty_node(node_at(graph, copy))) {
        copy++;
    }
    if (copy == n_nodes(graph) || !is(node_at(graph, copy), "CPY") || (op->flags & GGML_TENSOR_FLAG_OUTPUT) ||
        !will_compute(op, params->nth)) {
        return 0;
    }
    // The copy's source and one other view, which ends before it, are all that uses the result. A copy of few elements is
    // always ggml's.
    const ggml_tensor * rows = node_at(graph, copy)->src[0];
    if (rows->view_src != op || ggml().graph_n_uses(graph, i) != 2 ||
        (copy_operation.fits(kernels, node_at(graph, copy)) && !will_compute(node_at(graph, copy), params->nth))) {
        return 0;
    }
    int views = 0;
    for (int j = i + 1; j < n_nodes(graph) && views < 2; j++) {
        const ggml_tensor * view = node_at(graph, j);
        if (view->src[0] != op || !is(view, "VIEW")) {
            continue;
        }
        views++;
        if (view == rows ? ggml().graph_n_uses(graph, j) != 1 : view->view_offs + bytes(view) > rows->view_offs) {
            return 0;
        }
    }
    if (views < 2) {
        return 0;
    }
    const membership member(params->threadpool, params->ith);
    return replay_in_place(kernels, { params, &member.of }, op, node_at(graph, copy)) ? copy + 1 - i : 0;
}

// Whether kernels that nothing but a fusion calls have the bits of those that the operations call, which are proved. `length`
// has whole vectors and a rest.

constexpr int length = 203, most_rows = 9;

struct small_rows {
    float rows[most_rows][length], weights[length * taps], found[length] = {}, expected[length] = {};

    small_rows() {
        random_numbers random;
        for (auto & row : rows) {
            std::generate(row, row + length, [&] { return random.between(-1.0f, 1.0f); });
        }
        std::generate(weights, weights + length * taps, [&] { return random.between(-1.0f, 1.0f); });
    }
    bool agree() const { return !memcmp(found, expected, sizeof(found)); }
};

bool sums_agree(const kernel_set & kernels) {
    small_rows of;
    const float * from[most_rows];
    for (int i = 0; i < most_rows; i++) {
        from[i] = of.rows[i];
        float product[length];
        kernels.scale(of.rows[i], nullptr, i ? product : of.expected, length, of.weights[i]);
        for (int j = 0; i && j < length; j++) {
            of.expected[j] += product[j];
        }
    }
    kernels.weighted_sum(length, of.found, from, of.weights, most_rows);
    return of.agree();
}

bool convolutions_agree(const kernel_set & kernels) {
    small_rows of;
    const float * from[taps];
    float inputs[length * taps], weights[taps * length];
    for (int i = 0; i < taps; i++) {
        from[i] = of.rows[i];
        for (int c = 0; c < length; c++) {
            inputs[c * taps + i] = of.rows[i][c];
            weights[i * length + c] = of.weights[c * taps + i];
        }
    }
    kernels.convolve(inputs, of.weights, of.expected, taps, taps, length, length, 0, 1);
    kernels.convolve_row(length, of.found, from, weights, length);
    return of.agree();
}

}  // namespace

const fusion all_fusions[n_fusions] = {
    { "RMS_NORM", norm_times_weights, nullptr },
    { "MUL", weighted_sum_of_experts, sums_agree },
    { "CONCAT", convolution_of_joined, convolutions_agree },
    { "GATED_DELTA_NET_REPLAY", states_in_place, nullptr },
};

}  // namespace mtp
