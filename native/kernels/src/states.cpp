#include "states.h"

#include "graph.h"
#include "self_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace mtp {

size_t graph_word = 0;
std::atomic<long> rows_left{0};

namespace {

uint64_t key[2];  // random: no text makes a model compute it

struct note {
    uint64_t key[2];
    const void * place;  // where it lies, so that a copy of it is none
    float * rows[];
};

constexpr int most_rows = 64;     // of a note
constexpr int most_between = 96;  // nodes between gathering and update, in a graph of llama.cpp about 20

// In front of anything that reads `place`, by one thread.
void write_note(void * place, float * const * rows, int64_t n) {
    note * to = (note *) place;
    memcpy(to->key, key, sizeof(key));
    to->place = place;
    std::copy_n(rows, n, to->rows);
}

int index_of(const ggml_cgraph * graph, const ggml_tensor * op, int first, int last) {
    for (int i = first; i < last; i++) {
        if (node_at(graph, i) == op) {
            return i;
        }
    }
    return -1;
}

// The same, from where this thread found the last one.
int index_of(const ggml_cgraph * graph, const ggml_tensor * op) {
    static thread_local int last = 0;
    const int n = n_nodes(graph), from = last < n ? last : 0;
    int i = index_of(graph, op, from, n);
    i = i < 0 ? index_of(graph, op, 0, from) : i;
    last = std::max(i, 0);
    return i;
}

// Whether these nodes need each other only: nobody else uses any of them, but for the outputs.
bool need_each_other(const ggml_cgraph * graph, const int * nodes, int n, const int * outputs, int n_outputs) {
    ggml_op ops[8];
    for (int i = 0; i < n; i++) {
        ops[i] = node_at(graph, nodes[i])->op;
    }
    return ggml().can_fuse_subgraph(graph, nodes, n, ops, outputs, n_outputs);
}

bool overlap(const void * a, size_t a_size, const void * b, size_t b_size) {
    return (const char *) a < (const char *) b + b_size && (const char *) b < (const char *) a + a_size;
}

// The GATED_DELTA_NET that is the only one to use node i, by way of up to two reshaped ones; -1: there is none.
int update_of(const ggml_cgraph * graph, int i) {
    const int last = std::min(n_nodes(graph), i + most_between);
    int nodes[4] = { i }, n = 1;
    for (int j = i + 1; j < last; j++) {
        const ggml_tensor * node = node_at(graph, j);
        const ggml_tensor * before = node_at(graph, nodes[n - 1]);
        if (node->src[5] == before && is(node, "GATED_DELTA_NET")) {
            nodes[n++] = j;
            return need_each_other(graph, nodes, n, &j, 1) ? j : -1;
        }
        if (node->src[0] == before && is(node, "RESHAPE") && n < 3) {
            nodes[n++] = j;
        }
    }
    return -1;
}

}  // namespace

void prepare_notes() {
    std::random_device random;
    for (uint64_t & half : key) {
        half = (uint64_t) random() << 32 | random();
    }
}

float * const * rows_noted(const void * data) {
    const note * found = (const note *) data;
    return memcmp(found->key, key, sizeof(key)) || found->place != data ? nullptr : found->rows;
}

bool leave_rows(const task & task, const ggml_tensor * op) {
    const ggml_tensor * memory = op->src[0];
    const ggml_cgraph * graph = graph_of(task.params);
    const int i = graph ? index_of(graph, op) : -1;
    const int j = i < 0 ? -1 : update_of(graph, i);
    if (j < 0) {
        return false;
    }
    const ggml_tensor * update = node_at(graph, j);
    const int64_t n = rows_of(op);
    if (n > most_rows || update->src[5]->ne[3] != n || update->src[5]->data != op->data ||
        !is_contiguous(op, sizeof(float)) || !will_compute(update, task.nth()) ||
        !is_proved(states_in_memory, update, task.nth())) {
        return false;
    }
    float * rows[most_rows];
    const size_t size = op->ne[0] * sizeof(float);
    for (int64_t r = 0; r < n; r++) {
        rows[r] = (float *) row_at(memory, ((const int32_t *) op->src[1]->data)[r]);
    }
    for (int node = i + 1; node <= j; node++) {
        const ggml_tensor * other = node_at(graph, node);
        const auto writes = [&](const float * row) { return overlap(row, size, other->data, bytes(other)); };
        if (std::any_of(rows, rows + n, writes) && !is_view(other)) {
            return false;
        }
    }
    if (task.ith() == 0) {
        write_note(op->data, rows, n);
        rows_left.fetch_add(1, std::memory_order_relaxed);
    }
    return true;
}

