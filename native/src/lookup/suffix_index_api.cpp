// The C functions of the suffix index: they check arguments that need no object, then call it.

#include "error.h"
#include "lookup/suffix_index.h"

using mtp::guard;
using mtp::require;
using mtp::require_range;

struct mtp_suffix_index : mtp::SuffixIndex {};

mtp_status mtp_suffix_index_new(mtp_suffix_index ** out) {
    return guard([&] {
        *require(out, "out") = nullptr;
        *out = new mtp_suffix_index();
    });
}

void mtp_suffix_index_free(mtp_suffix_index * index) {
    delete index;
}

mtp_status mtp_suffix_index_append(mtp_suffix_index * index, const int32_t * tokens, int64_t n) {
    return guard([&] {
        require(index, "index");
        require_range(n, 0, MTP_MAX_INDEXED - index->size(), "n");
        if (n > 0) {
            require(tokens, "tokens");
        }
        const int64_t before = index->size();
        try {
            for (int64_t i = 0; i < n; ++i) {
                require_range(tokens[i], 0, INT32_MAX, "tokens");
                index->append(tokens[i]);
            }
        } catch (...) {
            index->truncate(before);
            throw;
        }
    });
}

mtp_status mtp_suffix_index_truncate(mtp_suffix_index * index, int64_t size) {
    return guard([&] {
        require_range(size, 0, require(index, "index")->size(), "size");
        index->truncate(size);
    });
}

mtp_status mtp_suffix_index_match(const mtp_suffix_index * index, int64_t * out_length, int64_t * out_next,
                                  int32_t * out_agreeing) {
    return guard([&] {
        require(out_length, "out_length");
        require(out_next, "out_next");
        require(out_agreeing, "out_agreeing");
        const mtp::SuffixIndex::Match match = require(index, "index")->match();
        *out_length = match.length;
        *out_next = match.next;
        *out_agreeing = match.agreeing;
    });
}

mtp_status mtp_suffix_index_propose(const mtp_suffix_index * index, int32_t * out, int32_t n, int32_t * out_n) {
    return guard([&] {
        require(index, "index");
        require_range(n, 0, INT32_MAX, "n");
        if (n > 0) {
            require(out, "out");
        }
        *require(out_n, "out_n") = index->propose(index->match(), out, n);
    });
}

mtp_status mtp_suffix_index_bytes(const mtp_suffix_index * index, size_t * out) {
    return guard([&] { *require(out, "out") = require(index, "index")->bytes(); });
}
