#include "proof.h"

#include "ggml_api.h"
#include "grids.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

namespace mtp {

namespace {

// What is known of a kind, by its hash. A full table leaves further kinds to ggml; a model has about a hundred.
constexpr size_t table_size = 4096;
constexpr uint64_t proved = 1, failed = 0;  // in the lowest bit
std::atomic<uint64_t> table[table_size];

std::mutex proving;
std::atomic<const ggml_tensor *> reference{nullptr}, tried{nullptr};
std::atomic<bool> candidate_computed;
thread_local bool in_proof = false;  // whose graph is planned, too
std::string failed_kinds;

uint64_t kind_of(const operation & operation, const ggml_tensor * op, int n_threads) {
    uint64_t hash = 0xcbf29ce484222325u;
    const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3u; };
    add(op->op);
    add(op->type);
    for (int32_t param : op->op_params) {
        add((uint32_t) param);
    }
    for (const ggml_tensor * src : op->src) {
        add(src ? src->type + 1 : 0);
    }
    add(operation.path ? (uint64_t) operation.path(op) : 0);
    add(n_threads > 1);
    hash ^= hash >> 29;
    return (hash | 2) & ~(uint64_t) 1;  // never 0, which marks a free place
}

// The entry of a kind: a pointer to it, to the free place where it belongs, or NULL if the table is full.
std::atomic<uint64_t> * look_up(uint64_t kind) {
    for (size_t i = 0; i < table_size; i++) {
        std::atomic<uint64_t> & at = table[((kind >> 2) + i) % table_size];
        const uint64_t found = at.load(std::memory_order_acquire);
        if (found == 0 || (found & ~(uint64_t) 1) == kind) {
            return &at;
        }
    }
    return nullptr;
}

}  // namespace

uint32_t random_numbers::next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t) (state >> 32);
}

float random_numbers::between(float low, float high) { return low + (high - low) * (float) (next() >> 8) / (1 << 24); }

void fill(ggml_tensor * t, const small_case::tensor & like, random_numbers & random) {
    const int64_t rows = rows_of(t), n = t->ne[0];
    if (t->type == GGML_TYPE_I32) {
        for (int64_t i = 0; i < rows * n; i++) {
            ((int32_t *) t->data)[i] = like.below > 0 ? (int32_t) (random.next() % like.below) : 0;
        }
        return;
    }
    if (has_grid(t->type)) {  // to quantize, ggml would prepare tables for a second
        const size_t size = ggml().traits(t->type)->type_size;
        for (size_t i = 0; i < rows * n / QK_K * size; i++) {
            ((uint8_t *) t->data)[i] = i % size == 0 ? 0 : i % size == 1 ? 0x24 : (uint8_t) random.next();  // d is 1 / 64
        }
        return;
    }
    std::vector<float> values(rows * n);
    for (float & value : values) {
        value = random.between(like.low, like.high);
    }
    if (t->type == GGML_TYPE_F32) {
        memcpy(t->data, values.data(), values.size() * sizeof(float));
    } else {
        const std::vector<float> imatrix(n, 1.0f);
        ggml().quantize_chunk(t->type, values.data(), t->data, 0, rows, n, imatrix.data());
    }
}

small_case case_of(const operation & operation, const ggml_tensor * op) {
    const auto like = [](const ggml_tensor * t) {
        small_case::tensor to = { GGML_TYPE_COUNT, { 1, 1, 1, 1 }, 1, -1.0f, 1.0f };
        if (t) {
            to.type = t->type;
            std::copy_n(t->ne, 4, to.ne);
        }
        return to;
    };
    small_case small;
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        small.src[i] = like(op->src[i]);
    }
    small.result = like(op);
    operation.shrink(op, small);
    return small;
}

bool compute_graph(ggml_cgraph * graph, int n_threads) {
    graph_plan plan = ggml().plan(graph, std::min(n_threads, 2), nullptr);
    std::vector<uint8_t> work(plan.work_size + 64);
    plan.work_data = work.data();
    return ggml().compute(graph, &plan) == 0;
}

small_context make_context(size_t size) { return { ggml().init({ size, nullptr, false }), ggml().free }; }

candidate_scope::candidate_scope(const ggml_tensor * op) { tried.store(op); }
candidate_scope::~candidate_scope() { tried.store(nullptr); }

namespace {

// The difference of two results: the mean squared difference over the mean square of `expected`; infinite if one has a
// number where the other has none.
double difference(const ggml_tensor * expected, const std::vector<char> & found) {
    const size_t n = rows_of(expected) * expected->ne[0];
    if (expected->type != GGML_TYPE_F32) {
        return memcmp(expected->data, found.data(), found.size()) ? INFINITY : 0.0;
    }
    const float * a = (const float *) expected->data;
    const float * b = (const float *) found.data();
    double apart = 0, all = 0;
    for (size_t i = 0; i < n; i++) {
        if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) {
            all += std::isfinite(a[i]) ? (double) a[i] * a[i] : 0.0;
            continue;
        }
        if (!std::isfinite(a[i]) || !std::isfinite(b[i])) {
            return INFINITY;
        }
        apart += ((double) a[i] - b[i]) * ((double) a[i] - b[i]);
        all += (double) a[i] * a[i];
    }
    return apart == 0 ? 0.0 : all > 0 ? apart / all : INFINITY;
}

}  // namespace

