#pragma once
// The end of a draft vocabulary, which follows the texts of the sequences that draft: tokens that the list lacks
// replace its last ids as they appear, and then those that came first. In a list that was made for a file without one,
// the ids before these are replaced, too, by tokens that are like those of the texts (token_likeness.h): the first
// tokens by id are mostly those of English and of programs.
//
// All sequences share it, because their drafts share one product with the output's rows. What it holds depends on nothing
// but the texts, in the order in which they were read; of a single sequence on its text alone. So a text that is
// read again, or restored, has the same drafts.

#include "head/draft_vocabulary.h"
#include "token_likeness.h"

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace mtp {

class DraftRing {
public:
    // A token that appeared at this position of its sequence for the first time, or again after many others.
    struct Entry {
        int32_t position;
        int32_t token;
    };

    DraftRing(const DraftVocabulary & vocabulary, int32_t n_sequences);

    // The last ids of the draft vocabulary, [n_ring]. Until the next call.
    const std::vector<int32_t> & ids();

    // A sequence has these tokens at positions first, first + 1, ... .
    void follow(int32_t seq, int64_t first, const int32_t * tokens, int64_t n);

    // Removes what came with tokens at this position of a sequence and after it.
    void truncate(int32_t seq, int64_t position);

    // The entries of a sequence, in the order of their positions, and the other way. Tokens that the target does not
    // have are ignored.
    std::vector<Entry> save(int32_t seq) const;
    void restore(int32_t seq, const std::vector<Entry> & entries);

private:
    static constexpr int32_t NOWHERE = -1;
    static constexpr int32_t BEFORE = -2; // in the list, among the ids that are not replaced

    struct Addition {
        int32_t seq;
        Entry entry;
        int32_t earlier; // the index of the addition of this token and sequence before it; -1 if there is none
    };

    struct Sequence {
        int64_t end = 0;                             // the position after its last addition
        std::unordered_map<int32_t, int32_t> latest; // the index of a token's last addition
    };

    void add(int32_t seq, const Entry & entry);
    void remove_last();
    bool rank();
    void empty();
    void put(int32_t token);

    const size_t n_like_; // the first ids: those of the list that are likeliest, and others in the places of the rest
    std::vector<int32_t> list_;       // the ids that are replaced
    std::vector<int32_t> candidates_; // all ids that are not before them in the list; empty if n_like_ is 0
    std::optional<TokenLikeness> likeness_;

    std::vector<Addition> additions_;
    std::vector<Sequence> sequences_;

    // What is made of them when it is asked for.
    std::vector<int32_t> ranked_by_; // tokens of the first additions, of which ranked_ was made
    std::vector<int32_t> ranked_;    // the ids before the text's own tokens replace the last of them
    std::vector<int32_t> ids_;
    std::vector<bool> added_;     // of these, whether a text has brought it
    std::vector<int32_t> places_; // by id of the target, its index in ids_, or one of the two above
    size_t n_built_ = 0;          // how many additions are here
    size_t n_put_ = 0;            // how many of them replaced an id
};

} // namespace mtp
