#pragma once
// Chooses the draft depth of each cycle from measured costs and outcomes. It uses no clock and no
// randomness and knows neither trunk nor head, so the same history leads to the same choices.
//
// A cycle with n verified drafts yields 1 + a1 + a1 a2 + ... tokens on average, where a_i is the
// probability that draft i is accepted if those before it are, and takes draft(n) + verify(n + 1)
// milliseconds. The depth with the most tokens per millisecond is chosen. Three refinements:
//
// - The cost of a depth is the mean of its measured times, corrected for the machine's drift (costs.h).
//   With few measurements the cost is estimated optimistically, so that promising depths get tried.
// - The head's probabilities of a finished draft say more than the averages, so drafts whose expected
//   gain is below their verification cost are dropped before verification.
// - When drafting does not pay, one token is occasionally drafted without being verified, a probe. The
//   token that the trunk generates anyway shows whether the draft would have been accepted, so a probe
//   costs only the draft. Probes take a fixed share of the time.
// - When drafting does not pay although drafts are right, the costs may be wrong: they may have been
//   measured while the machine was busy, and a depth that is not used is not measured again. So a draft
//   is occasionally verified after all, a trial; and so are more free drafts than seem to pay. Trials have
//   a share of their own.

#include "depth/acceptance.h"
#include "depth/costs.h"

#include "mtp.h"

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace mtp {

// Chooses the depth for one sequence, or with plan_batch for all sequences that share a batch. Elsewhere,
// if n sequences share a batch, all of them are assumed to draft d tokens: the batch then costs
// verify(n (d + 1)), and each sequence accounts for 1/n of it, and of the draft graph.
class Depth {
public:
    explicit Depth(int32_t max_depth, std::shared_ptr<SharedCosts> costs = std::make_shared<SharedCosts>());

    // As the functions of the same names in mtp.h.
    void expect(double acceptance);
    void set_costs(const double * verify_ms, int32_t n_verify, const double * draft_ms, int32_t n_draft);

    void share(int32_t n_sequences);
    void report_batch(int32_t n_tokens, double ms);

    // Returns how many tokens to draft, at most `room`.
    int32_t plan(int32_t room);

    // Returns how many of n finished drafts to verify. probabilities: [n], from the head. own: whether
    // a draft's own probability may decide whether it is verified. For sampled drafts that would bias
    // the distribution, so only the drafts before it may.
    int32_t keep(const float * probabilities, int32_t n, bool own) const;

    void report(const mtp_cycle_outcome & outcome);

    // plan and keep for sequences that share batches, `all` of them with the same costs; see depth_batch.cpp.
    // others: further sequences in the batch, with a token each. drafted: how many tokens, with these probabilities.
    static std::vector<int32_t> plan_batch(const std::vector<Depth *> & all, const std::vector<int32_t> & rooms);
    static std::vector<int32_t> keep_batch(const std::vector<Depth *> & all, const std::vector<const float *> & probabilities,
                                           const std::vector<int32_t> & drafted, int32_t others);
    // The time of a graph that drafted for n_sequences, n_tokens for the deepest of them.
    void report_draft(int32_t n_sequences, int32_t n_tokens, double ms);

    // Returns how many of n free drafts, which come from elsewhere at no cost, to verify: 0 if the head
    // promises more tokens per millisecond, at the best depth up to `room` or at `head_depth` if that is not
    // MTP_DEPTH_AUTO. chances: the acceptance probability of each draft if those before it are accepted.
    int32_t plan_free(const Chances & chances, int32_t n, int32_t head_depth, int32_t room);
    // Reports a cycle with free drafts.
    void report_free(int32_t n_verified, int32_t n_accepted, double verify_ms, double rollback_ms);

    // The state as bytes, and the other way. Throws MTP_ERROR_FORMAT, and changes nothing, unless `in` holds such
    // bytes up to its end. Costs are restored, for all choosers that share them, if with_costs and if no time has
    // been measured here yet.
    std::vector<uint8_t> save() const;
    void restore(BoundedReader & in, bool with_costs);
    static void check_saved(BoundedReader & in);

    // A cycle without drafts is a probe as soon as possible: what was learned may not hold for this text.
    void probe_soon() { probe_debt_ = 0; }

    int32_t max_depth() const { return max_depth_; }
    const std::shared_ptr<SharedCosts> & costs() const { return costs_; }

private:
    static constexpr int kBuckets = 6;

    // The number of accepted and rejected drafts whose head probability falls into this bucket.
    struct Bucket {
        double right = 0;
        double wrong = 0;
    };

    Bucket all_drafts() const;
    double probe_share() const;
    double sharpen(double chance, float probability) const;
    double verify_ms(int32_t rows, int32_t trials = 0) const;
    double draft_ms(int32_t depth) const;
    double batch_draft_ms(int32_t n_sequences, int32_t depth) const;
    double batch_ms(const std::vector<int32_t> & depths, int32_t others) const;
    static double best_batch_rate(const std::vector<Depth *> & all, const std::vector<int32_t> & limits, int32_t others,
                                  std::vector<int32_t> & depths);
    double expected_rate(int32_t depth, int32_t room) const;
    int32_t free_trial(const Chances & chances, int32_t n, double rate) const;
    void pay_trials(double cost, int32_t n_verified, int32_t n_tokens);
    int32_t settle(int32_t depth, int32_t room);
    double cycle_ms(int32_t depth, double all_accepted, double draft_ms, int32_t trials = 0) const;
    double best_rate(const Chances & chances, int32_t room, int32_t & depth, bool free = false) const;
    void learn_probability(double right, float probability);

    int32_t max_depth_;
    std::shared_ptr<SharedCosts> costs_;
    int32_t n_sequences_ = 1;
    bool probe_ = false;     // the current cycle is a probe
    bool trial_ = false;     // the current cycle is a trial
    double free_trial_rate_ = 0; // the current cycle is a trial of free drafts instead of this throughput; 0: it is not
    bool was_right_ = false; // the draft of the last cycle, a probe or a trial, was right
    double probe_debt_ = 0;  // time of probes beyond their share, in units of one single-token decode
    double trial_debt_ = 0;  // the same for trials
    Acceptance acceptance_;
    std::array<Bucket, kBuckets> buckets_;
};

} // namespace mtp

// The opaque depth chooser of mtp.h.
struct mtp_depth : mtp::Depth {
    using Depth::Depth;
};
