#pragma once
// How many tokens to draft, cycle by cycle: costs and outcomes in, depth out. No clock, no randomness,
// no knowledge of trunk or head, so that the same history gives the same choice.
//
// A cycle of n verified drafts gives 1 + a1 + a1 a2 + ... tokens, a_i being the chance that draft i
// is accepted once those before it are, and costs draft(n) + verify(n + 1) milliseconds. What gives
// most tokens per millisecond is drafted. Three things keep that honest:
//
// - what a depth costs is the mean of its measured times, less the machine's drift (costs.h); the fewer
//   there are, the cheaper it is believed to be, so that it is tried where it could win;
// - the head's own probabilities of a finished draft say more than the averages: of what is drafted
//   only as much is verified as then seems worth its price;
// - where nothing is worth it, one token is drafted now and then and not verified, a probe: the token
//   that the trunk chooses anyway shows whether it would have been accepted, at the price of the draft
//   alone. Probes take a fixed share of the time.

#include "acceptance.h"
#include "costs.h"
#include "mtp.h"

#include <array>
#include <cstdint>
#include <memory>

namespace mtp {

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

    // For drafts from elsewhere, which cost nothing to make.
    //
    // Tokens per millisecond that are expected of the head: at the best depth up to `room`, or at
    // exactly `depth` if that is not MTP_DEPTH_AUTO.
    double expected_rate(int32_t depth, int32_t room) const;
    // How many of n free drafts to verify for most tokens per millisecond, and that rate. chances:
    // that each is accepted once those before it are.
    int32_t plan_free(const Chances & chances, int32_t n, double & rate) const;
    // A cycle of free drafts.
    void report_free(int32_t n_verified, int32_t n_accepted, double verify_ms, double undo_ms);

    int32_t max_depth() const { return max_depth_; }
    const std::shared_ptr<Prices> & prices() const { return prices_; }

private:
    static constexpr int kBuckets = 6;

    // Of the head's probability: of accepted and of rejected drafts, how many fell into it.
    struct Bucket {
        double right = 0;
        double wrong = 0;
    };

    double sharpen(double chance, float probability) const;
    double verify_ms(int32_t rows) const;
    double draft_ms(int32_t depth) const;
    double cycle_ms(int32_t depth, double all_accepted, double draft_ms) const;
    double best_rate(const Chances & chances, int32_t room, int32_t & depth, bool free = false) const;
    void learn_probability(double right, float probability);

    int32_t max_depth_;
    std::shared_ptr<Prices> prices_;
    int32_t n_sequences_ = 1;
    bool probe_ = false;       // the cycle at hand drafts only to see whether drafts are accepted
    bool probe_again_ = false;
    double probe_debt_ = 0;    // what probes took, less their share, in times of a token that is decoded alone
    Acceptance acceptance_;
    std::array<Bucket, kBuckets> buckets_;
};

} // namespace mtp
