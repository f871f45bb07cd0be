#pragma once
// The attention cache of the MTP layer: keys and values in F16, a pair of tensors for each sequence,
// which grow with it.

#include "head_config.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

namespace mtp {

// Graphs read a whole number of buckets, so that one graph serves many lengths; a mask hides the rest.
static const int64_t CACHE_BUCKET = 256;

class HeadCache {
public:
    HeadCache(const HeadConfig & config, int64_t n_ctx, int64_t n_seq_max, ggml_backend_t backend);

    // Makes room for the rows at positions below `end`, which is at most n_ctx + MTP_MAX_DEPTH, as
    // drafts stand past the last position. Rows stay; tensors do not. MTP_ERROR_MEMORY changes nothing.
    void reserve(int seq, int64_t end);

    // Rows that a sequence has room for: 0, CACHE_BUCKET, twice that, and so on, but no more than it can need.
    int64_t capacity(int seq) const { return sequences_[size_t(seq)].capacity; }

    // [kv_width, capacity], until the next reserve.
    const ggml_tensor * keys(int seq) const { return sequences_[size_t(seq)].keys; }
    const ggml_tensor * values(int seq) const { return sequences_[size_t(seq)].values; }

    // How many rows a graph reads that needs the first `end` of a sequence: a multiple of
    // CACHE_BUCKET, of which there are at most eight between one power of two and the next.
    int64_t readable(int seq, int64_t end) const;

    // Of all sequences once they are full.
    int64_t bytes() const { return int64_t(sequences_.size()) * int64_t(rows_bytes(most_rows_)); }

    // The rows at positions first(seq) .. next(seq) - 1 are there.
    int64_t first(int seq) const { return sequences_[size_t(seq)].first; }
    int64_t next(int seq) const { return sequences_[size_t(seq)].next; }
    bool empty(int seq) const { return first(seq) == next(seq); }

    // Says that rows first .. first + n - 1 have been written; `first` is next(seq), or any when empty.
    void extend(int seq, int64_t first, int64_t n);

    // Forgets the rows at positions >= position. The room for them stays.
    void truncate(int seq, int64_t position);

    // Bytes of n rows, keys and values.
    size_t rows_bytes(int64_t n) const { return 2 * size_t(n) * row_size_; }

    // Copies the rows at positions first .. first + n - 1: the keys of all, then the values of all.
    void read_rows(int seq, int64_t first, int64_t n, uint8_t * out) const;

    // Writes what read_rows read into an empty sequence, which then has these rows.
    void write_rows(int seq, int64_t first, int64_t n, const uint8_t * rows);

    // Makes `to` hold what `from` holds.
    void copy(int from, int to);

private:
    struct Sequence {
        int64_t first = 0;
        int64_t next = 0;
        int64_t capacity = 0;
        ggml_context_ptr context;
        ggml_backend_buffer_ptr buffer;
        ggml_tensor * keys = nullptr;
        ggml_tensor * values = nullptr;
    };

    ggml_backend_t backend_;
    int64_t kv_width_;
    size_t row_size_; // bytes of one row's keys
    int64_t most_rows_;
    std::vector<Sequence> sequences_;
};

} // namespace mtp
