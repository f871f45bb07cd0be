// What this machine reads and multiplies at most.

#include "limits.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

namespace mtp {

namespace {

using timer = std::chrono::steady_clock;

constexpr double shortest = 0.02;  // seconds that are timed together: several slices of a scheduler

// Runs work(thread, round), which returns how much it has done, in so many threads until the time is over. The most that they
// have done in a second of one round, together.
double most_per_second(int n_threads, double seconds, const std::function<double(int, int)> & work) {
    double best = 0;
    const auto ends = timer::now() + std::chrono::duration<double>(seconds);
    int round = 0;
    do {
        std::vector<double> done(n_threads);
        const auto measure = [&](int thread) {
            const auto began = timer::now();
            double amount = 0, took;
            do {
                amount += work(thread, round);
                took = std::chrono::duration<double>(timer::now() - began).count();
            } while (took < shortest);
            done[thread] = amount / took;
        };
        std::vector<std::thread> others;
        try {
            for (int i = 1; i < n_threads; i++) {
                others.emplace_back(measure, i);
            }
        } catch (const std::exception &) {
            n_threads = 0;  // as many threads as that cannot be had
        }
        measure(0);
        for (std::thread & other : others) {
            other.join();
        }
        if (n_threads == 0) {
            return 0;
        }
        double all = 0;
        for (const double one : done) {
            all += one;
        }
        best = std::max(best, all);
        round++;
    } while (timer::now() < ends);
    return best;
}

constexpr size_t line = 64, piece = 4 << 20;

// Reads a piece, in as many places in alternation.
template <int Places, bool Once> uint64_t read_places(const char * from) {
    uint64_t sums[4] = {};
    for (size_t i = 0; i < piece / Places; i += line) {
        for (int place = 0; place < Places; place++) {
            const char * at = from + place * (piece / Places) + i;
            __builtin_prefetch(at + 2048, 0, Once ? 0 : 3);
            for (int k = 0; k < 4; k++) {
                sums[k] += *(const uint64_t *) (at + 16 * k);
            }
        }
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

double read_limit(const void * data, size_t size, int n_threads, double seconds) {
    const size_t share = size / n_threads / piece * piece;
    std::vector<size_t> at(n_threads);
    // One place of memory is read at a time, or two, with a hint or without: which is fastest depends on the CPU.
    return share == 0 ? 0 : most_per_second(n_threads, seconds, [&](int thread, int round) {
        const char * from = (const char *) data + thread * share + at[thread];
        const uint64_t sum = round % 4 == 0   ? read_places<1, false>(from)
                             : round % 4 == 1 ? read_places<1, true>(from)
                             : round % 4 == 2 ? read_places<2, false>(from)
                                              : read_places<2, true>(from);
        asm volatile("" : : "r"(sum));
        at[thread] = (at[thread] + piece) % share;
        return (double) piece;
    });
}

double product_limit(const kernel_set & kernels, int n_threads, double seconds) {
    return most_per_second(n_threads, seconds, [&](int, int) { return kernels.multiply(10000); });
}

}  // namespace mtp
