// Registers the kernels in ggml-cpu, in its list of extra buffer types (AMX, KleidiAI and repacked weights are others). On each
// thread, ggml-cpu asks every entry of the list whether it computes an operation before it does so itself. Ours holds no weights.

#include "mtp_kernels.h"

#include "choices.h"
#include "columns.h"
#include "fewer_threads.h"
#include "graph.h"
#include "graph_loop.h"
#include "grids.h"
#include "limits.h"
#include "operation.h"
#include "self_test.h"
#include "states.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <new>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

namespace mtp {

namespace {

const operation * const all_operations[] = { &product_operation,     &expert_product_operation, &attention_operation,
                                             &delta_net_operation,   &delta_net_replay_operation,
                                             &convolution_operation, &concat_operation,         &rms_norm_operation,
                                             &multiply_operation,    &scale_operation,          &argmax_operation,
                                             &copy_operation,        &get_rows_operation };
constexpr size_t n_operations = sizeof(all_operations) / sizeof(*all_operations);
constexpr int most_ops = 1024;  // more than ggml has; it names about a hundred

const kernel_set * kernels = nullptr;

bool is_empty(const ggml_tensor * op) {
    const auto without = [](const ggml_tensor * t) { return t && (rows_of(t) == 0 || t->ne[0] == 0); };
    return without(op) || std::any_of(op->src, op->src + GGML_MAX_SRC, without);
}

// One operation, as ggml-cpu calls it. Nothing here throws, because the callers are C.
class computed_here : public tensor_traits {
public:
    const operation * of = nullptr;
    std::atomic<long> computed{0};

    // Called by one thread while a graph is planned, which is when kinds are tested. Returns false, so that ggml reserves the
    // memory of its own code, which may have to compute the operation after all.
    bool work_size(int n_threads, const ggml_tensor * op, size_t &) noexcept override {
        if (!is_empty(op) && of->fits(*kernels, op)) {
            prove(*of, op, n_threads);
            if (of->plan && !is_proving()) {
                try {
                    of->plan(*kernels, op, n_threads);
                } catch (...) {
                    // no memory: as if there were no plan
                }
            }
        }
        return false;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) noexcept override {
        if (is_reference(op) || (ggml().has_use_ref() && params->use_ref) || params->nth > max_threads ||
            is_empty(op) || !of->fits(*kernels, op) || !is_proved(*of, op, params->nth)) {
            return false;
        }
        const membership member(params->threadpool, params->ith);
        if (!of->compute(*kernels, { params, &member.of }, op)) {
            return false;
        }
        was_computed(op);
        if (params->ith == 0) {
            computed.fetch_add(1, std::memory_order_relaxed);
        }
        return true;
    }
};

computed_here operations[n_operations];
computed_here * by_number[most_ops];  // ggml's numbers of operations
int last_op = 0;                      // the last one that ggml has a name for

// In the loop over a graph

computed_here * fused[n_fusions];  // what counts them, NULL where they are not wanted
int mul_mat;  // ggml's number of it

int compute_fused(const ggml_cgraph * graph, int i, ggml_compute_params * params) noexcept {
    const ggml_tensor * node = ggml().graph_node(const_cast<ggml_cgraph *>(graph), i);
    computed_here * here = node->op < most_ops ? by_number[node->op] : nullptr;
    for (int f = 0; here && f < n_fusions; f++) {
        if (fused[f] == here) {
            const int n = params->nth > max_threads ? 0 : all_fusions[f].compute(*kernels, params, graph, i);
            if (n > 0 && params->ith == 0) {
                here->computed.fetch_add(1, std::memory_order_relaxed);
            }
            return n;
        }
    }
    return 0;
}

void prefetch(const ggml_cgraph * graph, int i, const ggml_compute_params * params, int lines) noexcept {
    prefetch_next_product(*kernels, params, graph, i, lines, mul_mat);
}

// ggml divides the positions of its attention among threads, so its sums depend on their number. That of the kernels does not.
bool depends_on_threads(const ggml_cgraph * graph) {
    const int attention = op_number(attention_operation.name);
    for (int i = 0; i < n_nodes(graph); i++) {
        const ggml_tensor * node = node_at(graph, i);
        if (node->op == attention && !will_compute(node, 1)) {
            return true;
        }
    }
    return false;
}

thread_local bool watched = false;  // the graph that this thread has asked for

int begin(const ggml_cgraph * graph, int n_threads) noexcept {
    watched = n_threads > 1 && !is_proving();
    if (!watched) {
        return n_threads;
    }
    const int n = begin_graph(n_threads);
    return n < n_threads && depends_on_threads(graph) ? n_threads : n;
}

void end(int) noexcept {
    if (watched) {
        end_graph();
    }
}

void join_graph_loop() {
    static const graph_hooks hooks = { compute_fused, prefetch, begin, end };
    if (!ggml().has_graph_loop()) {
        return;
    }
    for (int f = 0; f < n_fusions; f++) {
        const fusion & fusion = all_fusions[f];
        fused[f] = by_number[op_number(fusion.first)];
        if (fused[f] && fusion.agrees && !fusion.agrees(*kernels)) {
            fused[f] = nullptr;
            char line[128];
            snprintf(line, sizeof(line), "%s is not computed with what follows it: the bits of the result differ", fusion.first);
            tell_failure(line);
        }
    }
    const int product = op_number(product_operation.name);
    mul_mat = by_number[product] ? product : 0;
    ggml().set_graph_hooks(&hooks);
}

// Whether memory can be read at what may be no address at all.
bool is_memory(const void * data, size_t size) {
    const uintptr_t begin = (uintptr_t) data & ~(uintptr_t) (sysconf(_SC_PAGESIZE) - 1);
    return data && (uintptr_t) data % sizeof(void *) == 0 && msync((void *) begin, (uintptr_t) data + size - begin, MS_ASYNC) == 0;
}

// Sees what a graph with a known plan passes to its operation, and where the pool has both.
class layout_probe : public tensor_traits {
public:
    static constexpr size_t size = 4096;
    const ggml_tensor * op = nullptr;
    const void * graph = nullptr;
    const void * plan = nullptr;
    ggml_compute_params seen = {};
    size_t graph_at = 0;
    int calls = 0;

