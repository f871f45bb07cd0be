#pragma once
// Temperature, top-k, top-p, min-p: the chains whose distribution is known, so that drafts can be
// accepted by it instead of by equality.

#include "mtp.h"

#include <cstdint>
#include <random>
#include <vector>

namespace mtp {

// A distribution over few tokens: probabilities above 0, their sum 1.
struct Distribution {
    std::vector<int32_t> tokens;
    std::vector<double> probabilities;

    double of(int32_t token) const; // 0 for a token that it does not have
};

// The first of the largest of n >= 1 logits; 0 where NaNs leave none.
int32_t argmax(const float * logits, int64_t n);

class Sampling {
public:
    explicit Sampling(const mtp_sampling & params);

    const mtp_sampling & params() const { return params_; }

    // The distribution of llama.cpp's chain top-k, top-p, min-p, temperature over n logits.
    void distribution(const float * logits, int64_t n, Distribution & out);

    // How far the last distribution reached: logit of its least likely token minus the largest, <= 0.
    float reach() const { return reach_; }

    // Uniform in [0, 1).
    double uniform() { return double(random_() >> 11) * 0x1p-53; }

    int32_t draw(const Distribution & p);

private:
    struct Candidate {
        float logit;
        int32_t token;
    };

    mtp_sampling params_;
    std::mt19937_64 random_;
    float reach_ = 0;
    std::vector<Candidate> candidates_; // scratch
};

} // namespace mtp
