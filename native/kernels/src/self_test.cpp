#include "self_test.h"

#include "ggml_api.h"
#include "grids.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>
#include <new>
#include <vector>

namespace mtp {

namespace {

// What is known of a kind, by its hash. A full table leaves further kinds to ggml; a model has some hundred.
constexpr size_t table_size = 16384;
constexpr uint64_t proved = 1, failed = 0;  // in the lowest bit
std::atomic<uint64_t> table[table_size];

std::mutex proving;
std::atomic<const ggml_tensor *> reference{nullptr}, tried{nullptr};
std::atomic<bool> candidate_computed;
thread_local bool in_proof = false;  // whose graph is planned, too
std::string failed_kinds;

// How `t` lies, which is the source of `op` or `op` itself, and its sizes.
small_case::tensor like(const ggml_tensor * t, const ggml_tensor * op) {
    small_case::tensor to = { GGML_TYPE_COUNT, { 1, 1, 1, 1 }, { 0, 1, 2, 3 }, {}, false, 1, -1.0f, 1.0f };
    if (!t) {
        return to;
    }
    to.type = t->type;
    std::copy_n(t->ne, 4, to.ne);
    to.is_result = t->data == op->data && same_shape(t, op) && !memcmp(t->nb, op->nb, sizeof(t->nb));
    // Strides of a single element mean nothing: such dimensions stay where they are.
    const auto is_inside = [t](int a, int b) { return t->ne[a] != 1 && t->ne[b] != 1 && t->nb[a] < t->nb[b]; };
    for (int i = 0; i < 4; i++) {
        for (int j = i + 1; j < 4; j++) {
            if (is_inside(to.order[j], to.order[i])) {
                std::swap(to.order[j], to.order[i]);
            }
        }
    }
    const type_traits & type = *ggml().traits(t->type);
    size_t next = type.type_size;
    for (int i = 0; i < 4; i++) {
        const int dim = to.order[i];
        if (t->ne[dim] != 1) {
            to.apart[i] = t->nb[dim] != next;
            next = t->nb[dim] * (dim == 0 ? t->ne[0] / type.block_size : t->ne[dim]);
        }
    }
    return to;
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

namespace {

// Contiguous rows for a tensor.
std::vector<char> content_of(const ggml_tensor * t, const small_case::tensor & like, random_numbers & random) {
    const int64_t rows = rows_of(t), n = t->ne[0];
    std::vector<char> content(rows * ggml().row_size(t->type, n));
    if (t->type == GGML_TYPE_I32) {
        for (int64_t i = 0; i < rows * n; i++) {
            ((int32_t *) content.data())[i] = like.below > 0 ? (int32_t) (random.next() % like.below) : 0;
        }
    } else if (has_grid(t->type)) {  // to quantize, ggml would prepare tables for a second
        const size_t size = ggml().traits(t->type)->type_size;
        for (size_t i = 0; i < content.size(); i++) {
            content[i] = (char) (i % size == 0 ? 0 : i % size == 1 ? 0x24 : random.next());  // d is 1 / 64
        }
    } else {
        // ggml takes milliseconds to quantize some rows. Of types with blocks, a few are quantized, and lie in random order.
        const type_traits & type = *ggml().traits(t->type);
        const int64_t blocks = rows * n / type.block_size, distinct = type.block_size == 1 ? blocks : std::min<int64_t>(blocks, 16);
        std::vector<float> values(distinct * type.block_size);
        std::generate(values.begin(), values.end(), [&] { return random.between(like.low, like.high); });
        if (t->type == GGML_TYPE_F32) {
            memcpy(content.data(), values.data(), content.size());
        } else {
            const std::vector<float> imatrix(type.block_size, 1.0f);
            ggml().quantize_chunk(t->type, values.data(), content.data(), 0, distinct, type.block_size, imatrix.data());
        }
        for (int64_t i = distinct; i < blocks; i++) {
            memcpy(&content[i * type.type_size], &content[random.next() % distinct * type.type_size], type.type_size);
        }
    }
    return content;
}

}  // namespace

void fill(ggml_tensor * t, const small_case::tensor & like, random_numbers & random) {
    const std::vector<char> content = content_of(t, like, random);
    const type_traits & type = *ggml().traits(t->type);
    const int64_t blocks = t->ne[0] / type.block_size;
    for (int64_t i = 0; i < rows_of(t) * blocks; i++) {
        memcpy(row_at(t, i / blocks) + i % blocks * t->nb[0], content.data() + i * type.type_size, type.type_size);
    }
}

small_case case_of(const operation & operation, const ggml_tensor * op) {
    small_case small;
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        small.src[i] = like(op->src[i], op);
    }
    small.result = like(op, op);
    operation.shrink(op, small);
    return small;
}

namespace {

uint64_t kind_of(const operation & operation, const ggml_tensor * op, int n_threads) {
    const small_case small = case_of(operation, op);
    uint64_t hash = 0xcbf29ce484222325u;
    const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3u; };
    const auto add_tensor = [&add](const small_case::tensor & t) {
        if (t.type != GGML_TYPE_COUNT) {
            uint64_t lies = t.is_result;
            for (int i = 0; i < 4; i++) {
                lies = lies << 3 | t.order[i] << 1 | t.apart[i];
            }
            add(t.ne[0] ^ t.ne[1] << 32);
            add(t.ne[2] ^ t.ne[3] << 32);
            add(lies << 32 | t.type);
        } else {
            add(0);
        }
    };
    add((uintptr_t) &operation);
    uint64_t params[GGML_MAX_OP_PARAMS / 8];
    memcpy(params, op->op_params, sizeof(params));
    std::for_each(params, std::end(params), add);
    std::for_each(small.src, small.src + GGML_MAX_SRC, add_tensor);
    add_tensor(small.result);
    add(n_threads > 1);
    hash ^= hash >> 29;
    return (hash | 2) & ~(uint64_t) 1;  // never 0, which marks a free place
}

// A hash of all that a kind is made of, as it lies in the tensors: every thread needs it for every operation, and a kind takes
// several times as long.
uint64_t signature_of(const operation & operation, const ggml_tensor * op, int n_threads) {
    uint64_t hash = (uintptr_t) &operation ^ (uint64_t) (n_threads > 1) << 63;
    const auto add = [&hash](uint64_t value) {
        hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    };
    const auto add_tensor = [&add, op](const ggml_tensor * t) {
        for (int i = 0; i < 4; i++) {
            add((uint64_t) t->ne[i] ^ (uint64_t) t->nb[i] << 32 ^ (uint64_t) t->nb[i] >> 32);
        }
        add((uint64_t) t->type << 1 | (t->data == op->data));
    };
    add_tensor(op);
    uint64_t params[GGML_MAX_OP_PARAMS / 8];
    memcpy(params, op->op_params, sizeof(params));
    std::for_each(params, std::end(params), add);
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (op->src[i]) {
            add(i);
            add_tensor(op->src[i]);
        }
    }
    return hash;
}

// The strides of a small tensor, and the bytes that it takes: elements that are apart have room for another one between
// them, and the first one is not where memory begins.
size_t lay_out(const small_case::tensor & t, size_t (&nb)[4]) {
    const type_traits & type = *ggml().traits(t.type);
    size_t next = type.type_size;
    for (int i = 0; i < 4; i++) {
        const int dim = t.order[i];
        nb[dim] = next + (t.apart[i] ? type.type_size : 0);
        next = nb[dim] * (dim == 0 ? t.ne[0] / type.block_size : t.ne[dim]);
    }
    return type.type_size + next;
}

}  // namespace

