#include "thread_team.h"

#include "ggml_api.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sched.h>

namespace mtp {

namespace {

// The number of pools that can compute at the same time; a further one waits.
constexpr int max_teams = 64;
team teams[max_teams];  // in .bss, so only the seats that threads use take memory

std::mutex seating;

}  // namespace

// A thread takes its seat first and then checks that the team still belongs to its pool. A thread that gives the team to another
// pool first takes it from the former one and then checks for members. So at least one of the two sees the other.
team & membership::join(const ggml_threadpool * pool, int ith) {
    static thread_local team * last = nullptr;
    const auto sit_down = [pool, ith](team & at) {
        at.seats[ith].taken.fetch_add(1);
        if (at.pool.load() == pool) {
            return true;
        }
        at.seats[ith].taken.fetch_sub(1);
        return false;
    };
    if (last && sit_down(*last)) {
        return *last;
    }
    // Several threads of a pool may look for its team at the same time and must all get the same one.
    for (;; sched_yield()) {
        const std::lock_guard<std::mutex> lock(seating);
        for (team & at : teams) {
            if (at.pool.load(std::memory_order_relaxed) == pool && sit_down(at)) {
                return *(last = &at);
            }
        }
        for (team & at : teams) {
            const ggml_threadpool * before = at.pool.exchange(nullptr);
            const auto is_taken = [](const team::seat & seat) { return seat.taken.load() > 0; };
            if (before && std::any_of(at.seats, at.seats + max_threads, is_taken)) {
                at.pool.store(before);
                continue;
            }
            at.seats[ith].taken.fetch_add(1);
            at.pool.store(pool);
            return *(last = &at);
        }
        // All teams are in use. Release the lock, so that their other threads can take their seats and finish.
    }
}

membership::membership(const ggml_threadpool * pool, int ith) : of(join(pool, ith)), ith(ith) {}

membership::~membership() { of.seats[ith].taken.fetch_sub(1, std::memory_order_release); }

void team::wait(const ggml_compute_params * params) {
    if (ggml().barrier) {
        ggml().barrier(params->threadpool);
        return;
    }
    const int before = passed.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == params->nth - 1) {
        arrived.store(0, std::memory_order_relaxed);
        passed.fetch_add(1, std::memory_order_release);
        return;
    }
    // Yield after a while: hypervisors and busy machines take the CPU from threads that spin for long.
    for (int spins = 0; passed.load(std::memory_order_acquire) == before; spins++) {
        if (spins > 4096) {
            sched_yield();
        }
    }
}

void * scratch(size_t size) {
    struct memory {
        void * data = nullptr;
        size_t size = 0;
        ~memory() { std::free(data); }
    };
    static thread_local memory own;
    if (size > own.size) {
        std::free(own.data);
        own.size = (size + 4095) / 4096 * 4096;
        own.data = std::aligned_alloc(64, own.size);
        if (!own.data) {
            std::fprintf(stderr, "mtp_kernels: no memory for %zu bytes\n", size);
            std::abort();
        }
    }
    return own.data;
}

}  // namespace mtp
