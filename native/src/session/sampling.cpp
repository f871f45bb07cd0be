#include "session/sampling.h"

#include "error.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace mtp {

[[noreturn]] static void refuse(const std::string & what) {
    throw Error(MTP_ERROR_BACKEND, what + "; the model's weights are damaged, or its device computes wrongly: mtp-gguf "
                                          "doctor MODEL --load names the layer");
}

[[noreturn]] static void refuse_logits(const float * logits, int64_t n) {
    const float * wrong = std::find_if(logits, logits + n, [](float logit) { return !(logit < INFINITY); });
    const std::string found = wrong == logits + n ? format("%g for all of them", double(logits[0]))
                                                  : format("%s for token %lld", std::isnan(*wrong) ? "nan" : "inf",
                                                           (long long) (wrong - logits));
    refuse("the trunk's logits: expected numbers to choose a token by, found " + found);
}

void check_hidden(const float * hidden, int64_t n) {
    const float * wrong = std::find_if(hidden, hidden + n, [](float x) { return !std::isfinite(x); });
    if (wrong != hidden + n) {
        refuse(format("the trunk's hidden state, from which the logits are computed: expected finite numbers, found %g "
                      "in dimension %lld", double(*wrong), (long long) (wrong - hidden)));
    }
}

// The loop uses lanes that compilers vectorize: std::max_element takes three times as long, which is
// noticeable with a vocabulary of 248,320 tokens.
int32_t argmax(const float * logits, int64_t n) {
    constexpr int64_t n_lanes = 32;
    float lanes[n_lanes];
    uint32_t wrong[n_lanes] = {}; // whether a lane saw +Inf, or a NaN, which no comparison finds
    std::fill(lanes, lanes + n_lanes, logits[0]);
    int64_t at = 0;
    for (; at + n_lanes <= n; at += n_lanes) {
        for (int64_t lane = 0; lane < n_lanes; ++lane) {
            lanes[lane] = logits[at + lane] > lanes[lane] ? logits[at + lane] : lanes[lane];
            wrong[lane] |= !(logits[at + lane] < INFINITY);
        }
    }
    float largest = *std::max_element(lanes, lanes + n_lanes);
    bool any_wrong = std::any_of(wrong, wrong + n_lanes, [](uint32_t w) { return w != 0; });
    for (; at < n; ++at) {
        largest = std::max(largest, logits[at]);
        any_wrong |= !(logits[at] < INFINITY);
    }
    const int64_t found = std::find(logits, logits + n, largest) - logits;
    // A product with a quantized matrix takes a vector of NaNs for zeros, so that all logits are 0.
    const bool all_equal = found == 0 && n > 1 && std::all_of(logits, logits + n, [&](float x) { return x == largest; });
    if (any_wrong || all_equal) {
        refuse_logits(logits, n);
    }
    return int32_t(found);
}

double Distribution::of(int32_t token) const {
    const auto found = std::find(tokens.begin(), tokens.end(), token);
    return found == tokens.end() ? 0 : weights[size_t(found - tokens.begin())] / total;
}

void Distribution::remove(int32_t token) {
    const auto found = std::find(tokens.begin(), tokens.end(), token);
    if (found == tokens.end() || tokens.size() == 1) {
        return;
    }
    const auto at = found - tokens.begin();
    tokens.erase(found);
    weights.erase(weights.begin() + at);
    total = std::accumulate(weights.begin(), weights.end(), 0.0);
}

