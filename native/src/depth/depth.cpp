#include "depth/depth.h"

#include "error.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace mtp {

namespace {

// The source of each number is docs/decisions.md, "The constants of depth auto".

constexpr double kProbeShare = 0.015;   // share of the time spent on probes
constexpr double kHopeless = 16;        // drafts of which none was right, after which probes get an eighth of that
constexpr double kTrialShare = 0.003;   // share of the time spent on trials
constexpr double kTrialChance = 0.5;    // acceptance of the first draft from which trials are made
constexpr double kTrialSlack = 1.4;     // times the shortest possible time that a trial of free drafts may take
constexpr double kMostTrials = 8;       // measurements of a batch from which it is not a trial any more
constexpr double kTrialUses = 3;        // measurements of a batch from which a trial is paid for
constexpr double kMostDebt = 1;         // single-token decodes that a probe, or a trial per draft, counts at most
constexpr double kEvidenceKept = 512;   // drafts over which evidence about the head's probabilities decays
constexpr double kEvidenceWeight = 16;  // prior, in drafts, that the head's probabilities are uninformative
// Free drafts are verified in these sizes or all at once: neighbouring sizes cost nearly the same, and
// each of them would have to be tried.
constexpr int32_t kFreeSizes[] = {1, 2, 3, 4, 6, 8, 11, 14};
// A single slow time of a large batch would hide all that cost as much, so free drafts try each size
// this often, where they are as sure as this and a trial loses little.
constexpr int32_t kTrials = 2;
constexpr double kSure = 0.9;
constexpr double kBounds[] = {0.3, 0.5, 0.7, 0.85, 0.95}; // bucket boundaries of the head's probability

bool is_free_size(int32_t n, int32_t most) {
    return n == most || std::find(std::begin(kFreeSizes), std::end(kFreeSizes), n) != std::end(kFreeSizes);
}

int bucket_of(float probability) {
    return int(std::upper_bound(std::begin(kBounds), std::end(kBounds), double(probability)) - std::begin(kBounds));
}

} // namespace

Depth::Depth(int32_t max_depth, std::shared_ptr<SharedCosts> costs)
    : max_depth_(max_depth), costs_(std::move(costs)),
      acceptance_(std::clamp(max_depth, 0, MTP_MAX_DEPTH)) {
    require_range(max_depth, 0, MTP_MAX_DEPTH, "max_depth");
}

void Depth::expect(double acceptance) {
    if (!(acceptance >= 0 && acceptance <= 1)) {
        throw Error(MTP_ERROR_ARGUMENT, format("acceptance: expected 0 to 1, found %g", acceptance));
    }
    acceptance_.expect(acceptance);
}

void Depth::share(int32_t n_sequences) {
    require_range(n_sequences, 1, MTP_MAX_SEQUENCES, "n_sequences");
    n_sequences_ = n_sequences;
}

void Depth::report_batch(int32_t n_tokens, double ms) {
    require_range(n_tokens, 1, MTP_MAX_SEQUENCES * (MTP_MAX_DEPTH + 1), "n_tokens");
    costs_->add(costs_->verify, n_tokens, ms);
}

void Depth::report_draft(int32_t n_sequences, int32_t n_tokens, double ms) {
    require_range(n_sequences, 1, MTP_MAX_SEQUENCES, "n_sequences");
    require_range(n_tokens, 1, max_depth_, "n_tokens");
    if (ms != 0) {
        costs_->add(costs_->draft[n_sequences], n_tokens, ms);
    }
}

void Depth::set_costs(const double * verify_ms, int32_t n_verify, const double * draft_ms, int32_t n_draft) {
    require_range(n_verify, 0, MTP_MAX_DEPTH + 1, "n_verify");
    require_range(n_draft, 0, MTP_MAX_DEPTH, "n_draft");
    for (int32_t i = 0; i < n_verify; ++i) {
        costs_->add(costs_->verify, i + 1, require(verify_ms, "verify_ms")[i], true);
    }
    for (int32_t i = 0; i < n_draft; ++i) {
        costs_->add(costs_->draft[1], i + 1, require(draft_ms, "draft_ms")[i], true);
    }
}

Depth::Bucket Depth::all_drafts() const {
    Bucket all;
    for (const Bucket & bucket : buckets_) {
        all.right += bucket.right;
        all.wrong += bucket.wrong;
    }
    return all;
}

// A head that was never right, such as that of another model, is hardly probed any more.
double Depth::probe_share() const {
    const Bucket all = all_drafts();
    return all.right == 0 && all.wrong >= kHopeless ? kProbeShare / 8 : kProbeShare;
}

