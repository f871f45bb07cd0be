// How many threads compute a graph on a machine whose CPUs other programs need, too.

#pragma once

#include <cstdint>

namespace mtp {

// The graphs of a thread that asks for them. The threads of a graph wait for each other after each node. If one has lost its
// CPU to another program, all wait for milliseconds, and where as many threads compute as there are CPUs that happens again
// and again. Half of the threads may find a CPU each. So their number is halved where the calling thread was without a CPU,
// for its own part or waiting for the others, for more than half of a graph's time. From time to time twice as many are tried,
// less and less often while that fails.
//
// Where other programs need all CPUs, fewer threads find none either, and get a smaller share of them. So all compute for as
// long again where the calling thread was without a CPU for more than a quarter of the time meanwhile.
//
// Times are in microseconds.
class fewer_threads {
public:
    // The number of threads for the next graph, of n, more than one.
    int begin(int64_t now, int n);

    // The graph is computed. without_cpu: how long the calling thread had none.
    void end(int64_t now, int64_t without_cpu);

    static constexpr int64_t shortest_pause = 20'000, longest_pause = 1'280'000;

private:
    int all = 1, halvings = 0;
    bool trying = false;  // one halving less
    int64_t began = 0, next_try = 0, pause = shortest_pause;
    int64_t all_until = 0;
    int64_t spent = 0, lost = 0;  // in graphs since the number was chosen
};

// The same for the calling thread, by its clocks; a graph that had to wait for a disk tells nothing.
int begin_graph(int n_threads);
void end_graph();

}  // namespace mtp