    bool work_size(int, const ggml_tensor *, size_t & wanted) noexcept override {
        wanted = size;
        return true;
    }
    bool compute_forward(ggml_compute_params * params, ggml_tensor *) noexcept override {
        calls++;
        memcpy(&seen, params, ggml().has_use_ref() ? sizeof(seen) : offsetof(ggml_compute_params, use_ref));
        const void * const * pool = (const void * const *) params->threadpool;
        seen.threadpool = is_memory(pool, (most_graph_word + 1) * sizeof(*pool)) ? seen.threadpool : nullptr;
        for (size_t i = 1; seen.threadpool && i < most_graph_word; i++) {
            graph_at = pool[i] == graph && pool[i + 1] == plan ? i : graph_at;
        }
        return true;
    }
};

class kernels_entry : public extra_buffer_type {
public:
    layout_probe * probe = nullptr;

    bool supports_op(void *, const ggml_tensor *) noexcept override { return false; }

    tensor_traits * get_tensor_traits(const ggml_tensor * op) noexcept override {
        if (probe) {
            return op == probe->op ? probe : nullptr;
        }
        return op->op < most_ops ? by_number[op->op] : nullptr;
    }
};

// An entry that repacks weights, which leaves those that the kernels read where they are: no copy, and the memory map
// stays. Weights that it holds already are still its own.
class repacking : public extra_buffer_type {
public:
    explicit repacking(extra_buffer_type * before) : before(before) {}

