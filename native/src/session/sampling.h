#pragma once
// Sampler chains of temperature, top-k, top-p and min-p. Their distribution is known, which rejection
// sampling of drafts requires.

#include "mtp.h"

#include <cstdint>
#include <random>
#include <vector>

namespace mtp {

// A distribution over some tokens: non-negative weights and their sum in this order, which is positive.
struct Distribution {
    std::vector<int32_t> tokens;
    std::vector<double> weights;
    double total = 0;

    double of(int32_t token) const; // the token's probability, 0 if it is not in the distribution
    void remove(int32_t token);     // removes a token, unless it is the only one
};

// The k largest logits of a row, in no order.
struct RowCandidates {
    std::vector<int32_t> tokens;
    std::vector<float> logits;
    double total = 0; // of exp(logit - largest) over the whole row
};

// The index of the first maximum of n >= 1 logits. Throws MTP_ERROR_BACKEND if there is a NaN or +Inf
// among them, or if all are equal.
int32_t argmax(const float * logits, int64_t n);

// Throws MTP_ERROR_BACKEND if a hidden state of n numbers has a NaN or an infinity. The logits do not show them all: a
// product with a quantized matrix rounds its input, which turns a NaN into some number.
void check_hidden(const float * hidden, int64_t n);

class Sampling {
public:
    explicit Sampling(const mtp_sampling & params);

    const mtp_sampling & params() const { return params_; }

    // Computes the distribution of llama.cpp's chain top-k, top-p, min-p, temperature over n logits.
    // likeliest: the result of argmax, which has also checked the logits.
    void distribution(const float * logits, int64_t n, int32_t likeliest, Distribution & out);

    // How many of a row's largest logits the next function needs; 0 if it needs all.
    int64_t n_candidates(int64_t n) const;

    // The same distribution from a row's largest logits; false if they were too few.
    bool distribution(const RowCandidates & row, int64_t n, Distribution & out);

    // The cutoff of the last distribution: the logit of its least likely token minus the largest, <= 0.
    float reach() const { return reach_; }

    // Uniform in [0, 1).
    double uniform() { return double(random_() >> 11) * 0x1p-53; }

    int32_t draw(const Distribution & p);

private:
    struct Candidate {
        float logit;
        int32_t token;
    };

    static bool above(const Candidate & a, const Candidate & b);

    void collect_largest(const float * logits, int64_t n, size_t k);
    double collect_part(const float * logits, int64_t n, double largest, double part);
    bool by_rank(int64_t n) const { return params_.top_k > 0 && params_.top_k < n; }
    bool by_sum() const { return params_.top_p < 1; }
    double lowest(double largest) const;
    bool filter(int64_t n, double largest, double total, Distribution & out);

    mtp_sampling params_;
    std::mt19937_64 random_;
    float reach_ = 0;
    // scratch
    std::vector<Candidate> candidates_;
    std::vector<double> exponentials_;
};

} // namespace mtp
