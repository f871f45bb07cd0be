// The choice of depths for sequences whose drafts and verification share batches.
//
// A cycle of n sequences with n + k tokens takes one draft graph, as deep as the deepest draft, and one
// batch of n + k tokens. Which sequences the k drafts belong to changes only what they gain: a draft's
// gain is the probability that it and those before it are accepted. So for each k the k drafts with the
// largest gains are best, and the best k is found by trying all.

#include "depth.h"

#include <algorithm>

namespace mtp {

namespace {

struct Step {
    double gain;
    size_t sequence;
};

// The drafts of all sequences, largest gain first; those of one sequence are in their order. limits: how
// many of each sequence.
std::vector<Step> by_gain(const std::vector<Chances> & chances, const std::vector<int32_t> & limits) {
    std::vector<Step> out;
    for (size_t s = 0; s < chances.size(); ++s) {
        double all = 1;
        for (int32_t i = 0; i < limits[s]; ++i) {
            all *= chances[s][size_t(i)];
            out.push_back({all, s});
        }
    }
    std::stable_sort(out.begin(), out.end(), [](const Step & a, const Step & b) { return a.gain > b.gain; });
    return out;
}

} // namespace

// The time of a batch of n_tokens for n sequences.
double Depth::batch_ms(int32_t n, int32_t n_tokens) const {
    return costs_->verify.least_ms(n_tokens, n + kLeastStep * (n_tokens - n), costs_->machine, n);
}

double Depth::best_batch_rate(const std::vector<Depth *> & all, const std::vector<int32_t> & limits, int32_t others,
                              std::vector<int32_t> & depths) {
    const Depth & any = *all.front();
    const int32_t n = int32_t(all.size());
    std::vector<Chances> chances;
    for (const Depth * depth : all) {
        chances.push_back(depth->acceptance_.chances());
    }
    std::vector<int32_t> chosen(all.size(), 0);
    std::vector<double> accepted(all.size(), 1); // probability that no draft is rejected
    double tokens = n + others;
    int32_t total = n + others;
    int32_t active = 0;
    int32_t deepest = 0;
    depths = chosen;
    double best = tokens / any.batch_ms(total, total);
    for (const Step & step : by_gain(chances, limits)) {
        int32_t & depth = chosen[step.sequence];
        active += depth == 0;
        deepest = std::max(deepest, ++depth);
        accepted[step.sequence] = step.gain;
        tokens += step.gain;
        ++total;
        double rejections = 0;
        for (const double probability : accepted) {
            rejections += 1 - probability;
        }
        const double ms = any.batch_draft_ms(active, deepest) + any.batch_ms(n + others, total) +
                          rejections * any.costs_->rollback_ms();
        if (tokens / ms > best) {
            best = tokens / ms;
            depths = chosen;
        }
    }
    return best;
}

std::vector<int32_t> Depth::plan_batch(const std::vector<Depth *> & all, const std::vector<int32_t> & rooms,
                                       int32_t others) {
    std::vector<int32_t> limits;
    for (size_t s = 0; s < all.size(); ++s) {
        limits.push_back(std::clamp(rooms[s], 0, all[s]->max_depth_));
    }
    std::vector<int32_t> depths;
    best_batch_rate(all, limits, others, depths);
    for (size_t s = 0; s < all.size(); ++s) {
        depths[s] = all[s]->settle(depths[s], limits[s]);
    }
    return depths;
}

std::vector<int32_t> Depth::keep_batch(const std::vector<Depth *> & all, const std::vector<const float *> & probabilities,
                                       const std::vector<int32_t> & drafted, int32_t others) {
    const Depth & any = *all.front();
    const int32_t n = int32_t(all.size());
    std::vector<int32_t> limits;
    std::vector<Chances> seen;
    std::vector<int32_t> kept(all.size(), 0);
    int32_t total = n + others;
    for (size_t s = 0; s < all.size(); ++s) {
        const Depth & depth = *all[s];
        limits.push_back(depth.max_depth_);
        seen.push_back(depth.acceptance_.chances());
        for (int32_t i = 0; i < drafted[s]; ++i) {
            seen[s][size_t(i)] = depth.sharpen(seen[s][size_t(i)], probabilities[s][i]);
        }
        if (depth.trial_) {
            kept[s] = drafted[s];
            total += drafted[s];
        }
    }
    std::vector<int32_t> unused;
    const double rate = best_batch_rate(all, limits, others, unused);
    std::vector<int32_t> left;
    for (size_t s = 0; s < all.size(); ++s) {
        left.push_back(drafted[s] - kept[s]);
    }
    // More tokens are verified as long as some number of further ones pays for itself.
    std::vector<int32_t> trying = kept;
    const double before = any.batch_ms(n + others, total);
    double gain = 0;
    double best = 0;
    for (const Step & step : by_gain(seen, left)) {
        ++trying[step.sequence];
        gain += step.gain;
        const double surplus = gain - rate * (any.batch_ms(n + others, ++total) - before);
        if (surplus > best) {
            best = surplus;
            kept = trying;
        }
    }
    return kept;
}

} // namespace mtp
