#pragma once
// Hidden states of the trunk that wait on the head's device for the tokens they are paired with.

#include "head/tensor_context.h"
#include "mtp.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstdint>

namespace mtp {

// Rows of a matrix in the memory of a device.
struct DeviceRows {
    ggml_backend_t backend = nullptr; // computes them
    ggml_tensor * tensor = nullptr;   // [width, rows] F32, contiguous; nullptr if there are none
    int64_t first = 0;                // the first of its rows that is meant
};

class HiddenRows {
public:
    // How many rows a sequence has: those of a cycle.
    static constexpr int64_t EACH = MTP_MAX_DEPTH + 1;

    HiddenRows(int64_t n_embd, int64_t n_seq_max, ggml_backend_t backend)
        : n_embd_(n_embd), n_seq_max_(n_seq_max), backend_(backend) {}

    // Copies n rows to the sequence's rows `at`, at + 1, ... on the device, after what their backend is still
    // to compute: they are there once that backend has been waited for. Returns false if they are not on this
    // device, or if there is no room.
    bool copy(int seq, int64_t at, const DeviceRows & from, int64_t n);

    // Stores rows of the host.
    void write(int seq, int64_t at, const float * from, int64_t n);

    void read(int seq, int64_t at, int64_t n, float * out);

    // The index of a sequence's row in tensor().
    static int64_t index(int seq, int64_t at) { return seq * EACH + at; }

    // [n_embd, EACH * n_seq_max] F32, zeros at first. It exists once copy() has returned true.
    ggml_tensor * tensor() const { return tensor_; }

private:
    void allocate();
    size_t row_bytes() const { return size_t(n_embd_) * sizeof(float); }

    int64_t n_embd_;
    int64_t n_seq_max_;
    ggml_backend_t backend_;
    TensorContext context_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor * tensor_ = nullptr;
};

} // namespace mtp
