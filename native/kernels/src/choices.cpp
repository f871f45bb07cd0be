#include "choices.h"

#include "columns.h"
#include "ggml_api.h"
#include "self_test.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <numeric>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mtp {

namespace {

constexpr size_t most_stretch = 512 << 10, least_stretch = 32 << 10;  // bytes that are timed together
constexpr int n_samples = 64;  // of each candidate, in the end
// After so many samples of each candidate, those are left out that take so many times as long as the fastest one.
constexpr struct { int samples; float times; } rounds[] = { { 8, 1.25f }, { 16, 1.12f }, { 32, 1.06f } };
constexpr int n_rounds = sizeof(rounds) / sizeof(*rounds);
constexpr float most_scatter = 0.5f;  // what scatters more, and more than it gains, is measured again by the next process

constexpr int most_products = 4096;  // of one kind, in a model
constexpr int n_types = 64, n_thread_slots = 24;
constexpr size_t most_file = 64 << 10;

int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int thread_slot(int n_threads) { return n_threads <= 16 ? n_threads : std::min(17 + (n_threads - 17) / 64, n_thread_slots - 1); }

// Of samples, in nanoseconds for a MiB
struct summary {
    float time;     // the mean of the faster half, because other programs only make something slower
    float scatter;  // between the quartiles, in medians

    summary(const float * samples, int n) {
        float sorted[n_samples];
        std::copy_n(samples, n, sorted);
        std::sort(sorted, sorted + n);
        time = std::accumulate(sorted, sorted + n / 2, 0.0f) / (n / 2);
        scatter = (sorted[n - 1 - n / 4] - sorted[n / 4]) / sorted[n / 2];
    }
};

#if !defined(MTP_KERNELS_VERSION)
#define MTP_KERNELS_VERSION "unknown"  // not built with CMake
#endif

}  // namespace

// What is known of the products of one kind.
struct cell {
    ggml_type type;
    int columns, threads;  // class of columns
    bool long_rows, experts;
    candidate all[most_candidates];
    int count;
    std::atomic<const candidate *> chosen{nullptr};
    // Weights that were read first: when they come again, they are in memory. Those of a model that was unloaded never do.
    std::atomic<const void *> first{nullptr};
    std::atomic<int> others{0};  // products since
    std::atomic<bool> again{false};
    std::atomic<bool> measured{false};  // is being, or was

    // The rest is for those who hold the lock.
    std::atomic<bool> locked{false};

    // Takes the lock unless another thread has it, which is rare and costs a sample.
    bool lock() { return !locked.exchange(true, std::memory_order_acquire); }
    void unlock() { locked.store(false, std::memory_order_release); }

    float samples[most_candidates][n_samples];
    int n[most_candidates] = {};
    bool out[most_candidates] = {};  // left out
    int round = 0;
    uint32_t random = 0x9E3779B9u;
    float ns = 0, over_first = 0, over_next = 0;  // of what was chosen

    std::string key() const {
        char text[96];
        snprintf(text, sizeof(text), "%s %d %s %s %d", ggml().type_name(type), class_columns[columns], long_rows ? "long" : "short",
                 experts ? "experts" : "dense", threads);
        return text;
    }
};