// Updates an acceptance probability with the head's own probability by Bayes' rule: the odds are
// multiplied by how much more often accepted drafts have such a probability than rejected ones.
double Depth::sharpen(double chance, float probability) const {
    const Bucket all = all_drafts();
    if (all.right + all.wrong == 0) {
        return chance;
    }
    const Bucket & bucket = buckets_[size_t(bucket_of(probability))];
    const double share = (bucket.right + bucket.wrong) / (all.right + all.wrong);
    if (share == 0) {
        return chance;
    }
    const double if_right = (bucket.right + kEvidenceWeight * share) / (all.right + kEvidenceWeight);
    const double if_wrong = (bucket.wrong + kEvidenceWeight * share) / (all.wrong + kEvidenceWeight);
    const double odds = chance / (1 - chance) * if_right / if_wrong;
    return odds / (1 + odds);
}

double Depth::verify_ms(int32_t rows, int32_t trials) const {
    const int32_t n = n_sequences_;
    const double otherwise = n * (1 + kLeastStep * (rows - 1));
    return costs_->verify.least_ms(n * rows, otherwise, costs_->machine, n, trials) / n;
}

double Depth::draft_ms(int32_t depth) const {
    return batch_draft_ms(n_sequences_, depth) / n_sequences_;
}

double Depth::batch_draft_ms(int32_t n_sequences, int32_t depth) const {
    return depth ? costs_->draft_ms(n_sequences, depth, kLeastStep * costs_->verify.ms(1, 1) * depth) : 0;
}

// The expected time of a cycle. all_accepted: the probability that no draft is rejected.
double Depth::cycle_ms(int32_t depth, double all_accepted, double draft_ms, int32_t trials) const {
    const double rollback = depth ? (1 - all_accepted) * costs_->rollback_ms() : 0;
    return draft_ms + verify_ms(depth + 1, trials) + rollback;
}

// Returns the highest expected tokens per millisecond of all depths up to `room` and stores that depth.
// free: drafting costs nothing.
double Depth::best_rate(const Chances & chances, int32_t room, int32_t & depth, bool free) const {
    double tokens = 1;
    double all = 1;
    double best = 0;
    for (int32_t d = 0; d <= room; ++d) {
        if (d > 0) {
            all *= chances[size_t(d - 1)];
            tokens += all;
        }
        if (free && d > 0 && !is_free_size(d, room)) {
            continue;
        }
        const int32_t trials = free && d > 0 && all >= kSure ? kTrials : 0;
        const double rate = tokens / cycle_ms(d, all, free ? 0 : draft_ms(d), trials);
        if (rate > best) {
            best = rate;
            depth = d;
        }
    }
    return best;
}

// The expected tokens per millisecond with the head's drafts.
double Depth::expected_rate(int32_t depth, int32_t room) const {
    const Chances chances = acceptance_.chances();
    if (depth == MTP_DEPTH_AUTO) {
        return best_rate(chances, std::clamp(room, 0, max_depth_), depth);
    }
    double tokens = 1;
    double all = 1;
    for (int32_t d = 0; d < depth; ++d) {
        all *= chances[size_t(d)];
        tokens += all;
    }
    return tokens / cycle_ms(depth, all, draft_ms(depth));
}

// Returns how many free drafts to verify as a trial: the most that are likely to be accepted, whose batch was
// measured rarely, and which would pay even if it took longer than the shortest possible time. 0 if none.
int32_t Depth::free_trial(const Chances & chances, int32_t n, double rate) const {
    const double plain_ms = cycle_ms(0, 1, 0);
    double tokens = 1;
    double all = 1;
    int32_t size = 0;
    for (int32_t d = 1; d <= n; ++d) {
        all *= chances[size_t(d - 1)];
        tokens += all;
        const double ms = plain_ms * (1 + kLeastStep * d) * kTrialSlack;
        if (all >= kTrialChance && is_free_size(d, n) && tokens > rate * ms &&
            costs_->verify.uses(n_sequences_ * (d + 1)) < kMostTrials) {
            size = d;
        }
    }
    return size;
}

int32_t Depth::plan_free(const Chances & chances, int32_t n, int32_t head_depth, int32_t room) {
    int32_t best = 0;
    double rate = best_rate(chances, n, best, true);
    const double of_head = expected_rate(head_depth, room);
    if (rate <= of_head) {
        best = 0;
        rate = of_head;
    }
    const int32_t trial = trial_debt_ <= 0 ? free_trial(chances, n, rate) : 0;
    free_trial_rate_ = trial > 0 && trial != best ? rate : 0;
    return trial > 0 ? trial : best;
}

// Accounts for the cost of a trial of n_verified drafts, in tokens that were not generated because of it, and for
// n_tokens generated tokens. The cost is limited, since an estimate that is far too high must not postpone the
// next trial.
void Depth::pay_trials(double cost, int32_t n_verified, int32_t n_tokens) {
    trial_debt_ = std::max(0.0, trial_debt_ + std::clamp(cost, 0.0, kMostDebt * n_verified) - kTrialShare * n_tokens);
}

