#include "head/head_cache.h"

#include "error.h"

#include <algorithm>
#include <utility>

namespace mtp {

HeadCache::HeadCache(const std::vector<HeadConfig> & layers, int64_t n_ctx, int64_t n_seq_max, ggml_backend_t backend)
    : backend_(backend), most_rows_((n_ctx + MTP_MAX_DEPTH + CACHE_BUCKET) / CACHE_BUCKET * CACHE_BUCKET),
      sequences_(size_t(n_seq_max)) {
    for (const HeadConfig & layer : layers) {
        kv_widths_.push_back(layer.kv_width());
    }
}

size_t HeadCache::rows_bytes(int64_t n) const {
    size_t out = 0;
    for (const int64_t width : kv_widths_) {
        out += 2 * size_t(n) * ggml_row_size(GGML_TYPE_F16, width);
    }
    return out;
}

void HeadCache::reserve(int seq, int64_t end) {
    Sequence & s = sequences_[size_t(seq)];
    if (end <= s.capacity) {
        return;
    }
    if (end > most_rows_) {
        throw Error(MTP_ERROR_FULL, format("the MTP layer's cache of sequence %d: expected at most %lld positions, found %lld",
                                           seq, (long long) most_rows_, (long long) end));
    }
    Sequence grown;
    grown.first = s.first;
    grown.next = s.next;
    grown.capacity = CACHE_BUCKET;
    while (grown.capacity < end) {
        grown.capacity *= 2;
    }
    grown.capacity = std::min(grown.capacity, most_rows_);
    // Two tensors for each layer, and their views.
    grown.context = TensorContext(4 * kv_widths_.size());
    for (const int64_t width : kv_widths_) {
        ggml_tensor * keys = ggml_new_tensor_2d(grown.context.get(), GGML_TYPE_F16, width, grown.capacity);
        grown.layers.push_back({keys, ggml_dup_tensor(grown.context.get(), keys)});
    }
    grown.buffer.reset(ggml_backend_alloc_ctx_tensors(grown.context.get(), backend_));
    if (!grown.buffer) {
        throw Error(MTP_ERROR_MEMORY,
                    format("the MTP layer's cache of %lld positions for sequence %d does not fit on %s",
                           (long long) grown.capacity, seq, ggml_backend_name(backend_)));
    }
    // Masked rows are multiplied by zero, which does not remove NaNs, so all memory must be initialized.
    ggml_backend_buffer_clear(grown.buffer.get(), 0);
    for (size_t i = 0; i < grown.layers.size() && s.first < s.next; ++i) {
        const Layer & old = s.layers[i];
        for (auto [from, to] : {std::pair(old.keys, grown.layers[i].keys), std::pair(old.values, grown.layers[i].values)}) {
            ggml_tensor * beginning = ggml_view_2d(grown.context.get(), to, to->ne[0], s.capacity, to->nb[1], 0);
            ggml_backend_view_init(beginning);
            ggml_backend_tensor_copy(from, beginning);
        }
    }
    s = std::move(grown);
}

int64_t HeadCache::readable(int seq, int64_t end, bool shared) const {
    int64_t step = shared ? SHARED_ROWS : CACHE_BUCKET;
    while ((shared ? 1 : 16) * step < end) {
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
    if (n == 0) {
        return; // there may be no tensors yet
    }
    for (const Layer & layer : sequences_[size_t(seq)].layers) {
        for (const ggml_tensor * tensor : {layer.keys, layer.values}) {
            const size_t size = size_t(n) * tensor->nb[1];
            ggml_backend_tensor_get(tensor, out, size_t(first) * tensor->nb[1], size);
            out += size;
        }
    }
}

void HeadCache::write_rows(int seq, int64_t first, int64_t n, const uint8_t * rows) {
    if (n == 0) {
        return;
    }
    reserve(seq, first + n);
    for (const Layer & layer : sequences_[size_t(seq)].layers) {
        for (ggml_tensor * tensor : {layer.keys, layer.values}) {
            const size_t size = size_t(n) * tensor->nb[1];
            ggml_backend_tensor_set(tensor, rows, size_t(first) * tensor->nb[1], size);
            rows += size;
        }
    }
    extend(seq, first, n);
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