namespace {

const kernel_set * kernels;
std::string words;  // of MTP_GGUF_KERNELS
bool is_fixed = true;
std::string path;  // of the table; "": there is none
std::atomic<cell *> cells[n_types][n_column_classes][2][2][n_thread_slots];
std::atomic<uint64_t> excluded[n_types];  // ids of candidates
std::mutex writing;

std::atomic<const candidate *> forced{nullptr};

bool is_excluded(ggml_type type, const candidate & of) {
    return excluded[type].load(std::memory_order_relaxed) >> of.id & 1;
}

// The cell of these products, made when it is first asked for; NULL if there is no memory.
cell * cell_of(ggml_type type, int columns, bool long_rows, bool experts, int n_threads) {
    std::atomic<cell *> & at = cells[type][columns][long_rows][experts][thread_slot(n_threads)];
    cell * found = at.load(std::memory_order_acquire);
    if (found) {
        return found;
    }
    cell * made = new (std::nothrow) cell;
    if (!made) {
        return nullptr;
    }
    made->type = type;
    made->columns = columns;
    made->long_rows = long_rows;
    made->experts = experts;
    made->threads = n_threads;
    made->count = candidates_of(type, ggml().traits(type)->block_size, columns, *kernels, words.c_str(), made->all);
    if (made->count == 1 || is_fixed) {
        made->chosen = &made->all[0];
    }
    if (!at.compare_exchange_strong(found, made, std::memory_order_acq_rel)) {
        delete made;
        return found;
    }
    return made;
}

template <typename F> void each_cell(const F & visit) {
    std::atomic<cell *> * const all = &cells[0][0][0][0][0];
    for (size_t i = 0; i < sizeof(cells) / sizeof(*all); i++) {
        if (cell * found = all[i].load(std::memory_order_acquire)) {
            visit(*found);
        }
    }
}

// Leaves out candidates, and takes one, when there are enough samples of each. With the lock of the cell. Whether one was taken,
// and may be stored.
bool decide(cell & of) {
    int least = n_samples, live = 0;
    for (int i = 0; i < of.count; i++) {
        of.out[i] = of.out[i] || is_excluded(of.type, of.all[i]);
        if (!of.out[i]) {
            least = std::min(least, of.n[i]);
            live++;
        }
    }
    if (least < (of.round < n_rounds ? rounds[of.round].samples : n_samples)) {
        return false;
    }
    float times[most_candidates] = {};
    int best = -1, next = -1;  // the fastest two of those that are left
    for (int i = 0; i < of.count; i++) {
        if (of.n[i] == 0) {  // its results differ
            continue;
        }
        times[i] = summary(of.samples[i], of.n[i]).time;
        if (of.out[i]) {
            continue;
        }
        if (best < 0 || times[i] < times[best]) {
            next = best;
            best = i;
        } else if (next < 0 || times[i] < times[next]) {
            next = i;
        }
    }
    if (best < 0) { // all that were left have lost their proof meanwhile
        return false;
    }
    if (of.round < n_rounds) {
        for (int i = 0; i < of.count; i++) {
            if (!of.out[i] && times[i] > rounds[of.round].times * times[best]) {
                of.out[i] = true;
                live--;
            }
        }
        of.round++;
        if (live > 1) {
            return false;
        }
    }
    of.ns = times[best];
    of.over_first = times[0] / times[best];
    of.over_next = next < 0 ? 1.0f : times[next] / times[best];
    of.chosen.store(&of.all[best], std::memory_order_release);
    return summary(of.samples[best], of.n[best]).scatter <= std::max(most_scatter, of.over_next - 1);
}

// The table ------------------------------------------------------------------------------------------------------------

uint64_t hash(const std::string & text) {
    uint64_t sum = 0xcbf29ce484222325u;
    for (const unsigned char c : text) {
        sum = (sum ^ c) * 0x100000001b3u;
    }
    return sum;
}

// This CPU, as far as a choice depends on it.
std::string cpu() {
    char text[256] = "";
#if defined(__x86_64__)
    unsigned r[4], brand[13] = {};
    for (unsigned i = 0; i < 3; i++) {
        __get_cpuid(0x80000002u + i, &brand[4 * i], &brand[4 * i + 1], &brand[4 * i + 2], &brand[4 * i + 3]);
    }
    std::string features;
    for (unsigned leaf : { 1u, 7u, 0x80000001u }) {
        if (__get_cpuid_count(leaf, 0, &r[0], &r[1], &r[2], &r[3])) {
            r[1] = leaf == 1 ? 0 : r[1];  // has the number of the core
            r[2] = leaf == 1 ? r[2] & ~(1u << 27) : r[2];
            features.append((const char *) r, sizeof(r));
        }
    }
    snprintf(text, sizeof(text), "%.48s %016" PRIx64, (const char *) brand, hash(features));
#endif
    std::string all = text;
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    for (const int cache : { _SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE }) {
        all += " " + std::to_string(sysconf(cache));
    }
#endif
    return all;
}

std::string key_line() { return "key " MTP_KERNELS_VERSION " " + cpu() + "\n"; }

// What the file has behind its first line; "" if it is not ours, damaged, or of another CPU or version.
std::string read_table() {
    std::string text;
    const int file = path.empty() ? -1 : open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);  // it may be a pipe
    struct stat about;
    if (file >= 0 && fstat(file, &about) == 0 && S_ISREG(about.st_mode) && about.st_size <= (off_t) most_file) {
        text.resize(about.st_size);
        text.resize(std::max<ssize_t>(0, read(file, &text[0], text.size())));
    }
    if (file >= 0) {
        close(file);
    }
    const size_t end = text.find('\n');
    if (end == std::string::npos) {
        return "";
    }
    const std::string body = text.substr(end + 1);
    char first[64];
    snprintf(first, sizeof(first), "mtp_kernels choices %016" PRIx64, hash(body));
    const std::string key = key_line();
    return text.substr(0, end) == first && body.compare(0, key.size(), key) == 0 ? body.substr(key.size()) : "";
}

