#include "head_cache.h"

#include "error.h"

#include <algorithm>
#include <utility>

namespace mtp {

HeadCache::HeadCache(const HeadConfig & config, int64_t n_ctx, int64_t n_seq_max, ggml_backend_t backend)
    : backend_(backend), kv_width_(config.kv_width()), row_size_(ggml_row_size(GGML_TYPE_F16, config.kv_width())),
      most_rows_((n_ctx + MTP_MAX_DEPTH + CACHE_BUCKET - 1) / CACHE_BUCKET * CACHE_BUCKET),
      sequences_(size_t(n_seq_max)) {}

void HeadCache::reserve(int seq, int64_t end) {
    Sequence & s = sequences_[size_t(seq)];
    if (end <= s.capacity) {
        return;
    }
    Sequence grown;
    grown.first = s.first;
    grown.next = s.next;
    grown.capacity = CACHE_BUCKET;
    while (grown.capacity < end) {
        grown.capacity *= 2;
    }
    grown.capacity = std::min(grown.capacity, most_rows_);
    grown.context.reset(ggml_init({4 * ggml_tensor_overhead(), nullptr, true})); // two tensors and their views
    if (!grown.context) {
        throw std::bad_alloc();
    }
    grown.keys = ggml_new_tensor_2d(grown.context.get(), GGML_TYPE_F16, kv_width_, grown.capacity);
    grown.values = ggml_new_tensor_2d(grown.context.get(), GGML_TYPE_F16, kv_width_, grown.capacity);
    grown.buffer.reset(ggml_backend_alloc_ctx_tensors(grown.context.get(), backend_));
    if (!grown.buffer) {
        throw Error(MTP_ERROR_MEMORY,
                    format("the MTP layer's cache of %lld positions for sequence %d does not fit on %s",
                           (long long) grown.capacity, seq, ggml_backend_name(backend_)));
    }
    // Masked rows are multiplied by zero, which does not remove NaNs, so all memory must be initialized.
    ggml_backend_buffer_clear(grown.buffer.get(), 0);
    if (s.first < s.next) {
        for (auto [from, to] : {std::pair(s.keys, grown.keys), std::pair(s.values, grown.values)}) {
            ggml_tensor * beginning = ggml_view_2d(grown.context.get(), to, kv_width_, s.capacity, to->nb[1], 0);
            ggml_backend_view_init(beginning);
            ggml_backend_tensor_copy(from, beginning);
        }
    }
    s = std::move(grown);
}

int64_t HeadCache::readable(int seq, int64_t end) const {
    int64_t step = CACHE_BUCKET;
    while (16 * step < end) {
        step *= 2;
    }
    return std::min((end + step - 1) / step * step, capacity(seq));
}

void HeadCache::extend(int seq, int64_t first, int64_t n) {
    Sequence & s = sequences_[size_t(seq)];
    if (s.first == s.next) {
        s.first = first;
    }
    s.next = first + n;
}

void HeadCache::truncate(int seq, int64_t position) {
    Sequence & s = sequences_[size_t(seq)];
    if (position < s.next) {
        s.next = position;
    }
    if (s.next <= s.first) {
        s.first = s.next = 0;
    }
}

void HeadCache::read_rows(int seq, int64_t first, int64_t n, uint8_t * out) const {
    const size_t size = rows_bytes(n) / 2;
    if (size > 0) {
        ggml_backend_tensor_get(keys(seq), out, size_t(first) * row_size_, size);
        ggml_backend_tensor_get(values(seq), out + size, size_t(first) * row_size_, size);
    }
}

void HeadCache::write_rows(int seq, int64_t first, int64_t n, const uint8_t * rows) {
    const size_t size = rows_bytes(n) / 2;
    if (size > 0) {
        reserve(seq, first + n);
        const Sequence & s = sequences_[size_t(seq)];
        ggml_backend_tensor_set(s.keys, rows, size_t(first) * row_size_, size);
        ggml_backend_tensor_set(s.values, rows + size, size_t(first) * row_size_, size);
        extend(seq, first, n);
    }
}

void HeadCache::copy(int from, int to) {
    const int64_t first = this->first(from);
    const int64_t n = next(from) - first;
    std::vector<uint8_t> rows(rows_bytes(n));
    read_rows(from, first, n, rows.data());
    truncate(to, 0);
    write_rows(to, first, n, rows.data());
}

} // namespace mtp
