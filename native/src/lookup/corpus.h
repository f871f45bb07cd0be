#pragma once
// An index of texts that do not change: finds the longest suffix of a token sequence that occurs in them,
// and what follows there. One file, mapped read-only, shared by all sequences and processes.
//
// The file holds the tokens of all texts and their positions, sorted by the tokens before each position,
// read backwards (a suffix array of the reversed texts). All occurrences of a suffix are neighbours, so
// a search is one binary search. 8 bytes per token. Independent of ggml and llama.cpp.

#include "file_map.h"

#include "mtp.h"

#include <cstdint>
#include <string>

namespace mtp {

class Corpus {
public:
    // Tokens before a position that are compared. It bounds the time of sorting texts that repeat
    // themselves, and from 21 tokens on a longer match is not estimated to be more likely (text_drafts.cpp).
    static constexpr int32_t kMostContext = 32;

    struct Match {
        int64_t length = 0; // tokens of the longest suffix found, at most kMostContext; 0: none
        int64_t next = 0;   // position of the token that follows it
    };

    // Maps and verifies a file. n_vocab, tokenizer: what it must have been written for.
    Corpus(const std::string & path, int32_t n_vocab, uint64_t tokenizer);

    int64_t size() const { return n_tokens_; }
    int32_t n_vocab() const { return n_vocab_; }
    int32_t token(int64_t position) const { return tokens_[position]; }

    // The longest suffix of n tokens that occurs in a text and does not end it.
    Match match(const int32_t * tokens, int64_t n) const;

    // Copies up to n tokens that follow the match; fewer at the end of a text.
    int32_t propose(const Match & match, int32_t * out, int32_t n) const;

    // Writes a file. tokens: the texts, each followed by kEnd.
    static void write(const std::string & path, const int32_t * tokens, int64_t n, int32_t n_vocab, uint64_t tokenizer);

    static constexpr int32_t kEnd = -1;

    // The fingerprint of a vocabulary, from the texts of its tokens.
    static uint64_t tokenizer(const char * const * texts, int32_t n_vocab);

private:
    FileMap map_;
    int32_t n_vocab_;
    int64_t n_tokens_ = 0;
    const int32_t * tokens_ = nullptr;
    const int32_t * sorted_ = nullptr; // positions of tokens that follow another token of their text
    int64_t n_sorted_ = 0;
};

} // namespace mtp

// The opaque index of lookup files of mtp.h.
struct mtp_corpus : mtp::Corpus {
    using Corpus::Corpus;
};
