#include "depth.h"

#include "error.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace mtp {

namespace {

// Cycles over which acceptance is averaged.
constexpr double kLong = 96;
// The text has turned when first drafts are so much likelier, as a logarithm, with the odds of being
// right changed by this factor, also a logarithm. Nothing is said before so many were seen.
constexpr double kTurn = 6.5;
constexpr double kTurnOdds = 2.5;
constexpr double kTurnSeen = 12;
// Before anything is known: first drafts are right this often, as sure as so many were seen.
constexpr double kFirstChance = 0.7;
constexpr double kFirstWeight = 2;
// A later position is believed to be like the one before it, as sure as so many were seen.
constexpr double kLaterWeight = 12;
constexpr double kLaterShare = 0.99;
// A cost is the mean of so many uses; one that is further off than this, in logarithms, counts as
// one that is not.
constexpr double kUses = 48;
constexpr double kOutlier = 0.4;
// Share of each surprise that is the machine's pace, and uses over which its noise is averaged.
constexpr double kFollow = 1.0 / 16;
constexpr double kNoiseUses = 32;
// What a few uses may be wrong by, at most, and what a single one may have cost more because it was
// the first, in logarithms; a use counts for half when so many batches have gone by.
constexpr double kDoubt = 1.5;
constexpr double kMostDoubt = 0.1;
constexpr double kWarmUp = 0.06;
constexpr double kStaleBatches = 512;
// A size that was never used counts by this factor. Beyond those that were, a step costs this share
// of the last one that is known, and at least this share of the first size.
constexpr double kUnknown = 0.85;
constexpr double kNextStep = 0.6;
constexpr double kLeastStep = 0.1;
// Share of the time that unverified drafts may take, and their distance in cycles.
constexpr double kShadowShare = 0.005;
constexpr int64_t kShadowLeast = 8;
constexpr int64_t kShadowMost = 24;
constexpr double kEnough = 8; // first drafts
// The evidence of the head's probabilities forgets over this many drafts, and begins as if so many
// had been right and wrong alike in all buckets.
constexpr double kEvidenceKept = 512;
constexpr double kEvidenceWeight = 16;
constexpr double kBounds[] = {0.3, 0.5, 0.7, 0.85, 0.95};

double clip(double chance) {
    return std::clamp(chance, 0.001, 0.999);
}

// A time that somebody measured; 0 if nobody did.
double checked(double ms) {
    if (!std::isfinite(ms) || ms < 0) {
        throw Error(MTP_ERROR_ARGUMENT, format("a cost: expected milliseconds from 0, found %g", ms));
    }
    return ms;
}

void add_known(Costs & costs, int32_t size, double ms, Prices & prices) {
    if (checked(ms) > 0) {
        costs.add(size, ms, prices.batches, prices.pace);
    }
}

int bucket_of(float probability) {
    return int(std::upper_bound(std::begin(kBounds), std::end(kBounds), double(probability)) - std::begin(kBounds));
}

} // namespace

void Costs::add(int32_t size, double ms, int64_t now, Pace & pace) {
    Cell & cell = cells_[size];
    const double seen = std::log(ms) - pace.log_factor;
    if (cell.uses == 0) {
        cell.log_ms = seen;
    } else if (cell.uses == 1 && seen < cell.log_ms) {
        cell.log_ms = seen; // a first use often warms something up
    } else {
        const double off = std::clamp(seen - cell.log_ms, -kOutlier, kOutlier);
        cell.log_ms += cell.uses > 1 ? off / (cell.uses + 1) : 0;
        pace.log_factor += kFollow * off;
        pace.noise += (std::abs(off) - pace.noise) / kNoiseUses;
    }
    cell.uses = std::min(cell.uses + 1, kUses);
    cell.last_used = now;
}

// Between two used sizes by the line through both; below all in proportion, the least that can be;
// above all by what one more cost last.
double Costs::line_ms(int32_t size, double otherwise) const {
    const auto cost = [](const auto & cell) { return std::exp(cell->second.log_ms); };
    const auto above = cells_.lower_bound(size);
    if (above != cells_.end() && above->first == size) {
        return cost(above);
    }
    if (cells_.empty()) {
        return otherwise;
    }
    if (above == cells_.begin()) {
        return cost(above) * size / above->first;
    }
    const auto below = std::prev(above);
    if (above != cells_.end()) {
        return cost(below) + (cost(above) - cost(below)) * (size - below->first) / (above->first - below->first);
    }
    double step = kLeastStep * cost(below) / below->first;
    if (below != cells_.begin()) {
        const auto before = std::prev(below);
        step = std::max(step, (cost(below) - cost(before)) / (below->first - before->first) * kNextStep);
    }
    return cost(below) + step * (size - below->first);
}

