#pragma once
// How many tokens to draft, cycle by cycle: costs and outcomes in, depth out. No clock, no chance,
// no knowledge of trunk or head, so that the same history gives the same choice.
//
// A cycle of n verified drafts gives 1 + a1 + a1 a2 + ... tokens, a_i being the chance that draft i
// is accepted once those before it are, and costs draft(n) + verify(n + 1) milliseconds. What gives
// most tokens per millisecond is drafted. Three things keep that honest:
//
// - what a depth costs is learned from its uses, the machine's pace at the moment kept apart; the
//   fewer uses there were, the cheaper it is believed to be, and so gets its turn where it could win;
// - the head's own probabilities of a finished draft say more than the averages: of what is drafted
//   only as much is verified as then seems worth its price;
// - where nothing is worth it, one token is drafted now and then and not verified: the token that
//   the trunk chooses anyway shows whether it was right, at the price of the draft alone.

#include "mtp.h"

#include <array>
#include <cstdint>
#include <map>
#include <memory>

namespace mtp {

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
};

// Share of drafts accepted at one position, an average that forgets.
struct Acceptance {
    double right = 0;
    double seen = 0;
};

// Notices that first drafts have become much worse, or much better, than they were: sums up by how
// much likelier what is seen would then be (Page's test).
class Turn {
public:
    explicit Turn(double log_odds) : log_odds_(log_odds) {}

    // right: 0 .. 1, expected with the chance `mean`. True if there was a turn; `since` is then what
    // was seen from there on.
    bool add(double right, double mean);
    Acceptance since;

private:
    double log_odds_; // by which the chance is taken to have changed
    double sum_ = 0;
};

// The choice for one sequence. Where several share a batch it is made as if all of them had as many
// drafts: a batch of n sequences with d drafts each costs verify(n (d + 1)), of which each bears the
// n-th part.
class Depth {
public:
    explicit Depth(int32_t max_depth, std::shared_ptr<Prices> prices = std::make_shared<Prices>());

    // As the functions of the same names in mtp.h.
    void set_costs(const double * verify_ms, int32_t n_verify, const double * draft_ms, int32_t n_draft);

    void share(int32_t n_sequences);
    void report_batch(int32_t n_tokens, double ms);

    // How many tokens to draft, at most `room`.
    int32_t plan(int32_t room);

    // How many of n finished drafts to verify. probabilities: [n], the head's. own: whether a
    // draft's own probability may decide about it; where drafts are drawn and not the likeliest
    // ones, that would bend the distribution, and only the drafts before it decide.
    int32_t keep(const float * probabilities, int32_t n, bool own) const;

    void report(const mtp_cycle_outcome & outcome);

    int32_t max_depth() const { return max_depth_; }
    const std::shared_ptr<Prices> & prices() const { return prices_; }

private:
    static constexpr int kBuckets = 6;

    // Of the head's probability: of accepted and of rejected drafts, how many fell into it.
    struct Bucket {
        double right = 0;
        double wrong = 0;
    };

    using Chances = std::array<double, MTP_MAX_DEPTH>;

    Chances chances() const;
    double sharpen(double chance, float probability) const;
    double verify_ms(int32_t rows) const;
    double draft_ms(int32_t depth) const;
    double cycle_ms(int32_t depth, const Chances & chances) const;
    double best_rate(int32_t room, int32_t & depth) const;
    void observe(int32_t position, double right, float probability);

    int32_t max_depth_;
    std::shared_ptr<Prices> prices_;
    int32_t n_sequences_ = 1;
    int64_t cycle_ = 0;
    bool shadow_ = false;    // the cycle at hand drafts only to see whether drafts are right
    int64_t shadow_due_ = 0; // the cycle from which on the next one does so
    std::array<Acceptance, MTP_MAX_DEPTH> positions_;
    Turn worse_;
    Turn better_;
    std::array<Bucket, kBuckets> buckets_;
};

} // namespace mtp
