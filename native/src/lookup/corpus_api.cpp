// The C functions of the index of lookup files: they check arguments that need no object, then call it.

#include "error.h"
#include "lookup/corpus.h"

#include <algorithm>

using mtp::guard;
using mtp::require;
using mtp::require_range;

// Checks the tokens that a search compares. Negative ones would match the ends of texts.
static void require_tokens(const int32_t * tokens, int64_t n) {
    require_range(n, 0, INT64_MAX, "n");
    for (int64_t i = std::max<int64_t>(0, n - mtp::Corpus::kMostContext); i < n; ++i) {
        require_range(require(tokens, "tokens")[i], 0, INT32_MAX, "tokens");
    }
}

mtp_status mtp_corpus_write(const char * path, const int32_t * tokens, int64_t n, int32_t n_vocab, uint64_t tokenizer) {
    return guard([&] {
        require(path, "path");
        require(tokens, "tokens");
        require_range(n, 1, MTP_MAX_INDEXED, "n");
        require_range(n_vocab, 1, INT32_MAX, "n_vocab");
        for (int64_t i = 0; i < n; ++i) {
            require_range(tokens[i], mtp::Corpus::kEnd, n_vocab - 1, "tokens");
        }
        require_range(tokens[n - 1], mtp::Corpus::kEnd, mtp::Corpus::kEnd, "the last token");
        mtp::Corpus::write(path, tokens, n, n_vocab, tokenizer);
    });
}

mtp_status mtp_corpus_open(const char * path, int32_t n_vocab, uint64_t tokenizer, mtp_corpus ** out) {
    return guard([&] {
        *require(out, "out") = nullptr;
        *out = new mtp_corpus(require(path, "path"), n_vocab, tokenizer);
    });
}

mtp_status mtp_tokenizer_fingerprint(const char * const * texts, int32_t n_vocab, uint64_t * out) {
    return guard([&] {
        require_range(n_vocab, 1, INT32_MAX, "n_vocab");
        for (int32_t i = 0; i < n_vocab; ++i) {
            require(require(texts, "texts")[i], "texts");
        }
        *require(out, "out") = mtp::Corpus::tokenizer(texts, n_vocab);
    });
}

void mtp_corpus_free(mtp_corpus * corpus) {
    delete corpus;
}

mtp_status mtp_corpus_match(const mtp_corpus * corpus, const int32_t * tokens, int64_t n, int64_t * out_length,
                            int64_t * out_next) {
    return guard([&] {
        require(corpus, "corpus");
        require_tokens(tokens, n);
        const mtp::Corpus::Match match = corpus->match(tokens, n);
        *require(out_length, "out_length") = match.length;
        *require(out_next, "out_next") = match.next;
    });
}

mtp_status mtp_corpus_propose(const mtp_corpus * corpus, const int32_t * tokens, int64_t n, int32_t * out, int32_t n_out,
                              int32_t * out_n) {
    return guard([&] {
        require(corpus, "corpus");
        require_tokens(tokens, n);
        require_range(n_out, 0, INT32_MAX, "n_out");
        if (n_out > 0) {
            require(out, "out");
        }
        *require(out_n, "out_n") = corpus->propose(corpus->match(tokens, n), out, n_out);
    });
}
