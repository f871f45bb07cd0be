#include "token_likeness.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace mtp {

static const size_t N = TokenSymbols::N;

// How many tokens the chances by id treat as equally likely, about.
static const double FIRST_IDS = 1000;

// How many symbols of the text weigh as much as those of all tokens do, and how many pairs as much as single symbols.
static const double SINGLES = 50;
static const double PAIRS = 20;

TokenLikeness::TokenLikeness(const TokenSymbols & symbols)
    : symbols_(symbols), log_chances_(symbols.starts.size() - 1), pairs_(N * N, 0), singles_(N, 0) {
    for (size_t id = 0; id < log_chances_.size(); ++id) {
        const double chance = 1 / (double(id) + FIRST_IDS);
        log_chances_[id] = float(std::log(chance));
        symbols.each(id, [&](uint8_t before, uint8_t symbol) {
            pairs_[before * N + symbol] += chance;
            singles_[symbol] += chance;
        });
    }
    const auto normalize = [](double * first) {
        const double sum = std::accumulate(first, first + N, 0.0);
        std::for_each(first, first + N, [&](double & x) { x = sum > 0 ? x / sum : 0; });
    };
    normalize(singles_.data());
    for (size_t before = 0; before < N; ++before) {
        normalize(pairs_.data() + before * N);
    }
}

std::vector<int32_t> TokenLikeness::best(const std::vector<int32_t> & text, const std::vector<int32_t> & candidates,
                                         size_t n) const {
    std::vector<double> pairs(N * N, 0);
    std::vector<double> singles(N, 0);
    for (const int32_t token : text) {
        symbols_.each(size_t(token), [&](uint8_t before, uint8_t symbol) {
            pairs[before * N + symbol] += 1;
            singles[symbol] += 1;
        });
    }
    const double total = std::accumulate(singles.begin(), singles.end(), 0.0);
    std::vector<double> single_ratios(N, 1);
    for (size_t symbol = 0; symbol < N; ++symbol) {
        if (singles_[symbol] > 0) {
            single_ratios[symbol] = (singles[symbol] / singles_[symbol] + SINGLES) / (total + SINGLES);
        }
    }
    std::vector<float> log_ratios(N * N, 0);
    for (size_t before = 0; before < N; ++before) {
        const double * chances = pairs_.data() + before * N;
        const double * counts = pairs.data() + before * N;
        const double count = std::accumulate(counts, counts + N, 0.0);
        const double expected = std::inner_product(chances, chances + N, single_ratios.begin(), 0.0);
        for (size_t symbol = 0; symbol < N; ++symbol) {
            if (chances[symbol] > 0) {
                const double ratio = counts[symbol] / chances[symbol] + PAIRS * single_ratios[symbol] / expected;
                log_ratios[before * N + symbol] = float(std::log(ratio / (count + PAIRS)));
            }
        }
    }

    std::vector<std::pair<float, int32_t>> scored;
    scored.reserve(candidates.size());
    for (const int32_t id : candidates) {
        float score = log_chances_[size_t(id)];
        symbols_.each(size_t(id), [&](uint8_t before, uint8_t symbol) { score += log_ratios[before * N + symbol]; });
        scored.emplace_back(-score, id);
    }
    n = std::min(n, scored.size());
    std::nth_element(scored.begin(), scored.begin() + std::ptrdiff_t(n), scored.end());
    std::sort(scored.begin(), scored.begin() + std::ptrdiff_t(n));
    std::vector<int32_t> out(n);
    std::transform(scored.begin(), scored.begin() + std::ptrdiff_t(n), out.begin(), [](const auto & one) { return one.second; });
    return out;
}

} // namespace mtp
