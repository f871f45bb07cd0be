#pragma once
// Rows of a matrix in the memory of a device.

#include "ggml-backend.h"

#include <cstdint>

namespace mtp {

struct DeviceRows {
    ggml_backend_t backend = nullptr; // computes them
    ggml_tensor * tensor = nullptr;   // [width, rows] F32, contiguous; nullptr if there are none
    int64_t first = 0;                // the first of its rows that is meant
};

} // namespace mtp
