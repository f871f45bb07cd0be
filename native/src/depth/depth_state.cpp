// The state of a depth chooser as bytes: what it has learned from outcomes, and the costs that it has measured.
//
//   u32 version, u32 flags, f64 rate of a trial of free drafts, f64 debt of probes, f64 debt of trials
//   of each bucket of the head's probabilities: f64 right, f64 wrong
//   u32 segments; of each: f64 weight, f64 accepted drafts of each position, f64 drafted ones
//   f64 slowdown, f64 noise; costs of verifying, costs of rolling back
//   u32 numbers of sequences; of each: u32 sequences, costs of drafting
// Costs: u32 sizes measured once, u32 other sizes; of each: u32 size, f64 logarithm of milliseconds, f64 measurements

#include "depth/depth.h"

#include <algorithm>
#include <utility>

namespace mtp {

namespace {

constexpr uint32_t kVersion = 1;
constexpr uint32_t PROBE = 1, TRIAL = 2, WAS_RIGHT = 4, MEASURED = 8;

// Larger numbers do not come of use, and are saved as these: they only keep every calculation finite.
constexpr double kMostDrafts = 1e12;
constexpr double kMostLog = 700;
constexpr double kMostRate = 1e300;
constexpr double kMostDebts = 2 * MTP_MAX_DEPTH;
constexpr double kRounding = 1e-6;

constexpr int32_t kLargestBatch = MTP_MAX_SEQUENCES * (MTP_MAX_DEPTH + 1);

void put_up_to(std::vector<uint8_t> & out, double value, double most) {
    put(out, std::clamp(value, -most, most));
}

} // namespace

void Acceptance::save(std::vector<uint8_t> & out) const {
    put(out, uint32_t(segments_.size()));
    for (const Segment & segment : segments_) {
        put(out, segment.weight);
        for (const auto & counts : {segment.accepted, segment.drafted}) {
            for (const double n : counts) {
                put_up_to(out, n, kMostDrafts);
            }
        }
    }
}

void Acceptance::restore(BoundedReader & in) {
    std::vector<Segment> segments(in.integer<uint32_t>("segments", 1, int64_t(most_segments())));
    double total = 0;
    for (Segment & segment : segments) {
        total += segment.weight = in.number("weight of a segment", 0, 1 + kRounding);
        for (double & n : segment.accepted) {
            n = in.number("accepted drafts", 0, kMostDrafts);
        }
        for (size_t i = 0; i < segment.drafted.size(); ++i) {
            segment.drafted[i] = in.number("drafts", segment.accepted[i], kMostDrafts);
        }
    }
    if (!(total > 1 - kRounding && total < 1 + kRounding)) {
        in.refuse(format("weights of segments: expected a sum of 1, found %g", total));
    }
    segments_ = std::move(segments);
}

void Costs::save(std::vector<uint8_t> & out) const {
    put(out, uint32_t(once_.size()));
    put(out, uint32_t(cells_.size()));
    for (const Cells * cells : {&once_, &cells_}) {
        for (const auto & [size, cell] : *cells) {
            put(out, uint32_t(size));
            put_up_to(out, cell.log_ms, kMostLog);
            put(out, cell.uses);
        }
    }
}

void Costs::restore(BoundedReader & in, int32_t largest) {
    const uint32_t n_once = in.integer<uint32_t>("costs", 0, largest);
    const uint32_t n_cells = in.integer<uint32_t>("costs", 0, largest);
    once_.clear();
    cells_.clear();
    for (uint32_t i = 0; i < n_once + n_cells; ++i) {
        const int32_t size = int32_t(in.integer<uint32_t>("size of a batch", 1, largest));
        const double log_ms = in.number("cost", -kMostLog, kMostLog);
        (i < n_once ? once_ : cells_)[size] = {log_ms, in.number("measurements", 1, most_uses())};
    }
}

void SharedCosts::save(std::vector<uint8_t> & out) const {
    put_up_to(out, machine.slowdown, kMostLog);
    put(out, machine.noise);
    verify.save(out);
    rollback.save(out);
    put(out, uint32_t(draft.size()));
    for (const auto & [n, costs] : draft) {
        put(out, uint32_t(n));
        costs.save(out);
    }
}

void SharedCosts::restore(BoundedReader & in) {
    machine.slowdown = in.number("slowdown", -kMostLog, kMostLog);
    machine.noise = in.number("noise", 0, 1);
    verify.restore(in, kLargestBatch);
    rollback.restore(in, 1);
    draft.clear();
    for (uint32_t n = in.integer<uint32_t>("costs of drafting", 0, MTP_MAX_SEQUENCES); n > 0; --n) {
        const uint32_t sequences = in.integer<uint32_t>("sequences", 1, MTP_MAX_SEQUENCES);
        draft[int32_t(sequences)].restore(in, MTP_MAX_DEPTH);
    }
}

std::vector<uint8_t> Depth::save() const {
    std::vector<uint8_t> out;
    put(out, kVersion);
    put(out, (probe_ ? PROBE : 0) | (trial_ ? TRIAL : 0) | (was_right_ ? WAS_RIGHT : 0) | (costs_->measured ? MEASURED : 0));
    put_up_to(out, free_trial_rate_, kMostRate);
    put_up_to(out, probe_debt_, kMostDebts);
    put_up_to(out, trial_debt_, kMostDebts);
    for (const Bucket & bucket : buckets_) {
        put_up_to(out, bucket.right, kMostDrafts);
        put_up_to(out, bucket.wrong, kMostDrafts);
    }
    acceptance_.save(out);
    costs_->save(out);
    return out;
}

void Depth::restore(BoundedReader & in, bool with_costs) {
    Depth to = *this; // all of it is read before anything is changed
    SharedCosts costs;
    in.integer<uint32_t>("version", kVersion, kVersion);
    const uint32_t flags = in.integer<uint32_t>("flags", 0, PROBE | TRIAL | WAS_RIGHT | MEASURED);
    to.probe_ = flags & PROBE;
    to.trial_ = flags & TRIAL;
    to.was_right_ = flags & WAS_RIGHT;
    costs.measured = flags & MEASURED;
    to.free_trial_rate_ = in.number("rate of a trial", 0, kMostRate);
    to.probe_debt_ = in.number("debt of probes", 0, kMostDebts);
    to.trial_debt_ = in.number("debt of trials", 0, kMostDebts);
    for (Bucket & bucket : to.buckets_) {
        bucket.right = in.number("right drafts", 0, kMostDrafts);
        bucket.wrong = in.number("wrong drafts", 0, kMostDrafts);
    }
    to.acceptance_.restore(in);
    costs.restore(in);
    in.end();
    // The machine as it is now is known better than as it was then.
    if (with_costs && costs.measured && !costs_->measured) {
        *costs_ = std::move(costs);
    }
    *this = std::move(to);
}

void Depth::check_saved(BoundedReader & in) {
    Depth(MTP_MAX_DEPTH).restore(in, true);
}

} // namespace mtp