void Depth::report_free(int32_t n_verified, int32_t n_accepted, double verify_ms, double rollback_ms) {
    costs_->add(costs_->verify, n_verified + 1, verify_ms);
    if (n_accepted < n_verified) {
        costs_->add(costs_->rollback, 1, rollback_ms);
    }
    acceptance_.pass(n_accepted + 1);
    // Before that many measurements the cost may be that of a slow moment, and the next trial tells.
    const bool known = costs_->verify.uses(n_sequences_ * (n_verified + 1)) >= kTrialUses;
    const double cost = known ? free_trial_rate_ * cycle_ms(n_verified, 1, 0) - (n_accepted + 1) : 0;
    pay_trials(cost, n_verified, n_accepted + 1);
}

int32_t Depth::plan(int32_t room) {
    room = std::clamp(room, 0, max_depth_);
    int32_t depth = 0;
    best_rate(acceptance_.chances(), room, depth);
    return settle(depth, room);
}

// Makes a cycle without drafts a probe or a trial if one is due.
int32_t Depth::settle(int32_t depth, int32_t room) {
    const bool none = depth == 0 && room > 0;
    trial_ = none && was_right_ && trial_debt_ <= 0 && acceptance_.chances()[0] >= kTrialChance;
    // A probe that was right is followed by another.
    probe_ = none && !trial_ && (probe_debt_ <= 0 || (was_right_ && probe_debt_ < kMostDebt));
    return probe_ || trial_ ? 1 : depth;
}

int32_t Depth::keep(const float * probabilities, int32_t n, bool own) const {
    n = std::clamp(n, 0, max_depth_);
    if (trial_) {
        return n;
    }
    int32_t unused = 0;
    const Chances chance = acceptance_.chances();
    const double rate = best_rate(chance, max_depth_, unused);
    for (int32_t kept = 0; kept < n; ++kept) {
        // Whether verifying more than `kept` drafts pays, using only what draft `kept` may depend on.
        Chances seen = chance;
        for (int32_t i = 0; i < (own ? n : kept); ++i) {
            seen[size_t(i)] = sharpen(chance[size_t(i)], probabilities[i]);
        }
        double all = 1;
        for (int32_t i = 0; i < kept; ++i) {
            all *= seen[size_t(i)];
        }
        double gain = 0;
        bool worth = false;
        for (int32_t more = kept + 1; more <= n && !worth; ++more) {
            all *= seen[size_t(more - 1)];
            gain += all;
            worth = gain > rate * (verify_ms(more + 1) - verify_ms(kept + 1));
        }
        if (!worth) {
            return kept;
        }
    }
    return n;
}

// Records whether a draft with this head probability was right.
void Depth::learn_probability(double right, float probability) {
    for (Bucket & bucket : buckets_) {
        bucket.right *= 1 - 1 / kEvidenceKept;
        bucket.wrong *= 1 - 1 / kEvidenceKept;
    }
    Bucket & bucket = buckets_[size_t(bucket_of(probability))];
    bucket.right += right;
    bucket.wrong += 1 - right;
}

void Depth::report(const mtp_cycle_outcome & o) {
    require_range(o.n_drafted, 0, max_depth_, "n_drafted");
    require_range(o.n_verified, 0, o.n_drafted, "n_verified");
    require_range(o.n_accepted, 0, o.n_verified, "n_accepted");
    if (o.n_drafted > 0) {
        require(o.probabilities, "probabilities");
    }
    if (o.verify_ms != 0) { // 0: not measured, or reported by report_batch
        costs_->add(costs_->verify, o.n_verified + 1, o.verify_ms);
    }
    if (o.n_drafted > 0 && o.draft_ms != 0) { // an empty table would hide those of other numbers of sequences
        costs_->add(costs_->draft[1], o.n_drafted, o.draft_ms);
    }
    if (o.n_accepted < o.n_verified) {
        costs_->add(costs_->rollback, 1, o.undo_ms);
    }

    double last = -1;
    if (o.n_accepted < o.n_verified) {
        last = 0;
    } else if (o.n_verified < o.n_drafted && o.next_right >= 0) {
        last = std::min<double>(o.next_right, 1);
    }
    for (int32_t i = 0; i < o.n_accepted; ++i) {
        learn_probability(1, o.probabilities[i]);
    }
    if (last >= 0) {
        learn_probability(last, o.probabilities[o.n_accepted]);
    }
    acceptance_.add(o.n_accepted, last);
    acceptance_.pass(o.n_accepted + 1);

    was_right_ = (probe_ || trial_) && (o.n_accepted > 0 || last > 0.5);
    const double plain_ms = cycle_ms(0, 1, 0);
    const double probe_cost = probe_ ? std::min(draft_ms(1) / plain_ms, kMostDebt) : 0; // limited as in pay_trials
    probe_debt_ = std::max(0.0, probe_debt_ + probe_cost - probe_share() * (o.n_accepted + 1));
    pay_trials(trial_ ? (draft_ms(1) + verify_ms(2)) / plain_ms - (o.n_accepted + 1) : 0, 1, o.n_accepted + 1);
}

} // namespace mtp
