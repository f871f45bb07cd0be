#pragma once
// Temperature, top-k, top-p, min-p: the chains whose distribution is known, so that drafts can be
// accepted by it instead of by equality.

#include "mtp.h"

#include <cstdint>
#include <random>
#include <vector>

namespace mtp {

// A distribution over some tokens: weights that are not negative, and their sum in this order, above 0.
struct Distribution {
    std::vector<int32_t> tokens;
    std::vector<double> weights;
    double total = 0;

    double of(int32_t token) const; // its probability, 0 for a token that it does not have
    void remove(int32_t token);     // without this token, unless it is the only one
};

// The first of the largest of n >= 1 logits. MTP_ERROR_BACKEND where they are none to choose from: a
// NaN or +Inf among them, or -Inf alone.
int32_t argmax(const float * logits, int64_t n);

class Sampling {
public:
    explicit Sampling(const mtp_sampling & params);

    const mtp_sampling & params() const { return params_; }

    // The distribution of llama.cpp's chain top-k, top-p, min-p, temperature over n logits; likeliest:
    // what argmax gave for them, and so has checked.
    void distribution(const float * logits, int64_t n, int32_t likeliest, Distribution & out);

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
