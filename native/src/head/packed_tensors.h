#pragma once
// Small tensors of a graph, one after another in one buffer, so that a single transfer moves all of them.

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace mtp {

// What the host exchanges with the head's device. On a GPU each of these takes microseconds in which nothing is
// computed.
struct Transfers {
    int64_t graphs = 0;     // graph launches
    int64_t syncs = 0;      // waits for the device
    int64_t bytes_up = 0;   // from host to device
    int64_t bytes_down = 0; // from device to host
};

class PackedTensors {
public:
    // context: of the graph, with room for one more tensor.
    explicit PackedTensors(ggml_context * context) : context_(context) {}

    // Adds a tensor that has no memory yet.
    void add(ggml_tensor * tensor, size_t alignment);

    // Allocates all tensors. Throws MTP_ERROR_MEMORY if the device has no room for them.
    void allocate(ggml_backend_t backend);

    // A tensor's bytes in host memory: what the next upload sends and where the last download arrived. If
    // the device computes in host memory, this is the tensor itself, and both do nothing.
    template <typename T> T * host(const ggml_tensor * tensor) const {
        return reinterpret_cast<T *>(host_ + offsets_.at(tensor));
    }

    // Both are asynchronous.
    void upload(ggml_backend_t backend, Transfers & transfers);
    void download(ggml_backend_t backend, Transfers & transfers);

    // Whether the device computes in host memory.
    bool in_host_memory() const { return all_ == nullptr; }

    size_t bytes() const { return size_ + staging_.size(); }

private:
    ggml_context * context_;
    size_t size_ = 0;
    std::vector<std::pair<ggml_tensor *, size_t>> tensors_; // with their offsets
    std::unordered_map<const ggml_tensor *, size_t> offsets_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor * all_ = nullptr; // the whole buffer, if it is not host memory
    std::vector<uint8_t> staging_;
    uint8_t * host_ = nullptr;
};

} // namespace mtp
