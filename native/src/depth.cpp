#include "depth.h"

#include "error.h"

#include <algorithm>
#include <cmath>

namespace mtp {

namespace {

// Cycles over which acceptance is averaged, and those within which a change must show.
constexpr double kLong = 96;
constexpr double kShort = 6;
// How many standard deviations apart the two averages of first drafts are when the text has changed.
constexpr double kSurprise = 2.3;
// How sure the short average then counts as the new long one.
constexpr double kAnewWeight = 2;
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
// What a few uses may be wrong by, at most; a use counts for half when so many cycles have gone by.
constexpr double kDoubt = 1.5;
constexpr double kMostDoubt = 0.15;
constexpr double kStaleCycles = 512;
// A size that was never used counts by this factor. Beyond those that were, a step costs this share
// of the last one that is known, and at least this share of the first size.
constexpr double kUnknown = 0.85;
constexpr double kNextStep = 0.6;
constexpr double kLeastStep = 0.1;
// Share of the time that unverified drafts may take, and their distance in cycles.
constexpr double kShadowShare = 0.01;
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

int bucket_of(float probability) {
    return int(std::upper_bound(std::begin(kBounds), std::end(kBounds), double(probability)) - std::begin(kBounds));
}

} // namespace

void Costs::add(int32_t size, double ms, int64_t cycle, Pace & pace) {
    Cell & cell = cells_[size_t(size)];
    const double seen = std::log(ms) - pace.log_factor;
    if (cell.uses == 0) {
        cell.log_ms = seen;
    } else {
        const double off = std::clamp(seen - cell.log_ms, -kOutlier, kOutlier);
        if (cell.uses > 1) {
            cell.log_ms += off / (cell.uses + 1);
        } else {
            cell.log_ms += std::min(off, 0.0); // a first use often warms something up
        }
        pace.log_factor += kFollow * off;
        pace.noise += (std::abs(off) - pace.noise) / kNoiseUses;
    }
    cell.uses = std::min(cell.uses + 1, kUses);
    cell.last_used = cycle;
}

// Between two known sizes by the line through both; below all in proportion, the least that can be;
// above all by what one more cost last.
double Costs::ms(int32_t size, double otherwise) const {
    int32_t before = 0;
    int32_t below = 0;
    int32_t above = 0;
    for (int32_t i = 1; i < int32_t(cells_.size()) && above == 0; ++i) {
        if (!known(i)) {
            continue;
        }
        if (i <= size) {
            before = below;
            below = i;
        } else {
            above = i;
        }
    }
    const auto cost = [&](int32_t i) { return i ? std::exp(cells_[size_t(i)].log_ms) : 0; };
    if (below == size) {
        return cost(size);
    }
    if (above) {
        return below ? cost(below) + (cost(above) - cost(below)) * (size - below) / (above - below)
                     : cost(above) * size / above;
    }
    if (!below) {
        return otherwise;
    }
    const double step = before ? (cost(below) - cost(before)) / (below - before) * kNextStep : 0;
    return cost(below) + std::max(step, kLeastStep * cost(below) / below) * (size - below);
}

double Costs::least_ms(int32_t size, double otherwise, int64_t cycle, const Pace & pace) const {
    const Cell & cell = cells_[size_t(size)];
    if (!known(size)) {
        return ms(size, otherwise) * kUnknown;
    }
    const double uses = cell.uses / (1 + double(cycle - cell.last_used) / kStaleCycles);
    return std::exp(cell.log_ms - std::min(kMostDoubt, kDoubt * pace.noise / std::sqrt(uses)));
}

Depth::Depth(int32_t max_depth) : max_depth_(max_depth) {
    require_range(max_depth, 0, MTP_MAX_DEPTH, "max_depth");
}

void Depth::add_cost(Costs & costs, int32_t size, double ms) {
    if (!std::isfinite(ms) || ms < 0) {
        throw Error(MTP_ERROR_ARGUMENT, format("a cost: expected milliseconds from 0, found %g", ms));
    }
    if (ms > 0) {
        costs.add(size, ms, cycle_, pace_);
    }
}

void Depth::set_costs(const double * verify_ms, int32_t n_verify, const double * draft_ms, int32_t n_draft) {
    require_range(n_verify, 0, MTP_MAX_DEPTH + 1, "n_verify");
    require_range(n_draft, 0, MTP_MAX_DEPTH, "n_draft");
    for (int32_t i = 0; i < n_verify; ++i) {
        add_cost(verify_, i + 1, require(verify_ms, "verify_ms")[i]);
    }
    for (int32_t i = 0; i < n_draft; ++i) {
        add_cost(draft_, i + 1, require(draft_ms, "draft_ms")[i]);
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
    return verify_.least_ms(rows, 1 + kLeastStep * (rows - 1), cycle_, pace_);
}

double Depth::draft_ms(int32_t depth) const {
    return depth ? draft_.least_ms(depth, kLeastStep * verify_.ms(1, 1) * depth, cycle_, pace_) : 0;
}

double Depth::cycle_ms(int32_t depth, const Chances & chances) const {
    double all = 1;
    for (int32_t i = 0; i < depth; ++i) {
        all *= chances[size_t(i)];
    }
    const double undo = depth ? (1 - all) * undo_.ms(1, 0) : 0;
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
    add_cost(verify_, o.n_verified + 1, o.verify_ms);
    if (o.n_drafted > 0) {
        add_cost(draft_, o.n_drafted, o.draft_ms);
    }
    if (o.n_accepted < o.n_verified) {
        add_cost(undo_, 1, o.undo_ms);
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
    lately_.right += (first - lately_.right) / kShort;
    lately_.seen = std::min(lately_.seen + 1, kShort);
    const Acceptance & long_run = positions_[0];
    const double mean = clip((long_run.right + 0.5) / (long_run.seen + 1));
    const double deviation = std::sqrt(mean * (1 - mean) / (2 * kShort - 1));
    if (lately_.seen >= kShort && long_run.seen > 2 * kShort && std::abs(lately_.right - mean) > kSurprise * deviation) {
        for (Acceptance & a : positions_) {
            a = {};
        }
        positions_[0] = {lately_.right * kAnewWeight, kAnewWeight};
        lately_.seen = 0;
    }
    // A shadow that is right against expectation is followed up at once, and so is any until enough
    // was seen of what now holds.
    if (shadow_) {
        const int64_t wait = std::clamp(int64_t(draft_.ms(1, 0) / (kShadowShare * verify_.ms(1, 1))), kShadowLeast,
                                        kShadowMost);
        const bool follow = first - mean > 0.5 || positions_[0].seen < kEnough;
        shadow_due_ = cycle_ + (follow ? 0 : wait);
    }
}

} // namespace mtp
