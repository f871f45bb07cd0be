#include "text_drafts.h"

#include <algorithm>
#include <iterator>

namespace mtp {

namespace {

constexpr int64_t kBounds[] = {2, 3, 4, 6, 9, 13, 21}; // lengths at which a bucket begins

// The prior of a bucket, length / (length + kDoubt), weighs as much as kPrior tokens. Evidence decays
// over kKept tokens of the bucket, so that the end of a copied passage is noticed within about ten
// tokens. Chosen with benchmarks/lookup.py.
constexpr double kDoubt = 1.5;
constexpr double kPrior = 4;
constexpr double kKept = 48;

size_t bucket_of(int64_t length) {
    return size_t(std::upper_bound(std::begin(kBounds), std::end(kBounds), length) - std::begin(kBounds));
}

} // namespace

void TextDrafts::read(const int32_t * tokens, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        index_.append(tokens[i]);
    }
}

void TextDrafts::generated(int32_t token) {
    const SuffixIndex::Match match = index_.match();
    if (match.length > 0) {
        Bucket & bucket = buckets_[bucket_of(match.length)];
        bucket.right = bucket.right * (1 - 1 / kKept) + (index_.token(match.next) == token);
        bucket.all = bucket.all * (1 - 1 / kKept) + 1;
    }
    index_.append(token);
}

double TextDrafts::chance(int64_t length) const {
    const Bucket & bucket = buckets_[bucket_of(length)];
    const double prior = double(length) / (double(length) + kDoubt);
    return (bucket.right + kPrior * prior) / (bucket.all + kPrior);
}

int32_t TextDrafts::propose(int32_t * out, int32_t n, Chances & chances) const {
    const SuffixIndex::Match match = index_.match();
    const int32_t proposed = index_.propose(match, out, n);
    for (int32_t i = 0; i < proposed; ++i) {
        chances[size_t(i)] = chance(match.length + i); // each accepted draft lengthens the match
    }
    return proposed;
}

} // namespace mtp