bool replace_rows(const task & task, const ggml_tensor * op, float * const * rows, float * to) {
    const ggml_cgraph * graph = graph_of(task.params);
    const int i = graph ? index_of(graph, op) : -1;
    if (i < 0) {
        return false;
    }
    int j = i + 1;
    while (j < n_nodes(graph) && is_empty_node(node_at(graph, j))) {
        j++;
    }
    const ggml_tensor * copy = j < n_nodes(graph) ? node_at(graph, j) : nullptr;
    if (!copy || !is(copy, "CPY") || !will_compute(copy, task.nth()) || copy->src[0]->data != to) {
        return false;
    }
    const int64_t n = op->src[5]->ne[3], size = op->src[2]->ne[0] * op->src[2]->ne[0] * op->src[2]->ne[1];
    if (copy->ne[0] != size || rows_of(copy) != n || !is_contiguous(copy->src[0], sizeof(float))) {
        return false;
    }
    for (int64_t r = 0; r < n; r++) {
        if (row_at(copy, r) != (const char *) rows[r]) {
            return false;
        }
    }
    // The copy alone uses its source, which is a view of the states; all else that uses the result is a view that ends
    // before them.
    const int source = index_of(graph, copy->src[0], i + 1, j), states[3] = { i, source, j }, ends[2] = { i, j };
    if (source < 0 || copy->src[0]->src[0] != op || !need_each_other(graph, states, 3, ends, 2)) {
        return false;
    }
    for (int other = i + 1; other < std::min(n_nodes(graph), i + most_between); other++) {
        const ggml_tensor * view = node_at(graph, other);
        if (other != source && view->src[0] == op && is(view, "VIEW")) {
            const int views[3] = { i, std::min(source, other), std::max(source, other) };
            const bool apart = (const char *) view->data + bytes(view) <= (const char *) to &&
                               need_each_other(graph, views, 3, views + 1, 2);
            if (apart && task.ith() == 0) {
                write_note(to, rows, n);
            }
            return apart;
        }
    }
    return false;
}

// The proof: a small memory, whose rows 1 and 2 are gathered, updated and copied back.