size_t size_of(const small_case::tensor & t) {
    size_t nb[4];
    return t.type == GGML_TYPE_COUNT ? 0 : 2 * (ggml().tensor_overhead() + 64) + ggml().traits(t.type)->type_size + lay_out(t, nb);
}

ggml_tensor * place(ggml_context * context, const small_case::tensor & like, ggml_tensor ** memory) {
    const int64_t block[4] = { ggml().traits(like.type)->block_size, 1, 1, 1 };
    ggml_tensor * t = ggml().new_tensor(context, like.type, 1, block);
    std::copy_n(like.ne, 4, t->ne);
    const int64_t bytes[4] = { (int64_t) lay_out(like, t->nb), 1, 1, 1 };
    ggml_tensor * of = ggml().new_tensor(context, GGML_TYPE_I8, 1, bytes);
    memset(of->data, 0, bytes[0]);
    t->data = (char *) of->data + ggml().traits(like.type)->type_size;
    if (memory) {
        *memory = of;
    }
    return t;
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
double difference(ggml_type type, const std::vector<char> & expected, const std::vector<char> & found) {
    if (type != GGML_TYPE_F32) {
        return expected == found ? 0.0 : INFINITY;
    }
    const float * a = (const float *) expected.data();
    const float * b = (const float *) found.data();
    double apart = 0, all = 0;
    for (size_t i = 0; i < found.size() / sizeof(float); i++) {
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

small_graph::small_graph(const operation & operation, const ggml_tensor * op, int n_threads) : n_threads(n_threads) {
    const small_case small = case_of(operation, op);
    type = small.result.type;
    size_t size = ggml().graph_overhead() + 64;
    for (const small_case::tensor & t : small.src) {
        size += size_of(t);
    }
    size += size_of(small.result);

    // Beside the operation there is one that takes all threads, which some operations are not planned for on their own.
    const int64_t one[4] = { 1, 1, 1, 1 };
    size += 2 * ggml().tensor_overhead() + 2 * 64;

    context = make_context(size);
    if (!context) {
        return;
    }
    random_numbers random;
    tensor = place(context.get(), small.result, &memory);
    tensor->op = op->op;
    memcpy(tensor->op_params, op->op_params, sizeof(tensor->op_params));
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (small.src[i].type != GGML_TYPE_COUNT) {
            ggml_tensor * src = tensor->src[i] = place(context.get(), small.src[i]);
            src->data = small.src[i].is_result ? tensor->data : src->data;
            fill(src, small.src[i], random);
        }
    }
    before.assign((const char *) memory->data, (const char *) memory->data + memory->ne[0]);
    graph = ggml().new_graph(context.get());
    ggml().build_forward_expand(graph, tensor);
    ggml_tensor * other = ggml().new_tensor(context.get(), GGML_TYPE_F32, 4, one);
    *(float *) other->data = 1.0f;
    ggml().build_forward_expand(graph, ggml().rms_norm(context.get(), other, 0.0f));
}

std::vector<char> small_graph::compute(bool by_kernels) {
    if (!context) {
        return {};
    }
    memcpy(memory->data, before.data(), before.size());  // what an operation does not write stays equal
    candidate_computed = false;
    std::atomic<const ggml_tensor *> & by = by_kernels ? tried : reference;
    by.store(tensor);
    const bool done = compute_graph(graph, n_threads);
    by.store(nullptr);
    if (!done || candidate_computed != by_kernels) {
        return {};
    }
    return { (const char *) memory->data, (const char *) memory->data + memory->ne[0] };
}

double small_graph::difference(const std::vector<char> & expected, const std::vector<char> & found) const {
    return expected.empty() || found.empty() ? -1 : mtp::difference(type, expected, found);
}

void tell_failure(const char * line) noexcept {
    fprintf(stderr, "mtp_kernels: %s\n", line);
    try {
        (failed_kinds += line) += '\n';
    } catch (...) {
        // no memory for the report
    }
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
    static thread_local uint64_t known[1024];  // signatures of what was found to be proved
    const uint64_t signature = signature_of(operation, op, n_threads);
    uint64_t & at = known[signature >> 54];
    if (at == signature) {
        return true;
    }
    const auto has_proof = [&](int threads) {
        const uint64_t kind = kind_of(operation, op, threads);
        const std::atomic<uint64_t> * entry = look_up(kind);
        return entry && entry->load(std::memory_order_acquire) == (kind | proved);
    };
    if (!has_proof(n_threads) && (n_threads != 1 || !has_proof(2))) {
        return false;
    }
    at = signature;
    return true;
}

bool is_proving() { return in_proof; }

void prove(const operation & operation, const ggml_tensor * op, int n_threads) noexcept {
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
        if (operation.try_out) {
            apart = operation.try_out(operation, op, n_threads);
        } else {
            small_graph graph(operation, op, n_threads);
            apart = graph.difference(graph.compute(false), graph.compute(true));
        }
    } catch (...) {
        // no memory: as if it could not be computed
    }
    tried = reference = nullptr;
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
