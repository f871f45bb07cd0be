#include "depth/costs.h"

#include "error.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace mtp {

namespace {

// The source of each number is docs/decisions.md, "The constants of depth auto".

constexpr double kUses = 48;         // a cost is averaged over this many measurements
constexpr double kFewUses = 8;       // up to this many, a far shorter time replaces the mean
constexpr double kOutlier = 0.4;     // deviations are clipped to this, in logarithms
constexpr double kFollow = 1.0 / 16; // share of each deviation that is attributed to the machine's speed
constexpr double kNoiseUses = 32;    // measurements over which the noise is averaged
constexpr double kDoubt = 1.5;       // standard errors that an optimistic cost is below the mean,
constexpr double kMostDoubt = 0.1;   // but at most this much, in logarithms
constexpr double kWarmUp = 0.06;     // by how much a first measurement may be too high, in logarithms
constexpr double kTrialDoubt = 0.35; // by how much a size that is to be tried may be cheaper, in logarithms
constexpr double kNextStep = 0.6;    // step beyond the measured sizes, relative to the last known step

} // namespace

void Costs::add(int32_t size, double ms, Machine & machine, bool known) {
    const double seen = std::log(ms) - machine.slowdown;
    if (cells_.count(size) == 0) {
        const auto first = once_.find(size);
        if (known || first == once_.end()) {
            (known ? cells_ : once_)[size] = {seen, 1};
            return;
        }
        cells_.insert(once_.extract(first));
    }
    Cell & cell = cells_[size];
    const double allowed = cell.uses == 1 ? 0 : kOutlier;
    if (cell.uses < kFewUses && seen < cell.log_ms - allowed) {
        // The first measurement often includes warm-up, and others a moment when the machine was busy:
        // a time can be far too long by accident, but not far too short.
        cell.log_ms = seen;
    } else {
        const double off = std::clamp(seen - cell.log_ms, -kOutlier, kOutlier);
        cell.log_ms += off / (cell.uses + 1);
        machine.slowdown += kFollow * off;
        machine.noise += (std::abs(off) - machine.noise) / kNoiseUses;
    }
    cell.uses = std::min(cell.uses + 1, kUses);
}

double Costs::most_uses() {
    return kUses;
}

double Costs::uses(int32_t size) const {
    const auto cell = cells_.find(size);
    return cell == cells_.end() ? double(once_.count(size)) : cell->second.uses;
}

// Interpolates linearly between two measured sizes. Below the smallest one the cost is proportional to
// the size, which is a lower bound; above the largest one it grows with a damped last step.
double Costs::line_ms(const Cells & cells, int32_t size, double otherwise) {
    const auto cost = [](const auto & cell) { return std::exp(cell->second.log_ms); };
    const auto above = cells.lower_bound(size);
    if (above != cells.end() && above->first == size) {
        return cost(above);
    }
    if (cells.empty()) {
        return otherwise;
    }
    if (above == cells.begin()) {
        return cost(above) * size / above->first;
    }
    const auto below = std::prev(above);
    if (above != cells.end()) {
        return cost(below) + (cost(above) - cost(below)) * (size - below->first) / (above->first - below->first);
    }
    double step = kLeastStep * cost(below) / below->first;
    if (below != cells.begin()) {
        const auto before = std::prev(below);
        step = std::max(step, (cost(below) - cost(before)) / (below->first - before->first) * kNextStep);
    }
    return cost(below) + step * (size - below->first);
}

double Costs::ms(int32_t size, double otherwise) const {
    double least = line_ms(cells_.empty() ? once_ : cells_, size, otherwise);
    for (const Cells * cells : {&cells_, &once_}) {
        for (auto larger = cells->lower_bound(size); larger != cells->end(); ++larger) {
            least = std::min(least, std::exp(larger->second.log_ms));
        }
    }
    return least;
}

double Costs::least_ms(int32_t size, double otherwise, const Machine & machine, int32_t near, int32_t trials) const {
    double uses = 0;
    for (const Cells * cells : {&cells_, &once_}) {
        const auto end = cells->lower_bound(size + near);
        for (auto cell = cells->upper_bound(size - near); cell != end; ++cell) {
            uses += cell->second.uses;
        }
    }
    if (uses < trials) {
        return ms(size, otherwise) * std::exp(-kTrialDoubt);
    }
    if (uses == 0) {
        return ms(size, otherwise);
    }
    const double error = std::min(kMostDoubt, kDoubt * machine.noise / std::sqrt(uses));
    return ms(size, otherwise) * std::exp(-error - (uses == 1 ? kWarmUp : 0));
}

double SharedCosts::draft_ms(int32_t n, int32_t depth, double otherwise) const {
    auto nearest = draft.upper_bound(n);
    if (nearest != draft.begin()) {
        --nearest;
    }
    return nearest == draft.end() ? otherwise : nearest->second.least_ms(depth, otherwise, machine);
}

double SharedCosts::rollback_ms() const {
    return rollback.uses(1) > 1 ? rollback.ms(1, 0) : 0;
}

void SharedCosts::add(Costs & costs, int32_t size, double ms, bool known) {
    if (!std::isfinite(ms) || ms < 0) {
        throw Error(MTP_ERROR_ARGUMENT, format("cost: expected 0 or more milliseconds, found %g", ms));
    }
    if (ms > 0) {
        measured = measured || !known;
        costs.add(size, ms, machine, known);
    }
}

} // namespace mtp