double Costs::ms(int32_t size, double otherwise) const {
    double least = line_ms(size, otherwise);
    for (auto larger = cells_.upper_bound(size); larger != cells_.end(); ++larger) {
        least = std::min(least, std::exp(larger->second.log_ms));
    }
    return least;
}

double Costs::least_ms(int32_t size, double otherwise, int64_t now, const Pace & pace, int32_t near) const {
    double uses = 0;
    const auto end = cells_.lower_bound(size + near);
    for (auto cell = cells_.upper_bound(size - near); cell != end; ++cell) {
        uses += cell->second.uses / (1 + double(now - cell->second.last_used) / kStaleBatches);
    }
    if (uses == 0) {
        return ms(size, otherwise) * kUnknown;
    }
    const double doubt = std::min(kMostDoubt, kDoubt * pace.noise / std::sqrt(uses)) + (uses <= 1 ? kWarmUp : 0);
    return ms(size, otherwise) * std::exp(-doubt);
}

void Prices::add_batch(int32_t n_tokens, double ms) {
    ++batches;
    if (checked(ms) > 0) {
        verify.add(n_tokens, ms, batches, pace);
    }
}

bool Turn::add(double right, double mean) {
    const double odds = mean / (1 - mean) * std::exp(log_odds_);
    const double other = odds / (1 + odds);
    sum_ += right * std::log(other / mean) + (1 - right) * std::log((1 - other) / (1 - mean));
    since.right += right;
    since.seen += 1;
    if (sum_ <= 0) {
        *this = Turn(log_odds_);
    }
    return sum_ > kTurn;
}

Depth::Depth(int32_t max_depth, std::shared_ptr<Prices> prices)
    : max_depth_(max_depth), prices_(std::move(prices)), worse_(-kTurnOdds), better_(kTurnOdds) {
    require_range(max_depth, 0, MTP_MAX_DEPTH, "max_depth");
}

void Depth::share(int32_t n_sequences) {
    require_range(n_sequences, 1, MTP_MAX_SEQUENCES, "n_sequences");
    n_sequences_ = n_sequences;
}

void Depth::report_batch(int32_t n_tokens, double ms) {
    require_range(n_tokens, 1, MTP_MAX_SEQUENCES * (MTP_MAX_DEPTH + 1), "n_tokens");
    prices_->add_batch(n_tokens, ms);
}

void Depth::set_costs(const double * verify_ms, int32_t n_verify, const double * draft_ms, int32_t n_draft) {
    require_range(n_verify, 0, MTP_MAX_DEPTH + 1, "n_verify");
    require_range(n_draft, 0, MTP_MAX_DEPTH, "n_draft");
    for (int32_t i = 0; i < n_verify; ++i) {
        add_known(prices_->verify, i + 1, require(verify_ms, "verify_ms")[i], *prices_);
    }
    for (int32_t i = 0; i < n_draft; ++i) {
        add_known(prices_->draft, i + 1, require(draft_ms, "draft_ms")[i], *prices_);
    }
}

// Chance of each position to be accepted once those before it are.
Depth::Chances Depth::chances() const {
    Chances out;
    double before = kFirstChance;
    double weight = kFirstWeight;
    for (size_t i = 0; i < out.size(); ++i) {
        const Acceptance & a = positions_[i];
        out[i] = clip((a.right + weight * before) / (a.seen + weight));
        before = out[i] * kLaterShare;
        weight = kLaterWeight;
    }
    return out;
}

// A chance in the light of the head's own probability, by Bayes: the odds times how much more often
// accepted drafts have such a probability than rejected ones.
double Depth::sharpen(double chance, float probability) const {
    double right = 0;
    double wrong = 0;
    for (const Bucket & bucket : buckets_) {
        right += bucket.right;
        wrong += bucket.wrong;
    }
    if (right + wrong == 0) {
        return chance;
    }
    const Bucket & bucket = buckets_[size_t(bucket_of(probability))];
    const double share = (bucket.right + bucket.wrong) / (right + wrong);
    if (share == 0) {
        return chance;
    }
    const double if_right = (bucket.right + kEvidenceWeight * share) / (right + kEvidenceWeight);
    const double if_wrong = (bucket.wrong + kEvidenceWeight * share) / (wrong + kEvidenceWeight);
    const double odds = chance / (1 - chance) * if_right / if_wrong;
    return clip(odds / (1 + odds));
}

