#pragma once
// The end of a draft vocabulary, which follows the texts of the sequences that draft: tokens that the list lacks
// replace its last ids as they appear, and then those that came first.
//
// All sequences share it, because their drafts share one product with the output's rows. What it holds depends on nothing
// but the texts, in the order in which they were read; of a single sequence on its text alone. So a text that is
// read again, or restored, has the same drafts.

#include "head/draft_vocabulary.h"

#include <cstdint>
#include <vector>

namespace mtp {

class DraftRing {
public:
    // A token that got a place when it appeared at this position of its sequence.
    struct Entry {
        int32_t position;
        int32_t token;
    };

    DraftRing(const DraftVocabulary & vocabulary, int32_t n_sequences);

    // The last ids of the draft vocabulary, [n_ring].
    const std::vector<int32_t> & ids() const { return ids_; }

    // A sequence has these tokens at positions first, first + 1, ... .
    void follow(int32_t seq, int64_t first, const int32_t * tokens, int64_t n);

    // Removes what came with tokens at this position of a sequence and after it.
    void truncate(int32_t seq, int64_t position);

    // The entries of a sequence, in the order of their positions, and the other way. Tokens that the target does not
    // have are ignored.
    std::vector<Entry> save(int32_t seq) const;
    void restore(int32_t seq, const std::vector<Entry> & entries);

private:
    struct Addition {
        int32_t seq;
        Entry entry;
    };

    void empty();
    void add(const Addition & addition);

    static constexpr int32_t NOWHERE = -1;
    static constexpr int32_t BEFORE = -2; // in the list, among the ids that are not replaced

    std::vector<int32_t> list_; // the ids that are replaced
    std::vector<int32_t> ids_;
    std::vector<bool> added_;         // of these, whether a text has brought it
    std::vector<int32_t> places_;     // by id of the target, its index in ids_, or one of the two below
    std::vector<Addition> additions_; // number k got index size - 1 - k % size
    std::vector<int64_t> ends_;       // of each sequence, the position after its last addition
};

} // namespace mtp
