#include "acceptance.h"

#include <algorithm>
#include <cmath>

namespace mtp {

namespace {

// Tokens between two turns of a text, on average.
constexpr double kTurnTokens = 400;
// When a stretch begins first drafts are right as often as in all of them so far, as sure as so many
// were seen: a head that was good is expected to be so again. Within limits: one that never was is
// not given up, one that always was not trusted blindly.
constexpr double kFirstChance = 0.7;
constexpr double kLeastFirstChance = 0.4;
constexpr double kMostFirstChance = 0.85;
constexpr double kFirstWeight = 2;
// First drafts over which the share in all stretches forgets, and as many as kFirstChance counts for.
constexpr double kUsual = 1000;
constexpr double kUsualWeight = 16;
// A later position is believed to be like the one before it, as sure as so many were seen.
constexpr double kLaterWeight = 12;
constexpr double kLaterShare = 0.99;
// Cycles over which a stretch forgets: a text may also change little by little.
constexpr double kLong = 1000;
// Stretches with less weight are given up, and the lightest of more than so many.
constexpr double kLeastWeight = 3e-3;
constexpr size_t kMostStretches = 16;

double clip(double chance) {
    return std::clamp(chance, 0.001, 0.999);
}

} // namespace

// The mean and the deviation of the beta distribution that a position's outcomes leave.
Chances Stretch::chances(int32_t n, double shift) const {
    Chances out = {};
    double before = expected;
    double weight = kFirstWeight;
    for (size_t i = 0; i < size_t(n); ++i) {
        const Outcomes & seen = positions[i];
        const double mean = clip((seen.right + weight * before) / (seen.all + weight));
        out[i] = clip(mean + shift * std::sqrt(mean * (1 - mean) / (seen.all + weight + 1)));
        before = out[i] * kLaterShare;
        weight = kLaterWeight;
    }
    return out;
}

Acceptance::Acceptance(int32_t n_positions) : n_positions_(n_positions), stretches_(1) {
    stretches_[0].weight = 1;
    stretches_[0].expected = kFirstChance;
}

void Acceptance::pass(int32_t n_tokens) {
    const double stays = std::exp(-n_tokens / kTurnTokens);
    for (Stretch & stretch : stretches_) {
        stretch.weight *= stays;
    }
    stretches_[0].weight += 1 - stays;
}

void Acceptance::add(int32_t n_right, double last) {
    const int32_t n = n_right + (last >= 0);
    if (n == 0) {
        return;
    }
    double total = 0;
    for (Stretch & stretch : stretches_) {
        const Chances chance = stretch.chances(n);
        for (Outcomes & seen : stretch.positions) {
            seen.right *= 1 - 1 / kLong;
            seen.all *= 1 - 1 / kLong;
        }
        for (int32_t i = 0; i < n; ++i) {
            const double right = i < n_right ? 1 : last;
            stretch.weight *= right * chance[size_t(i)] + (1 - right) * (1 - chance[size_t(i)]);
            stretch.positions[size_t(i)].right += right;
            stretch.positions[size_t(i)].all += 1;
        }
        total += stretch.weight;
    }
    std::stable_sort(stretches_.begin(), stretches_.end(),
                     [](const Stretch & a, const Stretch & b) { return a.weight > b.weight; });
    while (stretches_.size() >= kMostStretches || stretches_.back().weight < kLeastWeight * total) {
        total -= stretches_.back().weight;
        stretches_.pop_back();
    }
    for (Stretch & stretch : stretches_) {
        stretch.weight /= total;
    }
    first_.right += (n_right > 0 ? 1 : last) - first_.right / kUsual;
    first_.all += 1 - first_.all / kUsual;
    const double usual = (first_.right + kUsualWeight * kFirstChance) / (first_.all + kUsualWeight);
    stretches_.insert(stretches_.begin(), Stretch());
    stretches_[0].expected = std::clamp(usual, kLeastFirstChance, kMostFirstChance);
}

Chances Acceptance::chances() const {
    Chances all = {}; // the chance that a position and those before it are right
    for (const Stretch & stretch : stretches_) {
        const Chances chance = stretch.chances(n_positions_);
        double so_far = stretch.weight;
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
