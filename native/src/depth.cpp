#include "depth.h"

#include "error.h"

#include <algorithm>
#include <cmath>

namespace mtp {

namespace {

// Cycles over which acceptance is averaged, and those within which a change must show.
constexpr double kLong = 64;
constexpr double kShort = 6;
// How many standard deviations apart the two averages of first drafts are when the text has changed.
constexpr double kSurprise = 2.7;
// How sure the short average then counts as the new long one.
constexpr double kAnewWeight = 2;
// Before anything is known: first drafts are right this often, as sure as so many were seen.
constexpr double kFirstChance = 0.6;
constexpr double kFirstWeight = 2;
// A later position is believed to be like the one before it, as sure as so many were seen.
constexpr double kLaterWeight = 4;
constexpr double kLaterShare = 0.99;
// A cost that was never measured, or not for so many cycles, counts by this factor.
constexpr double kUnknown = 0.85;
constexpr double kStale = 0.95;
constexpr int64_t kStaleCycles = 512;
// Beyond what was measured a further token of a batch, or of a draft, costs at least this share of
// the first one.
constexpr double kLeastStep = 0.1;
// Share of the time that unverified drafts may take, and their distance in cycles.
constexpr double kShadowShare = 0.012;
constexpr int64_t kShadowLeast = 8;
constexpr int64_t kShadowMost = 20;
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

// A cost that was not measured, from those that were: between two of them by the line through both;
// below all, in proportion (the least that can be); above all, a small step for each.
template <typename Costs>
double estimate(const Costs & costs, int32_t at, double otherwise) {
    int32_t below = 0;
    int32_t above = 0;
    for (int32_t i = 1; i < int32_t(costs.size()); ++i) {
        if (!costs[size_t(i)].known()) {
            continue;
        }
        if (i <= at) {
            below = i;
        } else if (above == 0) {
            above = i;
        }
    }
    if (below == at) {
        return costs[size_t(at)].median();
    }
    const double low = below ? costs[size_t(below)].median() : 0;
    const double high = above ? costs[size_t(above)].median() : 0;
    if (below && above) {
        return low + (high - low) * (at - below) / (above - below);
    }
    if (above) {
        return high * at / above;
    }
    return below ? low * (1 + kLeastStep * (at - below) / below) : otherwise;
}

} // namespace

void Cost::add(double ms) {
    ms_[size_t(n_ % kKept)] = ms;
    ++n_;
}

double Cost::median() const {
    std::array<double, kKept> sorted = ms_;
    const int64_t n = std::min<int64_t>(n_, kKept);
    std::sort(sorted.begin(), sorted.begin() + n);
    return sorted[size_t((n - 1) / 2)]; // of two the smaller: a first use often warms something up
}

Depth::Depth(int32_t max_depth) : max_depth_(max_depth) {
    require_range(max_depth, 0, MTP_MAX_DEPTH, "max_depth");
}

void Depth::add_cost(Cost & cost, double ms) {
    if (!std::isfinite(ms) || ms < 0) {
        throw Error(MTP_ERROR_ARGUMENT, format("a cost: expected milliseconds from 0, found %g", ms));
    }
    if (ms > 0) {
        cost.add(ms);
        cost.last_used = cycle_;
    }
}

void Depth::set_costs(const double * verify_ms, int32_t n_verify, const double * draft_ms, int32_t n_draft) {
    require_range(n_verify, 0, MTP_MAX_DEPTH + 1, "n_verify");
    require_range(n_draft, 0, MTP_MAX_DEPTH, "n_draft");
    for (int32_t i = 0; i < n_verify; ++i) {
        add_cost(verify_[size_t(i + 1)], require(verify_ms, "verify_ms")[i]);
    }
    for (int32_t i = 0; i < n_draft; ++i) {
        add_cost(draft_[size_t(i + 1)], require(draft_ms, "draft_ms")[i]);
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

double Depth::raw_verify_ms(int32_t rows) const {
    return estimate(verify_, rows, 1 + kLeastStep * (rows - 1));
}

double Depth::raw_draft_ms(int32_t depth) const {
    return depth ? estimate(draft_, depth, kLeastStep * raw_verify_ms(1) * depth) : 0;
}

double Depth::verify_ms(int32_t rows) const {
    const Cost & cost = verify_[size_t(rows)];
    const double factor = !cost.known() ? kUnknown : cycle_ - cost.last_used > kStaleCycles ? kStale : 1;
    return raw_verify_ms(rows) * factor;
}

double Depth::draft_ms(int32_t depth) const {
    const bool known = depth == 0 || draft_[size_t(depth)].known();
    return raw_draft_ms(depth) * (known ? 1 : kUnknown);
}

double Depth::cycle_ms(int32_t depth, const Chances & chances) const {
    double all = 1;
    for (int32_t i = 0; i < depth; ++i) {
        all *= chances[size_t(i)];
    }
    const double undo = depth && undo_.known() ? (1 - all) * undo_.median() : 0;
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
    add_cost(verify_[size_t(o.n_verified + 1)], o.verify_ms);
    if (o.n_drafted > 0) {
        add_cost(draft_[size_t(o.n_drafted)], o.draft_ms);
    }
    if (o.n_accepted < o.n_verified) {
        add_cost(undo_, o.undo_ms);
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
        const int64_t wait = std::clamp(int64_t(raw_draft_ms(1) / (kShadowShare * raw_verify_ms(1))), kShadowLeast,
                                        kShadowMost);
        const bool follow = first - mean > 0.5 || positions_[0].seen < kEnough;
        shadow_due_ = cycle_ + (follow ? 0 : wait);
    }
}

} // namespace mtp
