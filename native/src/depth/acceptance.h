#pragma once
// Estimates how likely drafts are to be accepted, from the outcomes so far. No clock, no randomness.
//
// Acceptance changes within a text, without notice. It is estimated by Bayesian change-point detection
// (Adams and MacKay, "Bayesian Online Changepoint Detection", 2007): each candidate change point has a
// segment with the outcomes since then, weighted by how well it predicted them. Without a change the
// longest segment dominates and the estimate is steady. After a change a new segment dominates as soon as
// it explains the outcomes better than chance under the old one.

#include "bytes.h"

#include "mtp.h"

#include <array>
#include <cstdint>
#include <vector>

namespace mtp {

// For each position: the probability that its draft is accepted if those before it are.
using Chances = std::array<double, MTP_MAX_DEPTH>;

struct Segment {
    double weight = 0; // the probability that acceptance has not changed since the segment began
    std::array<double, MTP_MAX_DEPTH> accepted = {}; // drafts by position
    std::array<double, MTP_MAX_DEPTH> drafted = {};

    // The estimates of the first n positions; the others are 0. first: that of the first one before any outcome.
    Chances chances(int32_t n, double first) const;
};

class Acceptance {
public:
    // n_positions: the maximum depth, at most MTP_MAX_DEPTH.
    explicit Acceptance(int32_t n_positions);

    // Sets the acceptance of first drafts that is expected before any outcome, 0 .. 1.
    void expect(double chance);

    // Adds the drafts of one cycle: `n_accepted` accepted ones, then one that was accepted with
    // probability `last` (0 .. 1). last < 0: nothing is known about that one.
    void add(int32_t n_accepted, double last);

    // Accounts for n_tokens generated tokens, after each of which acceptance may have changed.
    void pass(int32_t n_tokens);

    // The weighted mean of all segments.
    Chances chances() const;

    // Writes the segments, and the other way; see depth_state.cpp.
    void save(std::vector<uint8_t> & out) const;
    void restore(BoundedReader & in);

private:
    static size_t most_segments();

    int32_t n_positions_;
    double first_chance_;
    std::vector<Segment> segments_; // first the one that begins now, then the others by descending weight
};

} // namespace mtp
