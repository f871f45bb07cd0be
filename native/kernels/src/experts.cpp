// MUL_MAT_ID: the products of a mixture of experts. The tokens of a batch are grouped by expert, so that an expert's weights
// are read once for all tokens that chose it.

#include "choices.h"
#include "columns.h"
#include "read_ahead.h"

#include <algorithm>
#include <cstring>

namespace mtp {

namespace {

// A row of the result: the slot of the token's experts, and the token
struct place {
    int32_t slot, token;
};

// In the work memory: the columns, then places[begin[e]] to places[begin[e + 1]] for expert e, and the experts that a token
// chose, chosen[0] to chosen[n_chosen - 1].
struct memory {
    char * columns;
    int64_t * begin;   // [experts + 1]
    int64_t * chosen;  // [experts]
    int64_t * n_chosen;
    place * places;
    size_t size;

    memory(void * base, const ggml_tensor * op) {
        const size_t quantized = GGML_PAD(columns_size(op->src[0], op->src[1]), sizeof(int64_t));
        const int64_t experts = op->src[0]->ne[2], all = op->src[2]->ne[0] * op->src[2]->ne[1];
        columns = (char *) base;
        begin = (int64_t *) (columns + quantized);
        chosen = begin + experts + 1;
        n_chosen = chosen + experts;
        places = (place *) (n_chosen + 1);
        size = quantized + (2 * experts + 2) * sizeof(int64_t) + all * sizeof(place);
    }
};

int32_t chosen(const ggml_tensor * ids, int64_t slot, int64_t token) {
    return *(const int32_t *) ((const char *) ids->data + token * ids->nb[1] + slot * ids->nb[0]);
}

void group_by_expert(const ggml_tensor * ids, int64_t experts, const memory & memory) {
    const auto is_expert = [experts](int32_t e) { return e >= 0 && e < experts; };
    std::fill(memory.begin, memory.begin + experts + 1, 0);
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t slot = 0; slot < ids->ne[0]; slot++) {
            if (const int32_t e = chosen(ids, slot, token); is_expert(e)) {
                memory.begin[e]++;
            }
        }
    }
    int64_t end = 0;
    *memory.n_chosen = 0;
    for (int64_t e = 0; e <= experts; e++) {
        if (memory.begin[e] > 0) {
            memory.chosen[(*memory.n_chosen)++] = e;
        }
        end += memory.begin[e];
        memory.begin[e] = end;
    }
    for (int64_t token = ids->ne[1] - 1; token >= 0; token--) {
        for (int64_t slot = ids->ne[0] - 1; slot >= 0; slot--) {
            if (const int32_t e = chosen(ids, slot, token); is_expert(e)) {
                memory.places[--memory.begin[e]] = { (int32_t) slot, (int32_t) token };
            }
        }
    }
}

bool fits(const kernel_set & kernels, const ggml_tensor * op) {
    const ggml_tensor * weights = op->src[0];
    const ggml_tensor * x = op->src[1];
    const ggml_tensor * ids = op->src[2];
    return fit_together(kernels, weights, x) && is_float(op) && ids && ids->type == GGML_TYPE_I32 && weights->ne[3] == 1 &&
           x->ne[3] == 1 && x->ne[2] == ids->ne[1] && ids->ne[0] % x->ne[1] == 0 && ids->ne[2] == 1 && ids->ne[3] == 1 &&
           ids->ne[1] <= most_columns(weights);
}

bool compute(const kernel_set & kernels, const task & task, ggml_tensor * op) {
    const ggml_tensor * weights = op->src[0];
    const ggml_tensor * x = op->src[1];
    const ggml_tensor * ids = op->src[2];
    const memory memory(task.params->wdata, op);
    if (task.params->wsize < memory.size) {
        return false;
    }
    const columns cols = prepare_columns(kernels, task, weights, x, memory.columns);
    if (task.ith() == 0) {
        group_by_expert(ids, weights->ne[2], memory);
        read_experts_ahead(op, memory.chosen, *memory.n_chosen);
    }
    task.threads->reset(task.ith());
    task.wait();

    // All columns of an expert are multiplied with one piece of its rows at a time. The pieces of a thread's share follow each
    // other, because kernels prefetch beyond the end of a piece.
    const int64_t rows = std::min(rows_of_piece(*memory.n_chosen * weights->ne[1], task.nth()), weights->ne[1]);
    const int64_t expert_pieces = (weights->ne[1] + rows - 1) / rows;

    const int64_t n_pieces = *memory.n_chosen * expert_pieces;
    choice chosen(op, ids->ne[1], task);
    const int64_t own = share_begin(n_pieces, task.ith(), task.nth()), own_end = share_begin(n_pieces, task.ith() + 1, task.nth());
    each_piece(task, n_pieces, [&](int64_t piece) {
        const int64_t e = memory.chosen[piece / expert_pieces];
        const int64_t begin = memory.begin[e], count = memory.begin[e + 1] - begin;
        const int64_t r0 = piece % expert_pieces * rows, nr = std::min(rows, weights->ne[1] - r0);
        const char * w = (const char *) weights->data + e * weights->nb[2] + r0 * weights->nb[1];
        const candidate & by = chosen.next(nr * weights->nb[1], piece >= own && piece < own_end);
        for (int64_t c0 = 0; c0 < count; c0 += LANES_MAX_COLS) {
            const int nc = (int) std::min<int64_t>(LANES_MAX_COLS, count - c0);
            const void * from[LANES_MAX_COLS];
            float * to[LANES_MAX_COLS];
            for (int c = 0; c < nc; c++) {
                const place at = memory.places[begin + c0 + c];
                from[c] = cols.data + at.slot % x->ne[1] * cols.nb[1] + at.token * cols.nb[2];
                to[c] = (float *) ((char *) op->data + at.slot * op->nb[1] + at.token * op->nb[2]) + r0;
            }
            by.product(weights->ne[0], w, weights->nb[1], nr, from, to, nc, chosen.how(by, begin + c0));
        }
    });
    return true;
}

void shrink(const ggml_tensor *, small_case & small) {
    const int64_t rows = std::min<int64_t>(small.src[0].ne[1], 37), tokens = std::min<int64_t>(small.src[1].ne[2], 19);
    const int64_t experts = std::min<int64_t>(small.src[0].ne[2], 5);
    small.src[0].ne[1] = small.result.ne[0] = rows;
    small.src[0].ne[2] = small.src[2].below = experts;
    small.src[1].ne[2] = small.src[2].ne[1] = small.result.ne[2] = tokens;
}

}  // namespace

const operation expert_product_operation = { "MUL_MAT_ID", fits, compute, shrink, product_bound, try_out_candidates };

}  // namespace mtp
