#include "read_ahead.h"

#if defined(__linux__)

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

namespace mtp {

namespace {

constexpr int most_idle = 4096;  // products since the last read, after which nothing is asked for

bool is_wanted() {
    const char * word = getenv("MTP_GGUF_READ_AHEAD");
    return !word || strcmp(word, "0") != 0;
}

// Whether this thread has read from a disk since its last calls.
bool reads_a_disk() {
    thread_local long blocks = -1;
    thread_local int idle = most_idle;
    rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) != 0) {
        return false;
    }
    idle = blocks >= 0 && usage.ru_inblock != blocks ? 0 : idle + (idle < most_idle);
    blocks = usage.ru_inblock;
    return idle < most_idle;
}

}  // namespace

void read_experts_ahead(const ggml_tensor * op, const int64_t * chosen, int64_t n_chosen) {
    static const bool wanted = is_wanted();
    static const uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
    if (!wanted || !reads_a_disk()) {
        return;
    }
    const ggml_tensor * weights = op->src[0];
    for (int64_t i = 0; i < n_chosen; i++) {
        const uintptr_t begin = (uintptr_t) weights->data + chosen[i] * weights->nb[2], from = begin & ~(page - 1);
        madvise((void *) from, begin + weights->nb[2] - from, MADV_WILLNEED);
    }
}

}  // namespace mtp

#else

void mtp::read_experts_ahead(const ggml_tensor *, const int64_t *, int64_t) {}

#endif