bool Sampling::above(const Candidate & a, const Candidate & b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

Sampling::Sampling(const mtp_sampling & params) : params_(params), random_(params.seed) {
    if (!std::isfinite(params.temperature)) {
        throw Error(MTP_ERROR_ARGUMENT, format("temperature: expected a number, found %g", double(params.temperature)));
    }
    if (std::isnan(params.top_p) || std::isnan(params.min_p)) {
        throw Error(MTP_ERROR_ARGUMENT, format("%s: expected a number, found nan", std::isnan(params.top_p) ? "top_p" : "min_p"));
    }
    // llama.cpp's filters keep at least the most likely token, however small a part they are asked for.
    if (params.temperature <= 0 || params.top_p <= 0 || params.min_p > 1) {
        params_ = {/* temperature */ 1, /* top_k */ 1, /* top_p */ 1, /* min_p */ 0, params.seed};
    }
}

// Collects the k largest: most logits are skipped by comparing them to the smallest, at the top of a heap.
void Sampling::collect_largest(const float * logits, int64_t n, size_t k) {
    for (int64_t i = 0; i < n; ++i) {
        const Candidate candidate = {logits[i], int32_t(i)};
        if (candidates_.size() < k) {
            candidates_.push_back(candidate);
            if (candidates_.size() == k) {
                std::make_heap(candidates_.begin(), candidates_.end(), above);
            }
        } else if (above(candidate, candidates_.front())) {
            std::pop_heap(candidates_.begin(), candidates_.end(), above);
            candidates_.back() = candidate;
            std::push_heap(candidates_.begin(), candidates_.end(), above);
        }
    }
}

// Collects at least those that reach this part of the sum of all exp(logit - largest), and returns the sum. There are
// few of them in most texts, so a logarithmic number of passes is much faster than sorting all.
double Sampling::collect_part(const float * logits, int64_t n, double largest, double part) {
    exponentials_.resize(size_t(n));
    double total = 0;
    for (int64_t i = 0; i < n; ++i) {
        total += exponentials_[size_t(i)] = std::exp(logits[i] - largest);
    }
    // Sorting changes the order of a sum, and with it the last bits: a little more than the part is collected.
    const double enough = part * total * (1 + 1e-9);
    double sum = 0;
    for (double reach = 2; sum < enough && candidates_.size() < size_t(n); reach *= 2) {
        candidates_.clear();
        sum = 0;
        const double least = reach < 1000 ? largest - reach : -INFINITY;
        for (int64_t i = 0; i < n; ++i) {
            if (logits[i] >= least) {
                candidates_.push_back({logits[i], int32_t(i)});
                sum += exponentials_[size_t(i)];
            }
        }
    }
    return total;
}

// min-p: the lowest logit, relative to the largest probability
double Sampling::lowest(double largest) const {
    return params_.min_p > 0 ? largest + std::log(double(params_.min_p)) : -INFINITY;
}

void Sampling::distribution(const float * logits, int64_t n, int32_t likeliest, Distribution & out) {
    const double largest = logits[likeliest];
    candidates_.clear();
    double total = 0;
    if (by_rank(n)) {
        collect_largest(logits, n, size_t(params_.top_k));
    } else if (by_sum()) {
        total = collect_part(logits, n, largest, params_.top_p);
    } else {
        const double least = lowest(largest);
        for (int64_t i = 0; i < n; ++i) {
            if (logits[i] >= least) {
                candidates_.push_back({logits[i], int32_t(i)});
            }
        }
    }
    filter(n, largest, total, out);
}

int64_t Sampling::n_candidates(int64_t n) const {
    constexpr int64_t few = 256;   // what top-p and min-p keep is fewer in most texts
    constexpr int64_t most = 1024; // 8 KB a row; beyond that all logits are not much more
    if (by_rank(n)) {
        return params_.top_k <= most ? params_.top_k : 0;
    }
    return n > few && (by_sum() || params_.min_p > 0) ? few : 0;
}

bool Sampling::distribution(const RowCandidates & row, int64_t n, Distribution & out) {
    candidates_.clear();
    for (size_t i = 0; i < row.tokens.size(); ++i) {
        candidates_.push_back({row.logits[i], row.tokens[i]});
    }
    const double largest = *std::max_element(row.logits.begin(), row.logits.end());
    const double least = *std::min_element(row.logits.begin(), row.logits.end());
    if (!by_rank(n) && !by_sum() && least >= lowest(largest)) {
        return false;
    }
    return filter(n, largest, row.total, out);
}

// Computes a distribution from candidates_. total: the sum of exp(logit - largest) over all tokens, if
// there is a top-p without a top-k. Returns false if top-p needs more candidates.
bool Sampling::filter(int64_t n, double largest, double total, Distribution & out) {
    const bool by_rank = this->by_rank(n);
    const bool by_sum = this->by_sum();
    const double lowest = this->lowest(largest);
    bool enough = true;
    if (by_rank || by_sum) { // without top-k and top-p no order is needed
        std::sort(candidates_.begin(), candidates_.end(), above);
    }

    // top-p: as few tokens as reach the sum, at least one
    if (by_sum) {
        if (by_rank) {
            total = 0;
            for (const Candidate & c : candidates_) {
                total += std::exp(c.logit - largest);
            }
        }
        double sum = 0;
        size_t kept = 0;
        while (kept < candidates_.size()) {
            sum += std::exp(candidates_[kept++].logit - largest) / total;
            if (sum >= params_.top_p) {
                break;
            }
        }
        enough = by_rank || sum >= params_.top_p || int64_t(kept) == n;
        candidates_.resize(kept);
    }

    out.tokens.clear();
    out.weights.clear();
    out.total = 0;
    double least = largest;
    for (const Candidate & c : candidates_) {
        const double weight = c.logit < lowest ? 0 : std::exp((c.logit - largest) / params_.temperature);
        if (weight > 0) {
            out.tokens.push_back(c.token);
            out.weights.push_back(weight);
            out.total += weight;
            least = std::min<double>(least, c.logit);
        }
    }
    reach_ = float(least - largest);
    return enough;
}

// Sums in the same order as `total` was computed, so that a token with a positive weight is always found.
int32_t Sampling::draw(const Distribution & p) {
    const double threshold = uniform() * p.total;
    double sum = 0;
    size_t last = 0;
    for (size_t i = 0; i < p.tokens.size(); ++i) {
        if (p.weights[i] > 0) {
            last = i;
            sum += p.weights[i];
            if (threshold < sum) {
                break;
            }
        }
    }
    return p.tokens[last];
}

} // namespace mtp
