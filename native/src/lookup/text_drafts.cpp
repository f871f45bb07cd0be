#include "lookup/text_drafts.h"

#include "error.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>

namespace mtp {

namespace {

constexpr int64_t kBounds[] = {2, 3, 4, 6, 9, 13, 21}; // lengths at which a bucket begins

// The prior of a bucket, length / (length + kDoubt), weighs as much as kPrior tokens. Evidence decays
// over kKept tokens of the bucket, so that the end of a copied passage is noticed within about ten
// tokens. Chosen with benchmarks/lookup.py, kDoubt with text_replay.py.
constexpr double kDoubt = 2.5;
constexpr double kPrior = 4;
constexpr double kKept = 48;

// A match of at least this length is a passage whose place is remembered when it is left, until so many
// tokens were not those that follow there. Any numbers near these do as well.
constexpr int64_t kPassage = 8;
constexpr int64_t kMostWrong = 8;

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

size_t TextDrafts::agreement(const SuffixIndex::Match & match) {
    return match.agreeing < 2 ? size_t(match.agreeing) : match.agreeing < SuffixIndex::kMostCounted ? 2 : 3;
}

bool TextDrafts::Record::is_valid() const {
    return std::all_of(buckets_.begin(), buckets_.end(), [](const Bucket & bucket) { // NaN fails every comparison
        return 0 <= bucket.right && bucket.right <= bucket.all && bucket.all <= kKept + 1;
    });
}

void TextDrafts::read(const int32_t * tokens, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        index_.append(tokens[i]);
    }
}

Corpus::Match TextDrafts::match_corpus() const {
    return corpus_ != nullptr ? corpus_->match(index_.tokens(), index_.size()) : Corpus::Match();
}

// Remembers the place behind the token at `position`, which another one has replaced.
void TextDrafts::leave(int64_t position) {
    place_ = Place();
    if (position + 1 < size()) {
        place_ = {position + 1, 0, 1};
    }
}

// Updates the place with the token that is generated next.
void TextDrafts::follow(const SuffixIndex::Match & match, int32_t token) {
    if (match.length >= kPassage && match.length > place_.right) {
        place_ = Place();
        if (index_.token(match.next) != token) {
            leave(match.next);
        }
        return;
    }
    if (place_.next < 0) {
        return;
    }
    const bool right = index_.token(place_.next) == token;
    of_place_.add(place_.length(), right);
    if (right) {
        ++place_.next; // at most the position of `token`
        ++place_.right;
    } else if (place_.right > 0) {
        leave(place_.next);
    } else if (++place_.wrong > kMostWrong) {
        place_ = Place();
    }
}

void TextDrafts::truncate(int64_t size) {
    index_.truncate(size);
    if (place_.next >= size) {
        place_ = Place();
    }
}

void TextDrafts::generated(int32_t token) {
    const SuffixIndex::Match match = index_.match();
    follow(match, token);
    if (match.length > 0) {
        of_index_[agreement(match)].add(match.length, index_.token(match.next) == token);
    }
    const Corpus::Match elsewhere = match_corpus();
    if (elsewhere.length > 0) {
        of_corpus_.add(elsewhere.length, corpus_->token(elsewhere.next) == token);
    }
    index_.append(token);
}

void TextDrafts::set(const int32_t * tokens, int64_t n, bool are_generated) {
    try {
        require_range(n, 0, MTP_MAX_INDEXED, "n");
        for (int64_t i = 0; i < n; ++i) {
            require_range(require(tokens, "tokens")[i], 0, INT32_MAX, "tokens");
        }
        const int64_t common = std::min(n, size());
        const int64_t same = std::mismatch(tokens, tokens + common, index_.tokens()).first - tokens;
        truncate(same);
        for (int64_t i = same; i < n; ++i) {
            are_generated ? generated(tokens[i]) : index_.append(tokens[i]);
        }
    } catch (...) {
        clear(); // a plan on another text would be wrong
        throw;
    }
}

std::vector<uint8_t> TextDrafts::save(bool with_tokens) const {
    static_assert(std::is_trivially_copyable<Saved>::value && sizeof(Saved) == 3 * 8 + 6 * 8 * 16,
                  "the layout of the bytes");
    const Saved saved = {place_, of_index_, of_place_, of_corpus_};
    std::vector<uint8_t> out(sizeof(saved) + (with_tokens ? size_t(size()) * sizeof(int32_t) : 0));
    std::memcpy(out.data(), &saved, sizeof(saved));
    if (out.size() > sizeof(saved)) {
        std::memcpy(out.data() + sizeof(saved), index_.tokens(), out.size() - sizeof(saved));
    }
    return out;
}

static void refuse(const std::string & text) {
    throw Error(MTP_ERROR_FORMAT, "checkpoint: the text: " + text);
}

void TextDrafts::check_saved(const std::vector<uint8_t> & bytes, int64_t most, int64_t n_vocab) {
    const int64_t n = count_saved(bytes);
    if (bytes.size() < sizeof(Saved) || bytes.size() % sizeof(int32_t) != 0 || n > most) {
        refuse(format("expected %zu bytes and those of 0 to %lld tokens, found %zu bytes", sizeof(Saved), (long long) most,
                      bytes.size()));
    }
    check_learned({bytes.begin(), bytes.begin() + sizeof(Saved)}, n);
    for (int64_t i = 0; i < n; ++i) {
        int32_t token;
        std::memcpy(&token, bytes.data() + sizeof(Saved) + size_t(i) * sizeof(token), sizeof(token));
        if (token < 0 || token >= n_vocab) {
            refuse(format("token %lld: expected 0 to %lld, found %d", (long long) i, (long long) n_vocab - 1, token));
        }
    }
}

void TextDrafts::check_learned(const std::vector<uint8_t> & bytes, int64_t n) {
    if (bytes.size() != sizeof(Saved)) {
        refuse(format("expected %zu bytes, found %zu", sizeof(Saved), bytes.size()));
    }
    Saved saved;
    std::memcpy(&saved, bytes.data(), sizeof(saved));
    const auto is_valid = [](const Record & record) { return record.is_valid(); };
    if (!std::all_of(saved.of_index.begin(), saved.of_index.end(), is_valid) || !saved.of_place.is_valid() ||
        !saved.of_corpus.is_valid()) {
        refuse("expected counts of right drafts up to those of all, found others");
    }
    const Place & place = saved.place;
    if (place.next < -1 || place.next >= n || place.right < 0 || place.right > n || place.wrong < 0 ||
        place.wrong > kMostWrong) {
        refuse(format("expected a place among its %lld tokens or none, found %lld (%lld right, %lld wrong)", (long long) n,
                      (long long) place.next, (long long) place.right, (long long) place.wrong));
    }
}

void TextDrafts::restore(const std::vector<uint8_t> & bytes) {
    clear();
    for (size_t at = sizeof(Saved); at < bytes.size(); at += sizeof(int32_t)) {
        int32_t token;
        std::memcpy(&token, bytes.data() + at, sizeof(token));
        index_.append(token);
    }
    restore_learned(bytes);
}

void TextDrafts::restore_learned(const std::vector<uint8_t> & bytes) {
    Saved saved;
    std::memcpy(&saved, bytes.data(), sizeof(saved));
    place_ = saved.place;
    of_index_ = saved.of_index;
    of_place_ = saved.of_place;
    of_corpus_ = saved.of_corpus;
}

int32_t TextDrafts::plan(Depth & depth, int32_t head_depth, int32_t room, int32_t * out, int32_t n) const {
    Chances chances = {};
    const int32_t proposed = propose(out, n, chances);
    return depth.plan_free(chances, proposed, head_depth, room);
}

int32_t TextDrafts::propose(int32_t * out, int32_t n, Chances & chances) const {
    const auto fill = [&](const Record & record, int64_t length, int32_t proposed) {
        for (int32_t i = 0; i < proposed; ++i) { // each accepted draft lengthens the match
            chances[size_t(i)] = record.chance(length + i);
        }
        return proposed;
    };
    const SuffixIndex::Match match = index_.match();
    const Corpus::Match elsewhere = match_corpus();
    const Record & of_index = of_index_[agreement(match)];
    const double of_match = match.length > 0 ? of_index.chance(match.length) : 0;
    const double of_place = place_.next >= 0 ? of_place_.chance(place_.length()) : 0;
    if (elsewhere.length > 0 && of_corpus_.chance(elsewhere.length) > std::max(of_match, of_place)) {
        return fill(of_corpus_, elsewhere.length, corpus_->propose(elsewhere, out, n));
    }
    if (of_place > of_match) {
        return fill(of_place_, place_.length(), index_.propose({place_.length(), place_.next, 0}, out, n));
    }
    return fill(of_index, match.length, index_.propose(match, out, n));
}

} // namespace mtp
