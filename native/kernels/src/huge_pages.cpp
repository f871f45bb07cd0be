#include "huge_pages.h"

#include <cstdint>

#if defined(__linux__)

#include <chrono>
#include <map>
#include <mutex>

#include <sys/mman.h>

#if !defined(MADV_COLLAPSE)
#define MADV_COLLAPSE 25  // since Linux 6.1
#endif

namespace mtp {

namespace {

constexpr uintptr_t page = 2 << 20;
constexpr size_t most_begins = 4096;

struct moved {
    std::mutex mutex;
    std::map<uintptr_t, uintptr_t> ends;  // of memory by its begin, as far as it was passed
    std::chrono::steady_clock::time_point pause_ends;  // of those who move a page at a time
    bool at_once = true;  // until the system has no such page; afterwards it moves memory when it finds the time
};

}  // namespace

void use_huge_pages(const void * data, size_t bytes, bool all_pages) {
    const uintptr_t begin = (uintptr_t) data;
    uintptr_t end = (begin + bytes) & ~(page - 1);
    static moved & all = *new moved;  // threads may compute while the process ends
    const std::unique_lock<std::mutex> lock(all.mutex, std::try_to_lock);
    if (!lock) {  // another pool is at it, or was when this process was forked
        return;
    }
    const auto known = all.ends.find(begin);
    // Memory that became smaller may be other memory at the same place, such as that of a new context.
    const bool grew = known != all.ends.end() && end >= known->second;
    const uintptr_t from = grew ? known->second : (begin + page - 1) & ~(page - 1);
    const auto now = std::chrono::steady_clock::now();
    if (from >= end || (!all_pages && now < all.pause_ends)) {
        return;
    }
    end = all_pages ? end : from + page;
    if (all.ends.size() >= most_begins) {  // those of memory that was freed long ago
        all.ends.clear();
    }
    all.ends[begin] = end;
    if (madvise((void *) from, end - from, MADV_HUGEPAGE) == 0 && all.at_once) {
        all.at_once = madvise((void *) from, end - from, MADV_COLLAPSE) == 0;
    }
    all.pause_ends = std::chrono::steady_clock::now() + 50 * (std::chrono::steady_clock::now() - now);
}

}  // namespace mtp

#else

void mtp::use_huge_pages(const void *, size_t, bool) {}

#endif
