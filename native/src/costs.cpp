#include "costs.h"

#include "error.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace mtp {

namespace {

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
// of the last one that is known (and at least kLeastStep).
constexpr double kUnknown = 0.85;
constexpr double kNextStep = 0.6;

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

void Prices::add(Costs & costs, int32_t size, double ms) {
    if (!std::isfinite(ms) || ms < 0) {
        throw Error(MTP_ERROR_ARGUMENT, format("a cost: expected milliseconds from 0, found %g", ms));
    }
    if (ms > 0) {
        costs.add(size, ms, batches, pace);
    }
}

void Prices::add_batch(int32_t n_tokens, double ms) {
    ++batches;
    add(verify, n_tokens, ms);
}

} // namespace mtp