double Depth::verify_ms(int32_t rows) const {
    const int32_t n = n_sequences_;
    const double otherwise = n * (1 + kLeastStep * (rows - 1));
    return prices_->verify.least_ms(n * rows, otherwise, prices_->batches, prices_->pace, n) / n;
}

double Depth::draft_ms(int32_t depth) const {
    const double otherwise = kLeastStep * prices_->verify.ms(1, 1) * depth;
    return depth ? prices_->draft.least_ms(depth, otherwise, prices_->batches, prices_->pace) : 0;
}

double Depth::cycle_ms(int32_t depth, const Chances & chances) const {
    double all = 1;
    for (int32_t i = 0; i < depth; ++i) {
        all *= chances[size_t(i)];
    }
    const double undo = depth ? (1 - all) * prices_->undo.ms(1, 0) : 0;
    return draft_ms(depth) + verify_ms(depth + 1) + undo;
}

// Most tokens per millisecond of all depths up to `room`, and that depth.
double Depth::best_rate(int32_t room, int32_t & depth) const {
    const Chances chance = chances();
    double tokens = 1;
    double all = 1;
    double best = 0;
    for (int32_t d = 0; d <= room; ++d) {
        if (d > 0) {
            all *= chance[size_t(d - 1)];
            tokens += all;
        }
        const double rate = tokens / cycle_ms(d, chance);
        if (rate > best) {
            best = rate;
            depth = d;
        }
    }
    return best;
}

int32_t Depth::plan(int32_t room) {
    room = std::clamp(room, 0, max_depth_);
    int32_t depth = 0;
    best_rate(room, depth);
    shadow_ = depth == 0 && room > 0 && cycle_ >= shadow_due_;
    return shadow_ ? 1 : depth;
}

int32_t Depth::keep(const float * probabilities, int32_t n, bool own) const {
    n = std::clamp(n, 0, max_depth_);
    int32_t unused = 0;
    const double rate = best_rate(max_depth_, unused);
    Chances chance = chances();
    for (int32_t kept = 0; kept < n; ++kept) {
        // Whether more than `kept` are worth it, by what may be known when draft `kept` is decided.
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

void Depth::observe(int32_t position, double right, float probability) {
    Acceptance & a = positions_[size_t(position)];
    a.right += right;
    a.seen += 1;
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
    ++cycle_;
    if (checked(o.verify_ms) > 0) {
        prices_->add_batch(o.n_verified + 1, o.verify_ms);
    }
    if (o.n_drafted > 0) {
        add_known(prices_->draft, o.n_drafted, o.draft_ms, *prices_);
    }
    if (o.n_accepted < o.n_verified) {
        add_known(prices_->undo, 1, o.undo_ms, *prices_);
    }
    const bool all = o.n_accepted == o.n_verified;
    const bool judged = all && o.n_drafted > o.n_verified && o.next_right >= 0;
    if (o.n_verified == 0 && !judged) {
        return;
    }
    // What is seen counts for less from cycle to cycle; positions that are not reached fall back
    // upon the one before them.
    for (Acceptance & a : positions_) {
        a.right *= 1 - 1 / kLong;
        a.seen *= 1 - 1 / kLong;
    }
    for (int32_t i = 0; i < o.n_accepted; ++i) {
        observe(i, 1, o.probabilities[i]);
    }
    if (!all) {
        observe(o.n_accepted, 0, o.probabilities[o.n_accepted]);
    } else if (judged) {
        observe(o.n_verified, std::min<double>(o.next_right, 1), o.probabilities[o.n_verified]);
    }

    const double first = o.n_verified == 0 ? std::min<double>(o.next_right, 1) : o.n_accepted > 0;
    const Acceptance & long_run = positions_[0];
    const double mean = clip((long_run.right + 0.5) / (long_run.seen + 1));
    if (long_run.seen > kTurnSeen) {
        const bool worse = worse_.add(first, mean);
        const bool better = better_.add(first, mean);
        if (worse || better) {
            const Acceptance since = (worse ? worse_ : better_).since;
            positions_ = {};
            positions_[0] = since;
            worse_ = Turn(-kTurnOdds);
            better_ = Turn(kTurnOdds);
        }
    }
    // A shadow that is right against expectation is followed up at once, and so is any until enough
    // was seen of what now holds.
    if (shadow_) {
        const double share = prices_->draft.ms(1, 0) / prices_->verify.ms(1, 1);
        const int64_t wait = std::clamp(int64_t(share / kShadowShare), kShadowLeast, kShadowMost);
        const bool follow = first - mean > 0.5 || positions_[0].seen < kEnough;
        shadow_due_ = cycle_ + (follow ? 0 : wait);
    }
}

} // namespace mtp
