#include "head/hidden_rows.h"

#include "error.h"

namespace mtp {

// Only sessions and servers whose trunk is on the same device need this memory.
void HiddenRows::allocate() {
    if (tensor_ != nullptr) {
        return;
    }
    context_ = TensorContext(1);
    ggml_tensor * tensor = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, n_embd_, EACH * n_seq_max_);
    buffer_.reset(ggml_backend_alloc_ctx_tensors(context_.get(), backend_));
    if (!buffer_) {
        throw Error(MTP_ERROR_MEMORY, format("the hidden states of %lld sequences do not fit on %s",
                                             (long long) n_seq_max_, ggml_backend_name(backend_)));
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);
    tensor_ = tensor;
}

bool HiddenRows::copy(int seq, int64_t at, const DeviceRows & from, int64_t n) {
    if (from.tensor == nullptr || at + n > EACH || from.first + n > from.tensor->ne[1] ||
        ggml_backend_get_device(from.backend) != ggml_backend_get_device(backend_)) {
        return false;
    }
    allocate();
    const TensorContext views(2);
    const auto view = [&](ggml_tensor * tensor, int64_t first) {
        ggml_tensor * out = ggml_view_2d(views.get(), tensor, n_embd_, n, tensor->nb[1], size_t(first) * tensor->nb[1]);
        ggml_backend_view_init(out);
        return out;
    };
    ggml_backend_tensor_copy_async(from.backend, from.backend, view(from.tensor, from.first), view(tensor_, index(seq, at)));
    return true;
}

void HiddenRows::write(int seq, int64_t at, const float * from, int64_t n) {
    allocate();
    ggml_backend_tensor_set(tensor_, from, size_t(index(seq, at)) * row_bytes(), size_t(n) * row_bytes());
}

void HiddenRows::read(int seq, int64_t at, int64_t n, float * out) {
    ggml_backend_tensor_get(tensor_, out, size_t(index(seq, at)) * row_bytes(), size_t(n) * row_bytes());
}

} // namespace mtp
