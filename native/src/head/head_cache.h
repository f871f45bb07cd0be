#pragma once
// The attention cache of the MTP layers: keys and values in F16, in a pair of tensors per layer and sequence
// that grow with it. All layers have the same rows.

#include "head/head_config.h"
#include "head/tensor_context.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

namespace mtp {

// Graphs read a whole number of buckets, so that one graph works for many lengths; a mask hides the rest.
static const int64_t CACHE_BUCKET = 256;

// The fewest rows that a graph of several sequences reads of each, if the cache can have as many.
static const int64_t SHARED_ROWS = 1024;

class HeadCache {
public:
    HeadCache(const std::vector<HeadConfig> & layers, int64_t n_ctx, int64_t n_seq_max, ggml_backend_t backend);

    // Makes room for the rows at positions below `end`. Drafts and padding are stored after the last position of
    // the context. Rows are preserved, but the tensors may be replaced. MTP_ERROR_MEMORY, and MTP_ERROR_FULL
    // beyond most_rows(), change nothing.
    void reserve(int seq, int64_t end);

    // The allocated rows of a sequence: 0, CACHE_BUCKET, twice that, and so on, up to the maximum.
    int64_t capacity(int seq) const { return sequences_[size_t(seq)].capacity; }
    int64_t most_rows() const { return most_rows_; }

    // [kv_width, capacity], until the next reserve.
    const ggml_tensor * keys(int seq, size_t layer) const { return sequences_[size_t(seq)].layers[layer].keys; }
    const ggml_tensor * values(int seq, size_t layer) const { return sequences_[size_t(seq)].layers[layer].values; }

    // How many rows a graph reads if it needs the first `end` rows of a sequence: a multiple of
    // CACHE_BUCKET, with at most eight steps between one power of two and the next; shared: a power of two
    // from SHARED_ROWS on, for graphs of several sequences, each of which would change them.
    int64_t readable(int seq, int64_t end, bool shared = false) const;

    // The memory of all sequences when full.
    int64_t bytes() const { return int64_t(sequences_.size()) * int64_t(rows_bytes(most_rows_)); }

    // The cache holds the rows at positions first(seq) .. next(seq) - 1.
    int64_t first(int seq) const { return sequences_[size_t(seq)].first; }
    int64_t next(int seq) const { return sequences_[size_t(seq)].next; }
    bool empty(int seq) const { return first(seq) == next(seq); }

    // Records that rows first .. first + n - 1 were written. `first` must be next(seq), unless empty.
    void extend(int seq, int64_t first, int64_t n);

    // Removes the rows at positions >= position without freeing their memory.
    void truncate(int seq, int64_t position);

    // Bytes of n rows, keys and values of all layers.
    size_t rows_bytes(int64_t n) const;

    // Copies the rows at positions first .. first + n - 1, one layer after another: the keys of all, then the
    // values of all.
    void read_rows(int seq, int64_t first, int64_t n, uint8_t * out) const;

    // Writes the output of read_rows into an empty sequence, which then has these rows.
    void write_rows(int seq, int64_t first, int64_t n, const uint8_t * rows);

    // Replaces sequence `to` with a copy of `from`.
    void copy(int from, int to);

private:
    struct Layer {
        ggml_tensor * keys;
        ggml_tensor * values;
    };

    struct Sequence {
        int64_t first = 0;
        int64_t next = 0;
        int64_t capacity = 0;
        TensorContext context;
        ggml_backend_buffer_ptr buffer;
        std::vector<Layer> layers;
    };

    ggml_backend_t backend_;
    std::vector<int64_t> kv_widths_; // of each layer
    int64_t most_rows_;
    std::vector<Sequence> sequences_;
};

} // namespace mtp
