#pragma once
// Drafts from the text itself: the tokens that followed the longest suffix of the text where it
// occurred before. Knows neither ggml nor llama.cpp.
//
// How likely such a draft is to be accepted depends above all on the length of the match, so that is
// learned by length. It costs nothing to learn: every generated token shows whether a draft from the
// text would have been right, drafted or not.

#include "acceptance.h"
#include "suffix_index.h"

#include <array>
#include <cstdint>

namespace mtp {

class TextDrafts {
public:
    int64_t size() const { return index_.size(); }

    // Tokens of a prompt. What a user repeats says little about what the model will repeat, so
    // nothing is learned from them.
    void read(const int32_t * tokens, int64_t n);

    // A token that was generated.
    void generated(int32_t token);

    void truncate(int64_t size) { index_.truncate(size); }

    // Forgets the text and keeps what was learned.
    void clear() { index_ = SuffixIndex(); }

    // Up to n tokens that may follow, and the chance of each to be accepted once those before it are.
    int32_t propose(int32_t * out, int32_t n, Chances & chances) const;

private:
    static constexpr int kBuckets = 8;

    struct Bucket {
        double right = 0;
        double all = 0;
    };

    double chance(int64_t length) const;

    SuffixIndex index_;
    std::array<Bucket, kBuckets> buckets_;
};

} // namespace mtp