std::string line_of(const cell & of, const candidate & chosen) {
    char text[160];
    snprintf(text, sizeof(text), "%s %s %.0f %.2f %.2f\n", of.key().c_str(), name_of(chosen).c_str(), of.ns, of.over_first, of.over_next);
    return text;
}

template <typename F> void each_line(const std::string & text, const F & visit) {
    for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
        visit(text.substr(at, end + 1 - at));
    }
}

void take_line(const std::string & line) {
    char type[32], rows[8], kind[8], name[64];
    int columns, threads;
    float ns, over_first, over_next;
    if (sscanf(line.c_str(), "%31s %d %7s %7s %d %63s %f %f %f", type, &columns, rows, kind, &threads, name, &ns, &over_first,
               &over_next) != 9 || threads < 1 || threads > max_threads) {
        return;
    }
    int number = 0;
    while (number < GGML_TYPE_COUNT && number < n_types && strcmp(ggml().type_name(number), type)) {
        number++;
    }
    if (number == GGML_TYPE_COUNT || number == n_types || !have_products(*kernels, (ggml_type) number)) {
        return;
    }
    cell * to = cell_of((ggml_type) number, column_class(columns), !strcmp(rows, "long"), !strcmp(kind, "experts"), threads);
    for (int i = 0; to && i < to->count; i++) {
        if (name_of(to->all[i]) == name) {
            to->ns = ns;
            to->over_first = over_first;
            to->over_next = over_next;
            to->chosen = &to->all[i];
        }
    }
}

// Adds a line to the table. Nothing is lost but time if that fails.
void store(const cell & of) {
    if (path.empty()) {
        return;
    }
    const std::lock_guard<std::mutex> lock(writing);
    const std::string key = of.key() + " ";
    std::string body = key_line();
    each_line(read_table(), [&](const std::string & line) { body += line.compare(0, key.size(), key) ? line : ""; });
    body += line_of(of, *of.chosen.load());
    for (size_t at = path.find("/mtp-gguf/"); at != std::string::npos; at = path.find('/', at + 1)) {
        mkdir(path.substr(0, at).c_str(), 0777);
    }
    const std::string part = path + "." + std::to_string(getpid()) + ".part";
    if (FILE * file = fopen(part.c_str(), "wbx")) {
        const bool written = fprintf(file, "mtp_kernels choices %016" PRIx64 "\n%s", hash(body), body.c_str()) > 0;
        if (fclose(file) != 0 || !written || rename(part.c_str(), path.c_str()) != 0) {
            remove(part.c_str());
        }
    }
}

}  // namespace

std::string name_of(const candidate & of) {
    return std::string(of.set) + (of.how.once ? "+hint" : "") + (of.how.two ? "+two_streams" : "") + (of.how.panels ? "+panels" : "");
}

void begin_choices(const kernel_set & set, const char * restriction) {
    kernels = &set;
    words = restriction ? restriction : "";
    is_fixed = has_word(restriction, "fixed");
    const char * cache = getenv("XDG_CACHE_HOME");
    const char * home = getenv("HOME");
    const bool anew = has_word(restriction, "anew");
    // What was measured among all candidates is of no use among some. Names of operations, in upper case, restrict none.
    const bool restricted = std::any_of(words.begin(), words.end(), [](char c) { return c >= 'a' && c <= 'z'; }) && words != "anew";
    if (is_fixed || restricted || (!cache && !home)) {
        return;
    }
    char name[32];
    snprintf(name, sizeof(name), "%016" PRIx64 ".txt", hash(cpu()));
    path = (cache && *cache ? std::string(cache) : std::string(home ? home : "") + "/.cache") + "/mtp-gguf/kernels/" + name;
    if (!anew) {
        each_line(read_table(), take_line);
    }
}