double compare_with_ggml(const operation & operation, const ggml_tensor * op, int n_threads, std::vector<std::vector<char>> & results,
                         const std::function<void(size_t)> & choose) {
    const small_case small = case_of(operation, op);
    size_t size = ggml().graph_overhead() + 64;
    const auto add_size = [&size](const small_case::tensor & t) {
        if (t.type != GGML_TYPE_COUNT) {
            size += ggml().tensor_overhead() + ggml().row_size(t.type, t.ne[0]) * t.ne[1] * t.ne[2] * t.ne[3] + 64;
        }
    };
    std::for_each(small.src, small.src + GGML_MAX_SRC, add_size);
    add_size(small.result);

    // Beside the operation there is one that takes all threads, which some operations are not planned for on their own.
    const int64_t one[4] = { 1, 1, 1, 1 };
    size += 2 * ggml().tensor_overhead() + 2 * 64;

    const small_context owner = make_context(size);
    ggml_context * const context = owner.get();
    if (!context) {
        return -1;
    }
    random_numbers random;
    ggml_tensor * result = ggml().new_tensor(context, small.result.type, 4, small.result.ne);
    result->op = op->op;
    memcpy(result->op_params, op->op_params, sizeof(result->op_params));
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (small.src[i].type != GGML_TYPE_COUNT) {
            result->src[i] = ggml().new_tensor(context, small.src[i].type, 4, small.src[i].ne);
            fill(result->src[i], small.src[i], random);
        }
    }
    ggml_cgraph * graph = ggml().new_graph(context);
    ggml().build_forward_expand(graph, result);
    ggml_tensor * other = ggml().new_tensor(context, GGML_TYPE_F32, 4, one);
    *(float *) other->data = 1.0f;
    ggml().build_forward_expand(graph, ggml().rms_norm(context, other, 0.0f));

    const size_t bytes = ggml().row_size(small.result.type, small.result.ne[0]) * rows_of(result);
    for (size_t i = 0; i < results.size(); i++) {
        choose(i);
        candidate_computed = false;
        tried.store(result);
        memset(result->data, 0, bytes);  // what an operation does not write stays equal
        const bool computed = compute_graph(graph, n_threads) && candidate_computed;
        tried.store(nullptr);
        results[i].assign((const char *) result->data, (const char *) result->data + (computed ? bytes : 0));
    }
    reference.store(result);
    memset(result->data, 0, bytes);
    const bool computed = compute_graph(graph, n_threads);
    reference.store(nullptr);
    return computed && (bytes == 0 || !results[0].empty()) ? difference(result, results[0]) : -1;
}

void tell_failure(const std::string & line) {
    fprintf(stderr, "mtp_kernels: %s\n", line.c_str());
    failed_kinds += line + "\n";
}

bool is_tried(const ggml_tensor * op) { return tried.load(std::memory_order_relaxed) == op; }

bool is_reference(const ggml_tensor * op) { return reference.load(std::memory_order_relaxed) == op; }

void was_computed(const ggml_tensor * op) {
    if (is_tried(op)) {
        candidate_computed = true;
    }
}

bool is_proved(const operation & operation, const ggml_tensor * op, int n_threads) {
    if (is_tried(op)) {
        return true;
    }
    const auto has_proof = [&](int threads) {
        const uint64_t kind = kind_of(operation, op, threads);
        const std::atomic<uint64_t> * at = look_up(kind);
        return at && at->load(std::memory_order_acquire) == (kind | proved);
    };
    return has_proof(n_threads) || (n_threads == 1 && has_proof(2));
}

bool is_proving() { return in_proof; }

void prove(const operation & operation, const ggml_tensor * op, int n_threads) {
    if (in_proof || is_proved(operation, op, n_threads)) {
        return;
    }
    const uint64_t kind = kind_of(operation, op, n_threads);
    std::atomic<uint64_t> * at = look_up(kind);
    if (!at || at->load(std::memory_order_acquire) != 0) {
        return;
    }
    const std::lock_guard<std::mutex> lock(proving);
    at = look_up(kind);
    // Another thread may have proved it meanwhile. A proof for two threads counts for one thread, too.
    if (!at || at->load() != 0 || is_proved(operation, op, n_threads)) {
        return;
    }
    double apart = -1;
    in_proof = true;
    try {
        std::vector<std::vector<char>> result(1);
        apart = operation.try_out ? operation.try_out(operation, op, n_threads)
                                  : compare_with_ggml(operation, op, n_threads, result);
    } catch (const std::bad_alloc &) {
        // as if it could not be computed
    }
    in_proof = false;
    const bool same = apart >= 0 && apart <= operation.bound;
    if (!same) {
        char line[256];
        const char * type = op->src[0] ? ggml().type_name(op->src[0]->type) : "";
        if (apart < 0) {
            snprintf(line, sizeof(line), "%s of %s is left to ggml: a small case of it cannot be computed", operation.name, type);
        } else {
            snprintf(line, sizeof(line), "%s of %s is left to ggml: its results differ by %.2g of their size, more than %.2g",
                     operation.name, type, apart, operation.bound);
        }
        tell_failure(line);
    }
    at->store(kind | (same ? proved : failed), std::memory_order_release);
}

std::string failures() {
    const std::lock_guard<std::mutex> lock(proving);
    return failed_kinds;
}

}  // namespace mtp
