#pragma once
// The end of a draft vocabulary, which follows the texts of the sequences that draft: tokens that the list lacks
// replace its last ids as they appear, and then those that came first. In a list that was made for a file without one,
// other tokens of their scripts come with them, in the order of their ids, in an area of their own: the first tokens
// by id are mostly those of English and of programs.
//
// All sequences share it, because their drafts share one product with the output's rows. What it holds depends on nothing
// but the texts, in the order in which they were read; of a single sequence on its text alone. So a text that is
// read again, or restored, has the same drafts.

#include "head/draft_vocabulary.h"

#include <cstdint>
#include <map>
#include <vector>

namespace mtp {

class DraftRing {
public:
    // A token that changed what is here when it appeared at this position of its sequence.
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
    static constexpr int32_t NOWHERE = -1;
    static constexpr int32_t BEFORE = -2; // in the list, among the ids that are not replaced

    struct Addition {
        int32_t seq;
        Entry entry;
    };

    // Indices of ids_: number k of those that came got first + size - 1 - k % size.
    struct Area {
        size_t first, size;
        size_t count = 0;
    };

    // The tokens of a script, by id. The first `next` have been considered, and `brought` of them came.
    struct Script {
        std::vector<int32_t> tokens;
        size_t next = 0, brought = 0;
    };

    void empty();
    void add(const Addition & addition);
    bool has(int32_t token) const;
    void put(int32_t token, Area & area);
    bool is_complete(const Script & script) const;
    void bring(Script & script);

    std::vector<int32_t> list_; // the ids that are replaced
    std::vector<int32_t> ids_;
    std::vector<bool> added_;     // of these, whether a text has brought it
    std::vector<int32_t> places_; // by id of the target, its index in ids_, or one of the two above
    std::vector<uint8_t> scripts_of_; // by id of the target, as DraftVocabulary::scripts
    std::map<uint8_t, Script> scripts_;
    Area script_area_;
    Area text_area_;
    std::vector<Addition> additions_;
    std::vector<int64_t> ends_; // of each sequence, the position after its last addition
};

} // namespace mtp