namespace {

void shrink(const ggml_tensor * op, small_case & small) { delta_net_operation.shrink(op, small); }

double try_out(const operation & operation, const ggml_tensor * op, int n_threads) {
    const small_case small = case_of(operation, op);
    const int64_t S = small.src[2].ne[0], H = small.src[2].ne[1], n = small.src[5].ne[3], row = S * S * H;
    const int64_t attention = S * H * small.src[2].ne[2] * n;
    const bool one = op->op_params[0] == 1;
    const int64_t all[4] = { row, n + 1, 1, 1 }, some[4] = { row, n, 1, 1 }, count[4] = { n, 1, 1, 1 };
    const int64_t shaped[4] = { S, S, H, n }, output[4] = { attention, 1, 1, 1 };

    size_t size = ggml().graph_overhead() + 16 * (ggml().tensor_overhead() + 64) + sizeof(float) * row * (4 * n + 1);
    for (const auto & t : small.src) {
        size += size_of(t);
    }
    size += sizeof(float) * (small.result.ne[0] + attention);
    const small_context context = make_context(size);
    if (!context) {
        return -1;
    }
    const auto make = [&](const int64_t * ne, ggml_type type = GGML_TYPE_F32) { return ggml().new_tensor(context.get(), type, 4, ne); };
    const auto node = [&](int op, ggml_tensor * t, ggml_tensor * a, ggml_tensor * b = nullptr) {
        t->op = (ggml_op) op;
        t->src[0] = a;
        t->src[1] = b;
        return t;
    };
    const auto view = [&](const char * name, const int64_t * ne, ggml_tensor * of, size_t offset) {
        static const int64_t none[4] = { 1, 1, 1, 1 };
        ggml_tensor * t = node(op_number(name), make(none), of);
        std::copy_n(ne, 4, t->ne);
        for (int i = 1; i < 4; i++) {
            t->nb[i] = t->nb[i - 1] * t->ne[i - 1];
        }
        t->view_src = of->view_src ? of->view_src : of;
        t->view_offs = offset;
        t->data = (char *) of->data + offset;
        return t;
    };
    ggml_tensor * memory = make(all);
    ggml_tensor * ids = make(count, GGML_TYPE_I32);
    for (int32_t i = 0; i < n; i++) {
        ((int32_t *) ids->data)[i] = i + 1;
    }
    ggml_tensor * gathered = node(op_number("GET_ROWS"), make(some), memory, ids);
    ggml_tensor * result = make(small.result.ne);
    result->op = op->op;
    memcpy(result->op_params, op->op_params, sizeof(result->op_params));
    random_numbers random;
    for (int i = 0; i < 5; i++) {
        result->src[i] = place(context.get(), small.src[i]);
        fill(result->src[i], small.src[i], random);
    }
    result->src[5] = view("RESHAPE", shaped, gathered, 0);
    ggml_tensor * attended = view("VIEW", output, result, 0);
    ggml_cgraph * graph = ggml().new_graph(context.get());
    ggml().build_forward_expand(graph, attended);
    if (one) {
        ggml_tensor * states = view("VIEW", some, result, attention * sizeof(float));
        ggml_tensor * rows = view("VIEW", some, memory, row * sizeof(float));
        ggml().build_forward_expand(graph, node(op_number("CPY"), view("VIEW", some, rows, 0), states, rows));
    }
    const int64_t compared = one ? attention : small.result.ne[0];
    const auto computed = [&](std::vector<float> & found) {
        random_numbers states;
        fill(memory, { GGML_TYPE_F32, {}, {}, {}, false, 1, -1.0f, 1.0f }, states);
        memset(gathered->data, 0, sizeof(note));
        memset(result->data, 0, bytes(result));
        if (!compute_graph(graph, n_threads)) {
            return false;
        }
        found.assign((float *) result->data, (float *) result->data + compared);
        found.insert(found.end(), (float *) memory->data, (float *) memory->data + row * (n + 1));
        return true;
    };
    std::vector<float> expected, found;
    const bool copied = computed(expected) && !rows_noted(gathered->data);
    bool noted = false;
    {
        const candidate_scope trying(result);
        noted = computed(found) && rows_noted(gathered->data);
    }
    if (!copied || !noted) {
        return -1;
    }
    return memcmp(expected.data(), found.data(), found.size() * sizeof(float)) ? INFINITY : 0.0;
}

}  // namespace

void plan_states(const kernel_set & kernels, const ggml_tensor * copy, int n_threads) {
    const ggml_tensor * update = copy->src[0]->view_src;
    if (!graph_word || !update || !is(update, "GATED_DELTA_NET") || !delta_net_operation.fits(kernels, update)) {
        return;
    }
    const ggml_tensor * gathered = update->src[5];
    while (is(gathered, "RESHAPE")) {
        gathered = gathered->src[0];
    }
    if (is(gathered, "GET_ROWS") && will_compute(gathered, n_threads) && will_compute(update, n_threads) &&
        will_compute(copy, n_threads)) {
        prove(states_in_memory, update, n_threads);
    }
}

const operation states_in_memory = { "GATED_DELTA_NET in place", nullptr, nullptr, shrink, 0, try_out };

}  // namespace mtp
