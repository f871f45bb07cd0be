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

void TextDrafts::Record::add(int64_t length, bool right) {
    Bucket & bucket = buckets_[bucket_of(length)];
    bucket.right = bucket.right * (1 - 1 / kKept) + right;
    bucket.all = bucket.all * (1 - 1 / kKept) + 1;
}

double TextDrafts::Record::chance(int64_t length) const {
    const Bucket & bucket = buckets_[bucket_of(length)];
    const double prior = double(length) / (double(length) + kDoubt);
    return (bucket.right + kPrior * prior) / (bucket.all + kPrior);
}

void TextDrafts::read(const int32_t * tokens, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        index_.append(tokens[i]);
    }
}

Corpus::Match TextDrafts::match_corpus() const {
    return corpus_ != nullptr ? corpus_->match(index_.tokens(), index_.size()) : Corpus::Match();
}

void TextDrafts::generated(int32_t token) {
    const SuffixIndex::Match match = index_.match();
    if (match.length > 0) {
        of_index_.add(match.length, index_.token(match.next) == token);
    }
    const Corpus::Match elsewhere = match_corpus();
    if (elsewhere.length > 0) {
        of_corpus_.add(elsewhere.length, corpus_->token(elsewhere.next) == token);
    }
    index_.append(token);
}

void TextDrafts::set(const int32_t * tokens, int64_t n, bool are_generated) {
    const int64_t common = std::min(n, size());
    const int64_t same = std::mismatch(tokens, tokens + common, index_.tokens()).first - tokens;
    truncate(same);
    for (int64_t i = same; i < n; ++i) {
        are_generated ? generated(tokens[i]) : index_.append(tokens[i]);
    }
}

int32_t TextDrafts::plan(const Depth & depth, int32_t head_depth, int32_t room, int32_t * out, int32_t n) const {
    Chances chances = {};
    const int32_t proposed = propose(out, n, chances);
    double rate = 0;
    const int32_t best = depth.plan_free(chances, proposed, rate);
    return rate > depth.expected_rate(head_depth, room) ? best : 0;
}

int32_t TextDrafts::propose(int32_t * out, int32_t n, Chances & chances) const {
    const SuffixIndex::Match match = index_.match();
    const Corpus::Match elsewhere = match_corpus();
    const double chance = match.length > 0 ? of_index_.chance(match.length) : 0;
    const bool from_corpus = elsewhere.length > 0 && of_corpus_.chance(elsewhere.length) > chance;
    const int32_t proposed = from_corpus ? corpus_->propose(elsewhere, out, n) : index_.propose(match, out, n);
    const int64_t length = from_corpus ? elsewhere.length : match.length;
    for (int32_t i = 0; i < proposed; ++i) { // each accepted draft lengthens the match
        chances[size_t(i)] = (from_corpus ? of_corpus_ : of_index_).chance(length + i);
    }
    return proposed;
}

} // namespace mtp
