#include "candidates.h"

#include "error.h"

#include <algorithm>

namespace mtp {

void Candidates::build(const DeviceRows & logits, int64_t k) {
    const int64_t n = logits.tensor->ne[0];
    constexpr size_t most = 32; // tensors
    k_ = k;
    rows_ = logits.tensor->ne[1];
    backend_ = logits.backend;
    allocator_.reset();
    context_.reset(ggml_init({most * ggml_tensor_overhead() + ggml_graph_overhead_custom(most, false), nullptr, true}));
    if (!context_) {
        throw std::bad_alloc();
    }
    ggml_context * ctx = context_.get();
    graph_ = ggml_new_graph_custom(ctx, most, false);
    logits_ = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, rows_);
    ggml_backend_tensor_alloc(logits.tensor->buffer, logits_, logits.tensor->data);
    // [1, m, rows]: of each row [n, rows] the elements with the indices [m, rows]
    const auto elements = [&](ggml_tensor * rows, ggml_tensor * indices) {
        ggml_tensor * out = ggml_get_rows(ctx, ggml_reshape_3d(ctx, rows, 1, n, rows_), indices);
        return ggml_reshape_2d(ctx, out, indices->ne[0], rows_);
    };
    ggml_tensor * tokens = ggml_top_k(ctx, logits_, int(k));
    ggml_tensor * largest = ggml_reshape_2d(ctx, ggml_argmax(ctx, logits_), 1, rows_);
    ggml_tensor * share = elements(ggml_soft_max(ctx, logits_), largest);
    found_ = ggml_concat(ctx, ggml_cast(ctx, tokens, GGML_TYPE_F32), elements(logits_, tokens), 0); // exact below 2^24
    found_ = ggml_concat(ctx, found_, share, 0);
    ggml_set_output(found_);
    ggml_build_forward_expand(graph_, found_);
    supported_ = true;
    for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
        supported_ = supported_ && ggml_backend_supports_op(backend_, ggml_graph_node(graph_, i));
    }
    if (supported_) {
        allocator_.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend_)));
        supported_ = allocator_ && ggml_gallocr_alloc_graph(allocator_.get(), graph_);
    }
}

bool Candidates::find(const DeviceRows & logits, int64_t k) {
    const ggml_tensor * t = logits.tensor;
    if (logits_ == nullptr || backend_ != logits.backend || logits_->buffer != t->buffer || logits_->data != t->data ||
        logits_->ne[0] != t->ne[0] || rows_ != t->ne[1] || k_ != k) {
        build(logits, k);
    }
    if (!supported_) {
        return false;
    }
    const ggml_status status = ggml_backend_graph_compute_async(backend_, graph_);
    data_.resize(size_t(ggml_nelements(found_)));
    ggml_backend_tensor_get_async(backend_, found_, data_.data(), 0, ggml_nbytes(found_));
    ggml_backend_synchronize(backend_);
    if (status != GGML_STATUS_SUCCESS) {
        throw Error(MTP_ERROR_BACKEND, format("%s: the largest logits could not be found: %s", ggml_backend_name(backend_),
                                              ggml_status_to_string(status)));
    }
    return true;
}

RowCandidates Candidates::row(int64_t row) const {
    const float * data = data_.data() + row * (2 * k_ + 1);
    RowCandidates out;
    out.tokens.assign(data, data + k_);
    out.logits.assign(data + k_, data + 2 * k_);
    out.total = 1.0 / double(data[2 * k_]);
    return out;
}

} // namespace mtp
