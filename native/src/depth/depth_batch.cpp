// The choice of depths for sequences whose drafts and verification share batches.
//
// A cycle takes one draft graph and one batch, if all sequences verify the same number of drafts: llama.cpp
// computes sequences of different lengths in several graphs, each of which reads all weights, because the
// layers with recurrent states need as many tokens of each. So all get the same depth, or as many drafts as
// they have room for, and the best depth is found by trying all.

#include "depth/depth.h"

#include <algorithm>
#include <map>

namespace mtp {

// The time of a cycle's verification. others: sequences with one token each.
double Depth::batch_ms(const std::vector<int32_t> & depths, int32_t others) const {
    std::map<int32_t, int32_t> sequences; // by their number of tokens
    for (const int32_t depth : depths) {
        ++sequences[depth + 1];
    }
    if (others > 0) {
        sequences[1] += others;
    }
    double out = 0;
    for (const auto & [length, n] : sequences) {
        out += costs_->verify.least_ms(n * length, n * (1 + kLeastStep * (length - 1)), costs_->machine, n);
    }
    return out;
}

double Depth::best_batch_rate(const std::vector<Depth *> & all, const std::vector<int32_t> & limits, int32_t others,
                              std::vector<int32_t> & depths) {
    const Depth & any = *all.front();
    std::vector<Chances> chances;
    for (const Depth * depth : all) {
        chances.push_back(depth->acceptance_.chances());
    }
    std::vector<int32_t> chosen(all.size(), 0);
    std::vector<double> accepted(all.size(), 1); // probability that no draft is rejected
    double tokens = double(all.size()) + others;
    depths = chosen;
    double best = tokens / any.batch_ms(chosen, others);
    for (int32_t depth = 1; depth <= *std::max_element(limits.begin(), limits.end()); ++depth) {
        int32_t drafting = 0;
        double rejections = 0;
        for (size_t s = 0; s < all.size(); ++s) {
            if (depth <= limits[s]) {
                chosen[s] = depth;
                accepted[s] *= chances[s][size_t(depth - 1)];
                tokens += accepted[s];
            }
            drafting += chosen[s] > 0;
            rejections += 1 - accepted[s];
        }
        const double ms = any.batch_draft_ms(drafting, depth) + any.batch_ms(chosen, others) +
                          rejections * any.costs_->rollback_ms();
        if (tokens / ms > best) {
            best = tokens / ms;
            depths = chosen;
        }
    }
    return best;
}

std::vector<int32_t> Depth::plan_batch(const std::vector<Depth *> & all, const std::vector<int32_t> & rooms) {
    std::vector<int32_t> limits;
    for (size_t s = 0; s < all.size(); ++s) {
        limits.push_back(std::clamp(rooms[s], 0, all[s]->max_depth_));
    }
    std::vector<int32_t> depths;
    best_batch_rate(all, limits, 0, depths);
    bool trial = false;
    for (size_t s = 0; s < all.size(); ++s) {
        depths[s] = all[s]->settle(depths[s], limits[s]);
        trial = trial || all[s]->trial_;
    }
    // A trial measures a batch, so all take part in it.
    for (size_t s = 0; s < all.size() && trial; ++s) {
        all[s]->trial_ = limits[s] > 0;
        all[s]->probe_ = false;
        depths[s] = all[s]->trial_;
    }
    return depths;
}

std::vector<int32_t> Depth::keep_batch(const std::vector<Depth *> & all, const std::vector<const float *> & probabilities,
                                       const std::vector<int32_t> & drafted, int32_t others) {
    const Depth & any = *all.front();
    std::vector<int32_t> limits;
    std::vector<Chances> seen;
    for (size_t s = 0; s < all.size(); ++s) {
        const Depth & depth = *all[s];
        if (depth.trial_) {
            return drafted;
        }
        limits.push_back(depth.max_depth_);
        seen.push_back(depth.acceptance_.chances());
        for (int32_t i = 0; i < drafted[s]; ++i) {
            seen[s][size_t(i)] = depth.sharpen(seen[s][size_t(i)], probabilities[s][i]);
        }
    }
    std::vector<int32_t> unused;
    const double rate = best_batch_rate(all, limits, others, unused);
    // More drafts are verified as long as some number of further ones pays for itself.
    std::vector<int32_t> kept(all.size(), 0);
    std::vector<int32_t> trying = kept;
    std::vector<double> accepted(all.size(), 1);
    const double before = any.batch_ms(kept, others);
    double gain = 0;
    double best = 0;
    for (int32_t depth = 1; depth <= *std::max_element(drafted.begin(), drafted.end()); ++depth) {
        for (size_t s = 0; s < all.size(); ++s) {
            if (depth <= drafted[s]) {
                trying[s] = depth;
                accepted[s] *= seen[s][size_t(depth - 1)];
                gain += accepted[s];
            }
        }
        const double surplus = gain - rate * (any.batch_ms(trying, others) - before);
        if (surplus > best) {
            best = surplus;
            kept = trying;
        }
    }
    return kept;
}

} // namespace mtp
