#include "head_cache.h"

#include "error.h"

namespace mtp {

HeadCache::HeadCache(const HeadConfig & config, int64_t n_ctx, int64_t n_seq_max, ggml_backend_t backend)
    : rows_((n_ctx + MTP_MAX_DEPTH + CACHE_BUCKET - 1) / CACHE_BUCKET * CACHE_BUCKET), spans_(size_t(n_seq_max)),
      context_(ggml_init({2 * ggml_tensor_overhead(), nullptr, true})) {
    keys_ = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F16, config.kv_width(), rows_ * n_seq_max);
    values_ = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F16, config.kv_width(), rows_ * n_seq_max);
    ggml_set_name(keys_, "mtp keys");
    ggml_set_name(values_, "mtp values");
    buffer_.reset(ggml_backend_alloc_ctx_tensors(context_.get(), backend));
    if (!buffer_) {
        throw Error(MTP_ERROR_MEMORY,
                    format("the MTP layer's cache of %lld positions for %lld sequences does not fit on %s",
                           (long long) n_ctx, (long long) n_seq_max, ggml_backend_name(backend)));
    }
    // Masked rows are multiplied by zero, which keeps a NaN a NaN: nothing may be left uninitialized.
    ggml_backend_buffer_clear(buffer_.get(), 0);
}

void HeadCache::extend(int seq, int64_t first, int64_t n) {
    Span & span = spans_[size_t(seq)];
    if (span.first == span.next) {
        span.first = first;
    }
    span.next = first + n;
}

void HeadCache::truncate(int seq, int64_t position) {
    Span & span = spans_[size_t(seq)];
    if (position < span.next) {
        span.next = position;
    }
    if (span.next <= span.first) {
        span = Span();
    }
}

void HeadCache::read_rows(int seq, int64_t first, int64_t n, uint8_t * out) const {
    const size_t size = rows_bytes(n) / 2;
    if (size > 0) {
        ggml_backend_tensor_get(keys_, out, offset(seq, first), size);
        ggml_backend_tensor_get(values_, out + size, offset(seq, first), size);
    }
}

void HeadCache::write_rows(int seq, int64_t first, int64_t n, const uint8_t * rows) {
    const size_t size = rows_bytes(n) / 2;
    if (size > 0) {
        ggml_backend_tensor_set(keys_, rows, offset(seq, first), size);
        ggml_backend_tensor_set(values_, rows + size, offset(seq, first), size);
        extend(seq, first, n);
    }
}

void HeadCache::copy(int from, int to) {
    const Span span = spans_[size_t(from)];
    std::vector<uint8_t> rows(rows_bytes(span.next - span.first));
    read_rows(from, span.first, span.next - span.first, rows.data());
    truncate(to, 0);
    write_rows(to, span.first, span.next - span.first, rows.data());
}

} // namespace mtp
