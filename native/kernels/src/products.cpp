// MUL_MAT: the product of a matrix with columns.

#include "columns.h"
#include "choices.h"

#include "ggml_api.h"
#include "graph_loop.h"

#include <algorithm>

namespace mtp {

namespace {

// The rows of a product in pieces: some rows of one matrix. The pieces of a thread's share follow each other, because kernels
// prefetch beyond the end of a piece.
struct pieces {
    const ggml_tensor * weights;
    int64_t rows, matrix_pieces, count;

    pieces(const ggml_tensor * weights, int nth) : weights(weights) {
        const int64_t matrices = weights->ne[2] * weights->ne[3];
        rows = rows_of_piece(matrices * weights->ne[1], nth);
        matrix_pieces = (weights->ne[1] + rows - 1) / rows;
        count = matrix_pieces * matrices;
    }

    int64_t row(int64_t piece) const { return piece % matrix_pieces * rows; }
    int64_t matrix(int64_t piece) const { return piece / matrix_pieces; }

    const char * at(int64_t piece) const {
        return (const char *) weights->data + row(piece) * weights->nb[1] + matrix(piece) % weights->ne[2] * weights->nb[2] +
               matrix(piece) / weights->ne[2] * weights->nb[3];
    }
};

bool fits(const kernel_set & kernels, const ggml_tensor * op) {
    const ggml_tensor * weights = op->src[0];
    const ggml_tensor * x = op->src[1];
    return fit_together(kernels, weights, x) && is_float(op) && x->ne[1] <= most_columns(weights) &&
           op->op_params[1] == 0;  // a hint about the weights
}

bool compute(const kernel_set & kernels, const task & task, ggml_tensor * op) {
    const ggml_tensor * weights = op->src[0];
    const ggml_tensor * x = op->src[1];
    if (task.params->wsize < columns_size(weights, x)) {
        return false;
    }
    const columns cols = prepare_columns(kernels, task, weights, x, (char *) task.params->wdata);
    const pieces all(weights, task.nth());
    const int64_t r2 = x->ne[2] / weights->ne[2], r3 = x->ne[3] / weights->ne[3];
    const int64_t per_matrix = x->ne[1] * r2 * r3;
    // the columns of a call fit in the L2 cache
    const int64_t at_once = std::clamp<int64_t>(512 * 1024 / std::max<int64_t>(cols.nb[1], 1), LANES_COLS, LANES_MAX_COLS);
    const int64_t groups = (per_matrix + at_once - 1) / at_once;

    task.threads->reset(task.ith());
    task.wait();

    choice chosen(op, per_matrix, task);
    const int64_t n = all.count * groups;
    const int64_t own = share_begin(n, task.ith(), task.nth()), own_end = share_begin(n, task.ith() + 1, task.nth());
    each_piece(task, n, [&](int64_t i) {
        // Eight pieces are multiplied with a group of columns, which kernels arrange once for them, then with the next group,
        // while they are in a cache.
        const int64_t begin = i / (8 * groups) * 8, together = std::min<int64_t>(8, all.count - begin);
        const int64_t piece = begin + (i - begin * groups) % together, g = (i - begin * groups) / together;
        const int64_t r0 = all.row(piece), nr = std::min(all.rows, weights->ne[1] - r0);
        const candidate & by = chosen.next(nr * weights->nb[1], i >= own && i < own_end);
        const int64_t i02 = all.matrix(piece) % weights->ne[2], i03 = all.matrix(piece) / weights->ne[2];
        const int64_t c0 = per_matrix * g / groups;
        const int nc = (int) (per_matrix * (g + 1) / groups - c0);
        const void * from[LANES_MAX_COLS];
        float * to[LANES_MAX_COLS];
        int64_t i1 = c0 % x->ne[1], i2 = c0 / x->ne[1] % r2, i3 = c0 / (x->ne[1] * r2);
        for (int c = 0; c < nc; c++) {
            const int64_t at2 = i02 * r2 + i2, at3 = i03 * r3 + i3;
            from[c] = cols.data + i1 * cols.nb[1] + at2 * cols.nb[2] + at3 * cols.nb[3];
            to[c] = (float *) ((char *) op->data + i1 * op->nb[1] + at2 * op->nb[2] + at3 * op->nb[3]) + r0;
            if (++i1 == x->ne[1]) {
                i1 = 0;
                i3 += ++i2 == r2;
                i2 %= r2;
            }
        }
        by.product(weights->ne[0], all.at(piece), weights->nb[1], nr, from, to, nc, chosen.how(by, all.matrix(piece) * groups + g));
    });
    return true;
}

// The weights that a thread reads first: so many bytes leave room in an L2 cache.
constexpr int64_t bytes_ahead = 65536;

// Rows of any length, because kernels take some blocks at a time; some more columns of a matrix than have code of their own.
void shrink(const ggml_tensor *, small_case & small) {
    const int64_t rows = std::min<int64_t>(small.src[0].ne[1], 37);
    int64_t cols = std::min<int64_t>(small.src[1].ne[1], 19);
    small.src[0].ne[1] = small.result.ne[0] = rows;
    small.src[1].ne[1] = small.result.ne[1] = cols;
    for (int i = 2; i < 4; i++) {
        const int64_t repeats = std::min<int64_t>(small.src[1].ne[i] / small.src[0].ne[i], std::max<int64_t>(2, 19 / cols));
        small.src[0].ne[i] = std::min<int64_t>(small.src[0].ne[i], 2);
        small.src[1].ne[i] = small.result.ne[i] = small.src[0].ne[i] * repeats;
        cols *= repeats;
    }
}

}  // namespace

void prefetch_next_product(const kernel_set & kernels, const ggml_compute_params * params, const ggml_cgraph * graph, int i,
                           int lines, int mul_mat) {
    static thread_local struct {
        const ggml_cgraph * graph = nullptr;
        int last = 0;      // node that was asked for
        int product = -1;  // node of the next product
        const char *next = nullptr, *end = nullptr;  // of its weights, not prefetched yet
    } ahead;
    const int n_nodes = ggml().graph_n_nodes(const_cast<ggml_cgraph *>(graph));
    if (graph != ahead.graph || i < ahead.last || i >= ahead.product) {
        ahead.graph = graph;
        ahead.next = ahead.end = nullptr;
        for (ahead.product = i + 1; ahead.product < n_nodes; ahead.product++) {
            const ggml_tensor * node = ggml().graph_node(const_cast<ggml_cgraph *>(graph), ahead.product);
            const ggml_tensor * weights = node->src[0];
            if (node->op == mul_mat && weights->op == GGML_OP_NONE && fit_together(kernels, weights, node->src[1])) {
                const pieces all(weights, params->nth);
                const int64_t first = share_begin(all.count, params->ith, params->nth);
                const int64_t last = share_begin(all.count, params->ith + 1, params->nth);
                const int64_t size = (last - first) * all.rows * weights->nb[1];
                ahead.next = all.at(first);
                ahead.end = ahead.next + std::min(size, bytes_ahead);
                break;
            }
        }
    }
    ahead.last = i;
    for (; lines > 0 && ahead.next < ahead.end; lines--, ahead.next += 64) {
        __builtin_prefetch(ahead.next, 0, 2);
    }
}

const operation product_operation = { "MUL_MAT", fits, compute, shrink, product_bound, try_out_candidates };

}  // namespace mtp
