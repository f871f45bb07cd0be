#include "sampling.h"

#include "error.h"

#include <algorithm>
#include <cmath>

namespace mtp {

// In lanes that compilers turn into vectors: std::max_element takes three times as long, which shows
// where a vocabulary of 248,320 is read for every token.
int32_t argmax(const float * logits, int64_t n) {
    constexpr int64_t n_lanes = 32;
    float lanes[n_lanes];
    std::fill(lanes, lanes + n_lanes, logits[0]);
    int64_t at = 0;
    for (; at + n_lanes <= n; at += n_lanes) {
        for (int64_t lane = 0; lane < n_lanes; ++lane) {
            lanes[lane] = logits[at + lane] > lanes[lane] ? logits[at + lane] : lanes[lane];
        }
    }
    float largest = *std::max_element(lanes, lanes + n_lanes);
    for (; at < n; ++at) {
        largest = std::max(largest, logits[at]);
    }
    const float * found = std::find(logits, logits + n, largest);
    return found == logits + n ? 0 : int32_t(found - logits);
}

double Distribution::of(int32_t token) const {
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i] == token) {
            return probabilities[i];
        }
    }
    return 0;
}

Sampling::Sampling(const mtp_sampling & params) : params_(params), random_(params.seed) {
    if (!(params.temperature > 0) || !std::isfinite(params.temperature)) {
        throw Error(MTP_ERROR_ARGUMENT, format("temperature: expected more than 0, found %g", double(params.temperature)));
    }
    if (!(params.top_p >= 0 && params.top_p <= 1)) {
        throw Error(MTP_ERROR_ARGUMENT, format("top_p: expected 0 to 1, found %g", double(params.top_p)));
    }
    if (!(params.min_p >= 0 && params.min_p <= 1)) {
        throw Error(MTP_ERROR_ARGUMENT, format("min_p: expected 0 to 1, found %g", double(params.min_p)));
    }
}

void Sampling::distribution(const float * logits, int64_t n, Distribution & out) {
    const auto above = [](const Candidate & a, const Candidate & b) {
        return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
    };
    const size_t k = params_.top_k > 0 ? size_t(std::min<int64_t>(params_.top_k, n)) : size_t(n);

    // The k largest, in order. A heap whose top is the smallest of them lets most logits go by.
    candidates_.clear();
    for (int64_t i = 0; i < n; ++i) {
        const Candidate candidate = {logits[i], int32_t(i)};
        if (candidates_.size() < k) {
            candidates_.push_back(candidate);
            if (candidates_.size() == k && k < size_t(n)) {
                std::make_heap(candidates_.begin(), candidates_.end(), above);
            }
        } else if (above(candidate, candidates_.front())) {
            std::pop_heap(candidates_.begin(), candidates_.end(), above);
            candidates_.back() = candidate;
            std::push_heap(candidates_.begin(), candidates_.end(), above);
        }
    }
    std::sort(candidates_.begin(), candidates_.end(), above);

    // top-p: the fewest that reach the sum, one at least. min-p: by the largest.
    const double largest = candidates_.front().logit;
    size_t kept = candidates_.size();
    if (params_.top_p < 1) {
        double total = 0;
        for (const Candidate & c : candidates_) {
            total += std::exp(c.logit - largest);
        }
        double sum = 0;
        for (kept = 0; kept < candidates_.size();) {
            sum += std::exp(candidates_[kept++].logit - largest) / total;
            if (sum >= params_.top_p) {
                break;
            }
        }
    }
    if (params_.min_p > 0) {
        const double lowest = largest + std::log(double(params_.min_p));
        while (kept > 1 && candidates_[kept - 1].logit < lowest) {
            --kept;
        }
    }

    reach_ = candidates_[kept - 1].logit - candidates_.front().logit;

    out.tokens.clear();
    out.probabilities.clear();
    double total = 0;
    for (size_t i = 0; i < kept; ++i) {
        const double weight = std::exp((candidates_[i].logit - largest) / params_.temperature);
        if (weight > 0) {
            out.tokens.push_back(candidates_[i].token);
            out.probabilities.push_back(weight);
            total += weight;
        }
    }
    for (double & p : out.probabilities) {
        p /= total;
    }
}

int32_t Sampling::draw(const Distribution & p) {
    const double u = uniform();
    double sum = 0;
    for (size_t i = 0; i + 1 < p.tokens.size(); ++i) {
        sum += p.probabilities[i];
        if (u < sum) {
            return p.tokens[i];
        }
    }
    return p.tokens.back();
}

} // namespace mtp
