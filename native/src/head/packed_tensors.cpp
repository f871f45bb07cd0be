#include "head/packed_tensors.h"

#include "error.h"

namespace mtp {

void PackedTensors::add(ggml_tensor * tensor, size_t alignment) {
    size_ = (size_ + alignment - 1) / alignment * alignment;
    tensors_.emplace_back(tensor, size_);
    offsets_[tensor] = size_;
    size_ += ggml_nbytes(tensor);
}

void PackedTensors::allocate(ggml_backend_t backend) {
    if (tensors_.empty()) {
        return;
    }
    ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(backend);
    // Some devices pad the last tensor.
    buffer_.reset(ggml_backend_buft_alloc_buffer(type, size_ + ggml_backend_buft_get_alignment(type)));
    if (!buffer_) {
        throw Error(MTP_ERROR_MEMORY, format("%zu bytes for the inputs of the draft graph do not fit on %s", size_,
                                             ggml_backend_name(backend)));
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);
    uint8_t * base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer_.get()));
    for (const auto & [tensor, offset] : tensors_) {
        ggml_backend_tensor_alloc(buffer_.get(), tensor, base + offset);
    }
    if (ggml_backend_buffer_is_host(buffer_.get())) {
        host_ = base;
        return;
    }
    all_ = ggml_new_tensor_1d(context_, GGML_TYPE_I8, int64_t(size_));
    ggml_backend_tensor_alloc(buffer_.get(), all_, base);
    staging_.resize(size_);
    host_ = staging_.data();
}

void PackedTensors::upload(ggml_backend_t backend, Transfers & transfers) {
    if (all_ != nullptr) {
        ggml_backend_tensor_set_async(backend, all_, staging_.data(), 0, size_);
        transfers.bytes_up += int64_t(size_);
    }
}

void PackedTensors::download(ggml_backend_t backend, Transfers & transfers) {
    if (all_ != nullptr) {
        ggml_backend_tensor_get_async(backend, all_, staging_.data(), 0, size_);
        transfers.bytes_down += int64_t(size_);
    }
}

} // namespace mtp
