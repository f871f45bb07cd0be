#pragma once
// Drafts from the text itself (prompt lookup): the tokens that followed the earlier occurrence of the
// text's longest repeated suffix, in the text or in an index of other texts. Independent of ggml and
// llama.cpp.
//
// The acceptance of such drafts depends mostly on the length of the match, and on how many earlier
// occurrences of it agree on what follows, so it is estimated by both. That is free: every generated token
// shows whether a draft from the text would have been right, even if none was made.
//
// An edited copy continues behind a replaced token, where the match is short or leads elsewhere. So the
// place is remembered at which a long match was wrong, and drafts may come from the token after it.

#include "depth/acceptance.h"
#include "depth/depth.h"
#include "lookup/corpus.h"
#include "lookup/suffix_index.h"

#include <array>
#include <cstdint>
#include <vector>

namespace mtp {

class TextDrafts {
public:
    int64_t size() const { return index_.size(); }

    // Also drafts from other texts; null: no longer. The index must outlive this object.
    void set_corpus(const Corpus * corpus) { corpus_ = corpus; }

    // Out of memory, `read` and `generated` leave a text that ends early.
    //
    // Adds tokens of a prompt. They do not change the estimates, because repetitions by a user say little
    // about those of the model.
    void read(const int32_t * tokens, int64_t n);

    // Adds a generated token and updates the estimates.
    void generated(int32_t token);

    // Makes the text equal to `tokens`, each >= 0, at most MTP_MAX_INDEXED; costs a comparison with what is
    // known, and the difference. are_generated: whether the tokens that are new were generated; else they were
    // read. The text is empty if that fails.
    void set(const int32_t * tokens, int64_t n, bool are_generated);

    void truncate(int64_t size);

    // Clears the text and keeps the estimates.
    void clear() { truncate(0); }

    // Serializes the tokens, the estimates and the remembered place. The index is not saved: building it
    // from the tokens is cheap, and bytes of an index could not be trusted.
    // with_tokens=false: all but the tokens, for a caller that can truncate to the same text.
    std::vector<uint8_t> save(bool with_tokens) const;

    // Throws MTP_ERROR_FORMAT unless `saved` can be the output of save(true) for a text of at most `most`
    // tokens, each below n_vocab.
    static void check_saved(const std::vector<uint8_t> & saved, int64_t most, int64_t n_vocab);

    // The same for the output of save(false), and a text of n tokens.
    static void check_learned(const std::vector<uint8_t> & saved, int64_t n);

    // The number of tokens in the output of save().
    static int64_t count_saved(const std::vector<uint8_t> & saved) {
        return (int64_t(saved.size()) - int64_t(sizeof(Saved))) / int64_t(sizeof(int32_t));
    }

    // Restores the output of save(true), which has been checked. Drafts continue as they did after save(); if
    // the text was truncated before that, a match may be at a later occurrence than it was, and another number
    // of occurrences may agree.
    void restore(const std::vector<uint8_t> & saved);

    // Restores the output of save(false). The text has been truncated to what it was.
    void restore_learned(const std::vector<uint8_t> & saved);

    // Proposes up to n tokens, with the acceptance probability of each if those before it are accepted.
    // They come from the source whose first token is more likely to be accepted.
    int32_t propose(int32_t * out, int32_t n, Chances & chances) const;

    // Proposes up to n tokens if they promise more tokens per millisecond than `head_depth` drafts of the
    // head (or MTP_DEPTH_AUTO), else none. room: the most tokens that the head may draft.
    int32_t plan(Depth & depth, int32_t head_depth, int32_t room, int32_t * out, int32_t n) const;

private:
    // How often drafts of one source were right, by length of the match.
    class Record {
    public:
        void add(int64_t length, bool right);
        double chance(int64_t length) const;
        bool is_valid() const; // whether `add` can have made it

    private:
        struct Bucket {
            double right = 0;
            double all = 0;
        };

        std::array<Bucket, 8> buckets_;
    };

    // Where a copied passage may continue after it was left.
    struct Place {
        int64_t next = -1; // position of the next token if it does, -1: no place is remembered
        int64_t right = 0; // tokens that the place predicted, in a row
        int64_t wrong = 0; // tokens before those that it did not predict, with the one that left the passage

        // The length of a match that is about as likely to be right.
        int64_t length() const { return right + (right > 0 || wrong == 1 ? 2 : 1); }
    };

    // By the agreement of a match: none or that of one, two and three, or more occurrences.
    using RecordsOfIndex = std::array<Record, 4>;

    static size_t agreement(const SuffixIndex::Match & match);

    // What save() writes before the tokens.
    struct Saved {
        Place place;
        RecordsOfIndex of_index;
        Record of_place;
        Record of_corpus;
    };

    Corpus::Match match_corpus() const;
    void follow(const SuffixIndex::Match & match, int32_t token);
    void leave(int64_t position);

    SuffixIndex index_;
    const Corpus * corpus_ = nullptr;
    Place place_;
    RecordsOfIndex of_index_;
    Record of_place_;
    Record of_corpus_;
};

} // namespace mtp
