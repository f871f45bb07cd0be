#pragma once
// What drafting and verifying cost, estimated from times that the caller measures.

#include "bytes.h"

#include <cstdint>
#include <map>
#include <vector>

namespace mtp {

// Each further token of a batch is assumed to cost at least this share of the first one.
constexpr double kLeastStep = 0.1;

// The machine's current speed. It drifts by more than neighbouring batch sizes differ, so costs are
// stored with the drift removed.
struct Machine {
    double slowdown = 0; // logarithm of the current slowdown relative to when the costs were learned
    double noise = 0.1;  // mean relative deviation of a measured time from its expected value
};

// Milliseconds by batch size, for the sizes that were measured.
class Costs {
public:
    // known: the time is not that of a first use.
    void add(int32_t size, double ms, Machine & machine, bool known = false);

    // The best estimate, never above that of a larger size. Sizes without a measurement are interpolated
    // or extrapolated; without any measurement the result is `otherwise`.
    // The first batch of a size can take a hundred times as long, since memory is allocated and a GPU's
    // driver compiles. So sizes that were measured once are only known not to take longer, as long as
    // another size was measured more often.
    double ms(int32_t size, double otherwise) const;

    // How often a size was measured, up to a limit.
    double uses(int32_t size) const;

    // An optimistic estimate: the lower the number of measurements, the lower it is. Measurements of sizes
    // that differ by less than `near` count. Sizes with fewer than `trials` of them count as much cheaper,
    // so that they are tried.
    double least_ms(int32_t size, double otherwise, const Machine & machine, int32_t near = 1, int32_t trials = 0) const;

    // Writes all measurements, and the other way for sizes up to `largest`; see depth_state.cpp.
    void save(std::vector<uint8_t> & out) const;
    void restore(BoundedReader & in, int32_t largest);

private:
    struct Cell {
        double log_ms = 0;
        double uses = 0; // number of measurements, up to a limit
    };
    using Cells = std::map<int32_t, Cell>;

    static double most_uses();
    static double line_ms(const Cells & cells, int32_t size, double otherwise);

    Cells once_;  // measured once
    Cells cells_; // measured more often, or known
};

// The costs of drafting, verifying and rolling back, shared by all sequences whose drafts share batches.
struct SharedCosts {
    Machine machine;
    Costs verify;   // by number of tokens in a batch
    Costs rollback; // of rejected drafts, always under size 1
    std::map<int32_t, Costs> draft; // by the number of sequences that draft together: by depth
    bool measured = false;          // not only known in advance

    // An optimistic estimate of drafting `depth` tokens for each of n sequences together. Without a
    // measurement for n it is that of the nearest smaller number, or else of the nearest larger one.
    double draft_ms(int32_t n, int32_t depth, double otherwise) const;

    // What rolling back takes; 0 until it was measured twice.
    double rollback_ms() const;

    // Adds a time to one of these; 0 means that it was not measured and is ignored.
    void add(Costs & costs, int32_t size, double ms, bool known = false);

    // Writes all but `measured`, and the other way; see depth_state.cpp.
    void save(std::vector<uint8_t> & out) const;
    void restore(BoundedReader & in);
};

} // namespace mtp
