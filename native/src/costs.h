#pragma once
// What drafting and verifying cost, learned from measured times. No clock: times come from outside.

#include <cstdint>
#include <map>

namespace mtp {

// Of what the first token costs each further one is believed to cost at least this share.
constexpr double kLeastStep = 0.1;

// The machine at the moment. It drifts by more than neighbouring sizes of batches differ, so costs are
// kept without its drift.
struct Machine {
    double slowdown = 0; // the logarithm of how much slower it is than when the costs were learned
    double noise = 0.1;  // mean distance of a measured time from what was expected, as a share of it
};

// Milliseconds by size of batch, of the sizes that were measured.
class Costs {
public:
    void add(int32_t size, double ms, Machine & machine);

    // The best estimate: never more than a larger size costs; of a size without a measurement from those
    // that have one, `otherwise` without any.
    double ms(int32_t size, double otherwise) const;

    // As cheap as it may be after so few measurements; those of sizes that differ by less than `near` count.
    double least_ms(int32_t size, double otherwise, const Machine & machine, int32_t near = 1) const;

private:
    struct Cell {
        double log_ms = 0;
        double uses = 0; // up to a limit
    };
    double line_ms(int32_t size, double otherwise) const;

    std::map<int32_t, Cell> cells_;
};

// What drafting and verifying cost, for all sequences whose drafts go into one batch.
struct Prices {
    Machine machine;
    Costs verify; // by tokens of a batch
    Costs draft;  // by depth
    Costs undo;   // of rejected drafts; size 1 alone

    // To one of the three, if somebody measured it: 0 is for times that nobody did.
    void add(Costs & costs, int32_t size, double ms);
};

} // namespace mtp
