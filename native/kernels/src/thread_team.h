// What the threads that compute one graph share: counters of pieces of work, and a place to publish memory. ggml keeps these
// threads in an opaque ggml_threadpool, so a team belongs to the address of a pool. A program without a pool of its own gets a
// new one for each graph, so addresses come and go.

#pragma once

#include "ggml_abi.h"

#include <algorithm>
#include <atomic>

namespace mtp {

constexpr int max_threads = 512;  // GGML_MAX_N_THREADS

class team {
public:
    // Counters of the pieces of work, a share for each thread. A thread resets its own before a barrier; after it, every thread
    // may take pieces of any share.
    void reset(int ith) { seats[ith].next.store(0, std::memory_order_relaxed); }
    int take(int ith) { return seats[ith].next.fetch_add(1, std::memory_order_relaxed); }

    // Memory of a thread that the others read after a barrier.
    void publish(int ith, void * memory) { seats[ith].memory = memory; }
    void * published(int ith) const { return seats[ith].memory; }

    // Returns when all threads have called it.
    void wait(const ggml_compute_params * params);

private:
    friend class membership;

    struct alignas(64) seat {
        std::atomic<int> next;
        std::atomic<int> taken;  // by its thread; a thread that looks for a free team may hold it, too, for a moment
        void * memory;
    };
    std::atomic<const ggml_threadpool *> pool;
    seat seats[max_threads];
    alignas(64) std::atomic<int> arrived;
    alignas(64) std::atomic<int> passed;
};

// A thread's place in the team of its pool, for one operation. All threads must take their places before one leaves, so an
// operation that uses what the threads share has a barrier.
class membership {
public:
    membership(const ggml_threadpool * pool, int ith);
    ~membership();
    membership(const membership &) = delete;

    team & of;

private:
    static team & join(const ggml_threadpool * pool, int ith);
    int ith;
};

// What one thread is given to compute an operation.
struct task {
    const ggml_compute_params * params;
    team * threads;  // of this operation

    int ith() const { return params->ith; }
    int nth() const { return params->nth; }
    void wait() const {
        if (params->nth > 1) {
            threads->wait(params);
        }
    }

    // This thread's part [first, last) of n equal things.
    int64_t first(int64_t n) const { return n * params->ith / params->nth; }
    int64_t last(int64_t n) const { return n * (params->ith + 1) / params->nth; }
};

// The first piece, of n, of a thread's share.
inline int64_t share_begin(int64_t n, int ith, int nth) { return n * ith / nth; }

// compute(i) for each of n pieces of work: a thread takes those of its own share, in order, and then what is left of the others'.
// Each thread calls task.threads->reset(task.ith()) before, and waits.
template <class F> void each_piece(const task & task, int64_t n, const F & compute) {
    for (int turn = 0; turn < task.nth();) {
        const int owner = (task.ith() + turn) % task.nth();
        const int64_t piece = share_begin(n, owner, task.nth()) + task.threads->take(owner);
        if (piece < share_begin(n, owner + 1, task.nth())) {
            compute(piece);
        } else {
            turn++;
        }
    }
}

// The rows of a piece, at least 32, where threads share `rows`, which may be 0. A piece is a sixteenth of a share, so that a
// thread waits for little of another one's share at the end; but not less than 64 rows where a share has as many, because
// some kernels arrange the columns again for each piece.
inline int64_t rows_of_piece(int64_t rows, int nth) {
    const int64_t share = std::max<int64_t>(32, GGML_PAD((rows + nth - 1) / nth, 32));
    return std::clamp<int64_t>(GGML_PAD(share / 16, 32), std::min<int64_t>(share, 64), 512);
}

// Memory of the calling thread, aligned to 64 bytes; valid until its next call. Aborts if there is none, as ggml does, because
// the other threads would wait for this one forever.
void * scratch(size_t size);

}  // namespace mtp
