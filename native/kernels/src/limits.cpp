// What this machine reads and multiplies at most.

#include "limits.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

namespace mtp {

namespace {

using timer = std::chrono::steady_clock;

constexpr double shortest = 0.02;  // seconds that are timed together: several slices of a scheduler

double median(std::vector<double> of) {
    std::nth_element(of.begin(), of.begin() + of.size() / 2, of.end());
    return of[of.size() / 2];
}

// Runs work(thread, way) in so many threads until the time is over, a round of each way after the other. What they do in a
// second together, the median of the rounds of the fastest way: what other programs leave changes from round to round.
double most_per_second(int n_threads, int ways, double seconds, const std::function<double(int, int)> & work) {
    std::vector<std::vector<double>> rounds(ways);
    const auto ends = timer::now() + std::chrono::duration<double>(seconds);
    for (int way = 0; timer::now() < ends || rounds.back().empty(); way = (way + 1) % ways) {
        std::vector<double> done(n_threads);
        const auto measure = [&](int thread) {
            const auto began = timer::now();
            double amount = 0, took;
            do {
                amount += work(thread, way);
                took = std::chrono::duration<double>(timer::now() - began).count();
            } while (took < shortest);
            done[thread] = amount / took;
        };
        std::vector<std::thread> others;
        bool complete = true;
        try {
            for (int i = 1; i < n_threads; i++) {
                others.emplace_back(measure, i);
            }
            measure(0);
        } catch (const std::exception &) {
            complete = false;  // as many threads as that cannot be had
        }
        for (std::thread & other : others) {
            other.join();
        }
        if (!complete) {
            return 0;
        }
        rounds[way].push_back(std::accumulate(done.begin(), done.end(), 0.0));
    }
    double most = 0;
    for (const std::vector<double> & of : rounds) {
        most = std::max(most, median(of));
    }
    return most;
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
    return share == 0 ? 0 : most_per_second(n_threads, 4, seconds, [&](int thread, int way) {
        const char * from = (const char *) data + thread * share + at[thread];
        const uint64_t sum = way == 0   ? read_places<1, false>(from)
                             : way == 1 ? read_places<1, true>(from)
                             : way == 2 ? read_places<2, false>(from)
                                        : read_places<2, true>(from);
        asm volatile("" : : "r"(sum));
        at[thread] = (at[thread] + piece) % share;
        return (double) piece;
    });
}

double product_limit(const kernel_set & kernels, int n_threads, double seconds) {
    return most_per_second(n_threads, 1, seconds, [&](int, int) { return kernels.multiply(10000); });
}

}  // namespace mtp
