#pragma once
// How often drafts are right, from what came of those before. No clock, no chance.
//
// A text turns now and then: what was easy to foretell becomes hard, or the reverse, and only the
// outcomes say so. So there is a stretch for each moment at which it may have turned last, with what
// was seen since then. Stretches that foretell outcomes well gain weight over those that do not, by
// Bayes, and with every token some weight goes to one that begins now (Adams and MacKay, "Bayesian
// Online Changepoint Detection", 2007). Where nothing turns, the longest one wins and is steady; a
// turn is believed, whichever way it goes, as soon as it is likelier than the luck it would take
// without one.

#include "mtp.h"

#include <array>
#include <cstdint>
#include <vector>

namespace mtp {

// Of each position to be right once those before it are.
using Chances = std::array<double, MTP_MAX_DEPTH>;

// What was seen at one position: drafts that were right, and all. An average that forgets.
struct Outcomes {
    double right = 0;
    double all = 0;
};

struct Stretch {
    double weight = 0; // the chance that the text is since then as it is now
    double expected = 0; // of first drafts, before any was seen
    std::array<Outcomes, MTP_MAX_DEPTH> positions;

    // The first n, the rest is 0. shift: how many standard deviations above what is likeliest.
    Chances chances(int32_t n, double shift = 0) const;
};

class Acceptance {
public:
    // n_positions: as deep as drafts ever are, at most MTP_MAX_DEPTH.
    explicit Acceptance(int32_t n_positions);

    // Drafts of one cycle: first `n_right` right ones, then one that was right to the degree `last`,
    // 0 .. 1; < 0: of which nothing is known.
    void add(int32_t n_right, double last);

    // So many tokens were written: the text may have turned.
    void pass(int32_t n_tokens);

    // Of all stretches by their weights.
    Chances chances() const;

    // Weights sum up to 1.
    const std::vector<Stretch> & stretches() const { return stretches_; }

private:
    int32_t n_positions_;
    Outcomes first_; // first drafts of all stretches
    std::vector<Stretch> stretches_; // the first is the one that begins now
};

} // namespace mtp