    bool supports_op(void * device, const ggml_tensor * op) override {
        const ggml_tensor * weights = op->src[0];
        if (weights && !weights->data && op->op < most_ops && by_number[op->op] && have_products(*kernels, weights->type)) {
            return false;
        }
        return before->supports_op(device, op);
    }
    tensor_traits * get_tensor_traits(const ggml_tensor * op) override { return before->get_tensor_traits(op); }

private:
    extra_buffer_type * before;
};

// A ggml_backend_buffer_type as words: functions, device, context.
constexpr int most_words = 32;
void * buffer_type[most_words];
int context_word;  // where the context is

const char * const own_name = "MTP_KERNELS";
const char * name(void *) noexcept { return own_name; }

// Finds out how many functions a buffer type has: ggml returns the word behind them as the device. False if it does not.
bool find_context() {
    static char marks[most_words];
    for (int i = 0; i < most_words; i++) {
        buffer_type[i] = marks + i;
    }
    const int device = (int) ((char *) ggml().buffer_type_device(buffer_type) - marks);
    context_word = device + 1;
    return device > 1 && context_word < most_words;
}

kernels_entry entry;

// Makes our entry. Its functions are those of plain buffers on the CPU, but its name: it never has a buffer.
void make_buffer_type() {
    memcpy(buffer_type, ggml().cpu_buffer_type(), (context_word - 1) * sizeof(void *));
    buffer_type[0] = (void *) name;
    buffer_type[context_word - 1] = ggml().reg_device(ggml().cpu_reg(), 0);
    buffer_type[context_word] = &entry;
}

void *& context_of(ggml_backend_buffer_type * type) { return ((void **) type)[context_word]; }

// Whether no other entry computes the operation.
bool is_left_to_us(const ggml_tensor * op) {
    const buffer_types & list = ggml().extra_buffer_types();
    return std::none_of(list.begin(), list.end(), [op](ggml_backend_buffer_type * type) {
        extra_buffer_type * other = type ? (extra_buffer_type *) context_of(type) : nullptr;
        return other && other != &entry && other->get_tensor_traits(op);
    });
}

std::string reason;
bool plugged_in = false;

mtp_kernels_status refuse(mtp_kernels_status status, const std::string & why) {
    reason = why;
    return status;
}

// Whether ggml_tensor is as ggml.h has it; the first field that is not, or NULL.
const char * wrong_tensor_field() {
    ggml_context * context = ggml().init({ 16384, nullptr, false });
    if (!context) {
        return "data";
    }
    const int64_t ne[4] = { 3, 5, 7, 2 };
    ggml_tensor * x = ggml().new_tensor(context, GGML_TYPE_F32, 4, ne);
    char longest[200];
    memset(longest, 'x', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = 0;
    ggml().set_name(x, longest);
    const ggml_tensor * y = ggml().rms_norm(context, x, 0.25f);
    const ggml_tensor * part = ggml().view(context, x, 2, 12);
    float eps;
    memcpy(&eps, y->op_params, sizeof(eps));
    const char * wrong = x->type != GGML_TYPE_F32 || strcmp(ggml().type_name(GGML_TYPE_F32), "f32")      ? "type"
                         : memcmp(x->ne, ne, sizeof(ne))                                                 ? "ne"
                         : x->nb[0] != 4 || x->nb[3] != 4 * 3 * 5 * 7                                     ? "nb"
                         : y->op != op_number("RMS_NORM")                                                ? "op"
                         : eps != 0.25f                                                                  ? "op_params"
                         : y->src[0] != x || y->src[1] || y->src[GGML_MAX_SRC - 1]                       ? "src"
                         : y->view_src || part->view_src != x                                            ? "view_src"
                         : part->view_offs != 12                                                         ? "view_offs"
                         : !x->data || x->data == y->data || part->data != (char *) x->data + 12         ? "data"
                         : strnlen(x->name, sizeof(x->name)) != GGML_MAX_NAME - 1                         ? "name"
                         : x->extra                                                                      ? "extra"
                                                                                                         : nullptr;
    ggml().free(context);
    return wrong;
}

// Whether operations are passed what ggml_compute_params has; the first field that is not, or NULL. The entry is registered.
const char * wrong_params_field() {
    ggml_context * context = ggml().init({ 65536 + ggml().graph_overhead(), nullptr, false });
    if (!context) {
        return "wdata";
    }
    const int64_t ne[4] = { 64, 64, 1, 1 };
    ggml_tensor * weights = ggml().new_tensor(context, GGML_TYPE_F32, 2, ne);
    ggml_tensor * result = ggml().new_tensor(context, GGML_TYPE_F32, 2, ne);
    layout_probe probe;
    result->op = (ggml_op) op_number(product_operation.name);
    result->src[0] = result->src[1] = weights;
    probe.op = result;
    ggml_cgraph * graph = ggml().new_graph(context);
    ggml().build_forward_expand(graph, result);
    entry.probe = &probe;
    graph_plan plan = ggml().plan(graph, 1, nullptr);  // no other threads, which forked children would wait for
    alignas(64) static uint8_t work[2 * layout_probe::size];
    const char * wrong = plan.work_size < layout_probe::size || plan.work_size > sizeof(work) ? "wsize" : nullptr;
    if (!wrong && (plan.n_threads != 1 || plan.work_data || plan.threadpool)) {
        wrong = "threadpool";
    }
    if (!wrong) {
        plan.work_data = work;
        plan.more[0] = ggml().has_use_ref();  // use_ref
        probe.graph = graph;
        probe.plan = &plan;
        ggml().compute(graph, &plan);
        const ggml_compute_params & seen = probe.seen;
        graph_word = probe.graph_at;
        wrong = probe.calls != 1 || seen.ith != 0           ? "ith"
                : seen.nth != 1                             ? "nth"
                : seen.wsize != plan.work_size              ? "wsize"
                : seen.wdata != work                        ? "wdata"
                : !seen.threadpool                          ? "threadpool"
                : ggml().has_use_ref() && seen.use_ref != 1 ? "use_ref"
                                                            : nullptr;
    }
    entry.probe = nullptr;
    ggml().free(context);
    return wrong;
}

// The operations that MTP_GGUF_KERNELS names are in upper case, other words are not.
bool is_wanted(const char * words, const char * operation) {
    const std::string list = words ? "," + std::string(words) + "," : "";
    return list.find_first_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ") == std::string::npos ||
           list.find("," + std::string(operation) + ",") != std::string::npos;
}

const char * name_of(ggml_backend_buffer_type * type) { return (*(const char * (**) (void *) ) type)(type); }

// Whether the entry is ggml's own for repacked weights, by its name now or in the first half of 2025, or that for tiles of
// AMX, which the kernels for AVX-512 VNNI outdo (docs/decisions.md).
bool repacks(ggml_backend_buffer_type * type) {
    const char * names[] = { "CPU_REPACK", "CPU_AARCH64", "AMX" };
    return std::any_of(names, names + 3, [type](const char * name) { return !strcmp(name_of(type), name); });
}

mtp_kernels_status plug_in(void * library, const std::string & place) {
    const char * words = getenv("MTP_GGUF_KERNELS");
    if (words && !strcmp(words, "0")) {
        return refuse(MTP_KERNELS_OFF, "MTP_GGUF_KERNELS=0");
    }
    kernels = choose_kernels(words);
    if (!kernels) {
        return refuse(MTP_KERNELS_NO_CPU, "this CPU has neither AVX2 nor dot products of ARM");
    }
    if (const char * missing = find_ggml(library)) {
        return refuse(MTP_KERNELS_NO_GGML, place + ": expected a libggml-cpu, found no function " + missing);
    }
    prepare_notes();
    buffer_types & list = ggml().extra_buffer_types();
    if (std::any_of(list.begin(), list.end(), [](auto * type) { return type && !strcmp(name_of(type), own_name); })) {
        return refuse(MTP_KERNELS_OTHER_GGML, place + ": another copy of the kernels is plugged in");
    }
    for (size_t i = 0; i < n_operations; i++) {
        operations[i].of = all_operations[i];
    }
    // The name of the last operation ends ggml's table, behind which nothing may be read. Newer versions have more
    // operations than ggml.h knew, in any place; the patched one has one of its own at the end.
    const char * const last = ggml().gated_delta_net_replay ? "GATED_DELTA_NET_REPLAY" : ggml().glu ? "GLU" : "OPT_STEP_ADAMW";
    std::fill(by_number, by_number + most_ops, nullptr);
    const char * found = "";
    for (int op = 1; op < 2 * GGML_OP_COUNT && strcmp(found, last); op++) {
        found = ggml().op_name(op);
        last_op = op;
        for (computed_here & here : operations) {
            if (!strcmp(found, here.of->name)) {
                by_number[op] = &here;
            }
        }
    }
    if (const char * wrong = wrong_tensor_field()) {
        return refuse(MTP_KERNELS_OTHER_GGML, place + ": its ggml_tensor has another field " + wrong + " than expected");
    }
    const type_traits & traits = *ggml().traits(GGML_TYPE_Q8_0);
    if (traits.name != ggml().type_name(GGML_TYPE_Q8_0) || traits.block_size != QK8_0 || traits.type_size != sizeof(block_q8_0)) {
        return refuse(MTP_KERNELS_OTHER_GGML, place + ": its ggml_type_traits has other fields than expected");
    }
    read_grids();
    begin_choices(*kernels, words);
    if (!find_context()) {
        return refuse(MTP_KERNELS_OTHER_GGML, place + ": its buffer types have no device where one is expected");
    }
    make_buffer_type();
    computed_here * wanted[most_ops];
    std::transform(by_number, by_number + most_ops, wanted,
                   [words](computed_here * here) { return here && is_wanted(words, here->of->name) ? here : nullptr; });
    list.push_back((ggml_backend_buffer_type *) buffer_type);  // from here on, nothing throws
    if (const char * wrong = wrong_params_field()) {
        list.pop_back();
        return refuse(MTP_KERNELS_OTHER_GGML, place + ": its ggml_compute_params has another field " + wrong + " than expected");
    }
    std::copy_n(wanted, most_ops, by_number);
    for (ggml_backend_buffer_type * type : list) {
        if (type && context_of(type) && repacks(type)) {
            extra_buffer_type * before = (extra_buffer_type *) context_of(type);
            extra_buffer_type * leaving = new (std::nothrow) repacking(before);
            context_of(type) = leaving ? leaving : before;
        }
    }
    join_graph_loop();
    reason.clear();
    plugged_in = true;
    return MTP_KERNELS_PLUGGED_IN;
}

std::mutex plugging;
std::atomic<bool> plugging_begun{false};

}  // namespace

int op_number(const char * name) {
    for (int op = 1; op <= last_op; op++) {
        if (!strcmp(ggml().op_name(op), name)) {
            return op;
        }
    }
    return 0;
}

bool will_compute(const ggml_tensor * op, int n_threads) {
    const computed_here * here = op->op < most_ops ? by_number[op->op] : nullptr;
    return here && n_threads <= max_threads && !is_empty(op) && here->of->fits(*kernels, op) &&
           is_proved(*here->of, op, n_threads) && is_left_to_us(op);
}

}  // namespace mtp

using namespace mtp;

extern "C" enum mtp_kernels_status mtp_kernels_plug_in(const char * path) {
    // While it is asked for its list, a patched ggml-cpu loads the library from its folder, which may be this one, and calls
    // this function.
    static thread_local bool under_way = false;
    if (under_way) {
        return MTP_KERNELS_PLUGGED_IN;
    }
    plugging_begun = true;
    const std::lock_guard<std::mutex> lock(plugging);
    const struct scope {
        scope() { under_way = true; }
        ~scope() { under_way = false; }
    } plugging_here;
    try {
        Dl_info planner;
        if (!path && dladdr(dlsym(RTLD_DEFAULT, "ggml_graph_plan"), &planner)) {
            path = planner.dli_fname;
        }
        void * library = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : nullptr;
        if (!library) {
            const std::string place = path ? path : "this program";
            return refuse(MTP_KERNELS_NO_GGML, place + ": expected a libggml-cpu that is loaded, found none");
        }
        if (plugged_in) {
            const auto list = dlsym(library, buffer_types_function);
            const auto former = dlsym(library, former_buffer_types_function);
            return (void *) ggml().extra_buffer_types == (list ? list : former)
                       ? MTP_KERNELS_PLUGGED_IN
                       : refuse(MTP_KERNELS_OTHER_GGML, std::string(path) + ": the kernels are plugged into another ggml of this process");
        }
        // Threads may run in this library as long as the process does.
        Dl_info own;
        if (dladdr((void *) mtp_kernels_plug_in, &own)) {
            dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
        }
        return plug_in(library, path);
    } catch (...) {
        reason = "no memory";  // as short as takes none
        return MTP_KERNELS_OTHER_GGML;
    }
}

extern "C" const char * mtp_kernels_reason(void) { return reason.c_str(); }

extern "C" const char * mtp_kernels_name(void) { return plugged_in ? kernels->name : nullptr; }

namespace {

size_t write(const std::string & all, char * text, size_t size) {
    if (size > 0) {
        snprintf(text, size, "%s", all.c_str());
    }
    return all.size();
}

}  // namespace

extern "C" size_t mtp_kernels_report(char * text, size_t size) {
    const std::lock_guard<std::mutex> lock(plugging);
    std::string all;
    for (const computed_here * of : by_number) {
        if (of && plugged_in) {
            all += (all.empty() ? "" : ",") + std::string(of->of->name);
        }
    }
    all += "\n" + failures();
    return write(all, text, size);
}

extern "C" size_t mtp_kernels_choices(char * text, size_t size) { return write(plugged_in ? choices() : "", text, size); }

extern "C" size_t mtp_kernels_types(char * text, size_t size) {
    std::string all;
    for (int type = 0; plugged_in && type < GGML_TYPE_COUNT; type++) {
        if (have_products(*kernels, (ggml_type) type)) {
            all += (all.empty() ? "" : ",") + std::string(ggml().type_name((ggml_type) type));
        }
    }
    return write(all, text, size);
}

extern "C" double mtp_kernels_read_limit(const void * data, size_t size, int n_threads, double seconds) {
    try {
        return n_threads > 0 ? read_limit(data, size, n_threads, seconds) : 0;
    } catch (const std::exception &) {
        return 0;
    }
}

extern "C" double mtp_kernels_product_limit(int n_threads, double seconds) {
    try {
        return n_threads > 0 && plugged_in ? product_limit(*kernels, n_threads, seconds) : 0;
    } catch (const std::exception &) {
        return 0;
    }
}

extern "C" long mtp_kernels_computed(const char * operation) {
    for (const computed_here & here : operations) {
        if (here.of && !strcmp(here.of->name, operation)) {
            return here.computed.load();
        }
    }
    return strcmp(operation, states_in_memory.name) ? 0 : rows_left.load();
}

#if defined(__ELF__)
// Where the library was loaded first, as LD_PRELOAD does, ggml-cpu's own calls of its list come here. The first one plugs
// the kernels in. `caller`: an address in ggml-cpu.
static void * list_for(void * caller, const char * function) {
    using list_function = void * (*) ();
    static std::atomic<list_function> list{nullptr};
    if (const list_function known = list.load(std::memory_order_acquire)) {
        return known();
    }
    Dl_info info;
    void * library = dladdr(caller, &info) ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr;
    const list_function known = (list_function) dlsym(library ? library : RTLD_NEXT, function);
    if (!known) {
        fprintf(stderr, "mtp_kernels: expected ggml-cpu's list of buffer types, found none\n");
        abort();
    }
    void * types = known();
    list.store(known, std::memory_order_release);
    if (library && !plugging_begun.exchange(true) && mtp_kernels_plug_in(info.dli_fname) > MTP_KERNELS_OFF) {
        fprintf(stderr, "mtp_kernels: not used: %s\n", mtp_kernels_reason());
    }
    return types;
}

extern "C" MTP_KERNELS_API void * _Z39ggml_backend_cpu_get_extra_buffer_typesv() {
    return list_for(__builtin_return_address(0), buffer_types_function);
}

extern "C" MTP_KERNELS_API void * _Z39ggml_backend_cpu_get_extra_buffers_typev() {
    return list_for(__builtin_return_address(0), former_buffer_types_function);
}
#endif
