#pragma once
// How likely drafts are to be accepted, from the outcomes so far. No clock, no randomness.
//
// Acceptance changes within a text, without notice. It is estimated by Bayesian change-point detection
// (Adams and MacKay, "Bayesian Online Changepoint Detection", 2007): there is a segment for each candidate
// change point, with the outcomes since then, weighted by how well it predicted them. Where nothing
// changes the longest segment wins and the estimate is steady; after a change a new one takes over as soon
// as it explains the outcomes better than bad luck does.

#include "mtp.h"

#include <array>
#include <cstdint>
#include <vector>

namespace mtp {

// Of each position: the chance that its draft is accepted once those before it are.
using Chances = std::array<double, MTP_MAX_DEPTH>;

struct Segment {
    double weight = 0; // the chance that nothing has changed since it began
    std::array<double, MTP_MAX_DEPTH> accepted = {}; // drafts by position
    std::array<double, MTP_MAX_DEPTH> drafted = {};

    // Of the first n positions, the rest is 0.
    Chances chances(int32_t n) const;
};

class Acceptance {
public:
    // n_positions: as deep as drafts ever are, at most MTP_MAX_DEPTH.
    explicit Acceptance(int32_t n_positions);

    // Drafts of one cycle: first `n_accepted` accepted ones, then one that was accepted to the degree
    // `last`, 0 .. 1; < 0: of which nothing is known.
    void add(int32_t n_accepted, double last);

    // So many tokens were generated, after each of which acceptance may have changed.
    void pass(int32_t n_tokens);

    // The mean of all segments by their weights.
    Chances chances() const;

private:
    int32_t n_positions_;
    std::vector<Segment> segments_; // the first begins now; the others by weight, heaviest first
};

} // namespace mtp