int candidates_for(const ggml_tensor * op, int64_t columns, candidate (&to)[most_candidates]) {
    const ggml_type type = op->src[0]->type;
    return candidates_of(type, ggml().traits(type)->block_size, column_class(columns), *kernels, words.c_str(), to);
}

void exclude(ggml_type type, const candidate & of) {
    if (type < n_types) {
        excluded[type] |= uint64_t(1) << of.id;
    }
}

forced_candidate::forced_candidate(const candidate * of) { forced = of; }
forced_candidate::~forced_candidate() { forced = nullptr; }

choice::choice(const ggml_tensor * op, int64_t columns, const task & task) {
    const int n_threads = task.nth();
    const ggml_tensor * weights = op->src[0];
    static thread_local candidate unknown;  // without memory, or of a type beyond the table
    if (const candidate * of = is_tried(op) ? forced.load() : nullptr) {
        unknown = *of;
        now = &unknown;
        return;
    }
    const int column = column_class(columns);
    const bool experts = op->src[2] != nullptr;
    // Where as many columns as the class has at most leave no room for weights in an L1 cache of 32 to 48 KB
    const bool long_rows = weights->ne[0] * class_columns[column] >= 20480;
    cell * found = weights->type < n_types ? cell_of(weights->type, column, long_rows, experts, n_threads) : nullptr;
    if (!found) {
        unknown = { kernels->name, kernels->product(weights->type), {}, 0 };
        now = &unknown;
        return;
    }
    now = found->chosen.load(std::memory_order_acquire);
    if (now) {
        now = is_excluded(found->type, *now) ? &found->all[0] : now;
        return;
    }
    now = &found->all[0];
    if (task.ith() == 0 && !found->again) {
        if (found->first == weights->data) {
            found->again = true;
        } else if (!found->first || ++found->others > most_products) {
            found->first = weights->data;
            found->others = 0;
        }
    }
    const int64_t matrices = experts ? op->src[2]->ne[0] : weights->ne[2] * weights->ne[3];
    if (found->again && (size_t) (matrices * weights->ne[1]) * weights->nb[1] >= least_stretch * n_threads) {
        at = found;
        found->measured = true;
    }
}

choice::~choice() { end_stretch(); }

const candidate & choice::next(size_t bytes, bool own) {
    if (!at) {
        return *now;
    }
    if (!own || stretch >= most_stretch) {
        end_stretch();
    }
    if (!own) {  // of another thread's share: not what was prefetched
        return *now;
    }
    if (began == 0 && at->lock()) {
        // one with the fewest samples, by chance, so that none meets the same products again and again
        int least = n_samples, ties = 0, pick = 0;
        for (int i = 0; i < at->count; i++) {
            if (at->out[i] || is_excluded(at->type, at->all[i]) || at->n[i] > least) {
                continue;
            }
            ties = at->n[i] < least ? 1 : ties + 1;
            least = at->n[i];
            at->random = at->random * 1664525u + 1013904223u;
            pick = (at->random >> 16) % ties == 0 ? i : pick;
        }
        at->unlock();
        now = &at->all[pick];
        began = nanoseconds();
    }
    stretch += bytes;
    return *now;
}

reading choice::how(const candidate & of, int64_t group) {
    reading found = of.how;
    found.again = called == &of && called_for == group;
    called = &of;
    called_for = group;
    return found;
}

void choice::end_stretch() {
    if (began == 0) {
        return;
    }
    const float ns = (float) (nanoseconds() - began) / stretch * (1 << 20);
    bool settled = false;
    if (stretch >= least_stretch && at->lock()) {
        const int i = (int) (now - at->all);
        if (!at->chosen.load(std::memory_order_relaxed) && at->n[i] < n_samples) {
            at->samples[i][at->n[i]++] = ns;
            settled = decide(*at);
        }
        at->unlock();
    }
    began = 0;
    stretch = 0;
    if (settled) {
        try {
            store(*at);
        } catch (const std::exception &) {
            // no memory: measured again by the next process
        }
    }
}

std::string choices() {
    std::string all;
    each_cell([&](cell & of) {
        const candidate * chosen = of.chosen.load(std::memory_order_acquire);
        if (of.count > 1 && (chosen || of.measured)) {
            all += chosen ? line_of(of, *chosen) : of.key() + " measuring\n";
        }
    });
    return all;
}

}  // namespace mtp
