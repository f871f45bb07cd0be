#include "depth/acceptance.h"

#include <algorithm>
#include <cmath>

namespace mtp {

namespace {

// The source of each number is docs/decisions.md, "The constants of depth auto".

constexpr double kChangeTokens = 400; // expected tokens between two change points
constexpr double kFirstChance = 0.7;  // prior acceptance of the first draft, if the file states none
constexpr double kFirstWeight = 2;    // weight of that prior, in outcomes
constexpr double kLaterWeight = 12;   // weight, in outcomes, of the prior that a position is like the one before
constexpr size_t kMostSegments = 12;
constexpr double kLeastChance = 0.001; // estimates stay between this and 1 minus this

double clip(double chance) {
    return std::clamp(chance, kLeastChance, 1 - kLeastChance);
}

} // namespace

// The posterior means of the beta distribution of each position.
Chances Segment::chances(int32_t n, double first) const {
    Chances out = {};
    double before = first;
    double weight = kFirstWeight;
    for (size_t i = 0; i < size_t(n); ++i) {
        out[i] = clip((accepted[i] + weight * before) / (drafted[i] + weight));
        before = out[i];
        weight = kLaterWeight;
    }
    return out;
}

Acceptance::Acceptance(int32_t n_positions) : n_positions_(n_positions), first_chance_(kFirstChance), segments_(1) {
    segments_[0].weight = 1;
}

void Acceptance::expect(double chance) {
    first_chance_ = clip(chance);
}

size_t Acceptance::most_segments() {
    return kMostSegments;
}

void Acceptance::pass(int32_t n_tokens) {
    const double unchanged = std::exp(-n_tokens / kChangeTokens);
    for (Segment & segment : segments_) {
        segment.weight *= unchanged;
    }
    segments_[0].weight += 1 - unchanged;
}

void Acceptance::add(int32_t n_accepted, double last) {
    const int32_t n = n_accepted + (last >= 0);
    if (n == 0) {
        return;
    }
    for (Segment & segment : segments_) {
        const Chances chance = segment.chances(n, first_chance_);
        for (int32_t i = 0; i < n; ++i) {
            const double accepted = i < n_accepted ? 1 : last;
            segment.weight *= accepted * chance[size_t(i)] + (1 - accepted) * (1 - chance[size_t(i)]);
            segment.accepted[size_t(i)] += accepted;
            segment.drafted[size_t(i)] += 1;
        }
    }
    std::stable_sort(segments_.begin(), segments_.end(),
                     [](const Segment & a, const Segment & b) { return a.weight > b.weight; });
    segments_.resize(std::min(segments_.size(), kMostSegments - 1));
    double total = 0;
    for (const Segment & segment : segments_) {
        total += segment.weight;
    }
    for (Segment & segment : segments_) {
        segment.weight /= total;
    }
    segments_.insert(segments_.begin(), Segment());
}

Chances Acceptance::chances() const {
    Chances all = {}; // the probability that a position and those before it are accepted
    for (const Segment & segment : segments_) {
        const Chances chance = segment.chances(n_positions_, first_chance_);
        double so_far = segment.weight;
        for (size_t i = 0; i < size_t(n_positions_); ++i) {
            so_far *= chance[i];
            all[i] += so_far;
        }
    }
    Chances out = {};
    double before = 1;
    for (size_t i = 0; i < size_t(n_positions_); ++i) {
        out[i] = clip(all[i] / before);
        before = all[i];
    }
    return out;
}

} // namespace mtp
