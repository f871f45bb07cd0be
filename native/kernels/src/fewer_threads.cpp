#include "fewer_threads.h"

#include <algorithm>

#include <time.h>

#include <sys/resource.h>

namespace mtp {

int fewer_threads::begin(int64_t now, int n) {
    began = now;
    all = n;
    trying = false;
    if (halvings > 0 && now >= next_try) {
        if (4 * lost > spent) {
            halvings = 0;
            pause = std::min(2 * pause, longest_pause);
            all_until = now + pause;
        } else {
            halvings--;
            trying = true;
        }
    }
    return std::max(n >> halvings, 1);
}

void fewer_threads::end(int64_t now, int64_t without_cpu) {
    spent += now - began;
    lost += without_cpu;
    const bool too_many = 2 * without_cpu > now - began && (all >> halvings) > 1 && now >= all_until;
    if (!too_many && !trying) {
        return;
    }
    pause = !too_many ? shortest_pause : trying ? std::min(2 * pause, longest_pause) : pause;
    halvings += too_many;
    next_try = now + pause;
    spent = lost = 0;
}

namespace {

int64_t microseconds(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * int64_t(1'000'000) + time.tv_nsec / 1000;
}

struct caller {
    fewer_threads threads;
    int64_t began = 0, cpu = 0;
    long pages = 0;  // that this process has read from a disk
};

thread_local caller calling;

}  // namespace

int begin_graph(int n_threads) {
    calling.began = microseconds(CLOCK_MONOTONIC);
    calling.cpu = microseconds(CLOCK_THREAD_CPUTIME_ID);
    return calling.threads.begin(calling.began, n_threads);
}

void end_graph() {
    const int64_t now = microseconds(CLOCK_MONOTONIC), cpu = microseconds(CLOCK_THREAD_CPUTIME_ID) - calling.cpu;
    int64_t without_cpu = now - calling.began - cpu;
    if (2 * without_cpu > now - calling.began) {
        rusage usage = {};
        getrusage(RUSAGE_SELF, &usage);
        if (usage.ru_majflt != calling.pages) {
            calling.pages = usage.ru_majflt;
            without_cpu = 0;
        }
    }
    calling.threads.end(now, without_cpu);
}

}  // namespace mtp
