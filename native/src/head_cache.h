#pragma once
// The attention cache of the MTP layer: keys and values in F16, one run of rows per sequence.

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

    ggml_tensor * keys() const { return keys_; }     // [kv_width, rows_per_seq * n_seq_max]
    ggml_tensor * values() const { return values_; } // the same
    int64_t rows_per_seq() const { return rows_; }   // >= n_ctx + MTP_MAX_DEPTH: drafts stand past the end
    int64_t bytes() const { return int64_t(ggml_backend_buffer_get_size(buffer_.get())); }

    // The rows at positions first(seq) .. next(seq) - 1 are there.
    int64_t first(int seq) const { return spans_[size_t(seq)].first; }
    int64_t next(int seq) const { return spans_[size_t(seq)].next; }
    bool empty(int seq) const { return first(seq) == next(seq); }

    // Says that rows first .. first + n - 1 have been written; `first` is next(seq), or any when empty.
    void extend(int seq, int64_t first, int64_t n);

    // Forgets the rows at positions >= position.
    void truncate(int seq, int64_t position);

    // Bytes of n rows, keys and values.
    size_t rows_bytes(int64_t n) const { return 2 * size_t(n) * keys_->nb[1]; }

    // Copies the rows at positions first .. first + n - 1: the keys of all, then the values of all.
    void read_rows(int seq, int64_t first, int64_t n, uint8_t * out) const;

    // Writes what read_rows read into an empty sequence, which then has these rows.
    void write_rows(int seq, int64_t first, int64_t n, const uint8_t * rows);

    // Makes `to` hold what `from` holds.
    void copy(int from, int to);

private:
    size_t offset(int seq, int64_t position) const {
        return size_t(seq * rows_ + position) * keys_->nb[1];
    }

    struct Span {
        int64_t first = 0;
        int64_t next = 0;
    };

    int64_t rows_;
    std::vector<Span> spans_;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor * keys_;
    ggml_tensor * values_;
};

} // namespace mtp
