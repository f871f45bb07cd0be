#pragma once
// What drafting and verifying cost, learned from uses of them. No clock: times come from outside.

#include <cstdint>
#include <map>

namespace mtp {

// Of what the first token costs each further one is believed to cost at least this share.
constexpr double kLeastStep = 0.1;

// How fast the machine is at the moment. It drifts by more than neighbouring sizes of batches differ,
// so that costs are kept relative to it: a size is not judged by the second it was used in.
struct Pace {
    double log_factor = 0; // of the milliseconds
    double noise = 0.1;    // mean distance of a cost from what was expected, as a share of it
};

// Milliseconds by size of batch, as far as sizes were used, at a pace of 1.
class Costs {
public:
    void add(int32_t size, double ms, int64_t now, Pace & pace);

    // As it looks: never more than a larger size costs; of a size that was never used from those that
    // were, `otherwise` without any.
    double ms(int32_t size, double otherwise) const;
    // As cheap as it may well be. Uses of sizes that differ by less than `near` count for this one.
    double least_ms(int32_t size, double otherwise, int64_t now, const Pace & pace, int32_t near = 1) const;

private:
    struct Cell {
        double log_ms = 0;
        double uses = 0; // up to a limit
        int64_t last_used = 0;
    };
    double line_ms(int32_t size, double otherwise) const;

    std::map<int32_t, Cell> cells_;
};

// What drafting and verifying cost, for all sequences whose drafts go into one batch.
struct Prices {
    Pace pace;
    Costs verify; // by tokens of a batch
    Costs draft;  // by depth
    Costs undo;   // of rejected drafts; size 1 alone
    int64_t batches = 0;

    void add_batch(int32_t n_tokens, double ms);
    // Of one of the three, if somebody measured it: 0 is for times that nobody did.
    void add(Costs & costs, int32_t size, double ms);
};

} // namespace mtp
