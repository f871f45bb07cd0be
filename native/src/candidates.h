#pragma once
// The largest logits of each row, found on the device that computed the logits: a row of 248,320 logits is
// a megabyte, of which a sampler chain with top-k or top-p needs a few entries.

#include "device_rows.h"

#include "ggml-alloc.h"
#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

namespace mtp {

// The k largest logits of a row, in no order.
struct RowCandidates {
    std::vector<int32_t> tokens;
    std::vector<float> logits;
    double total; // of exp(logit - largest) over the whole row
};

class Candidates {
public:
    // Finds the k largest of each row of logits, [tokens, rows]. Returns false if the backend cannot.
    bool find(const DeviceRows & logits, int64_t k);

    // Of a row of the last find().
    RowCandidates row(int64_t row) const;

private:
    void build(const DeviceRows & logits, int64_t k);

    int64_t k_ = 0;
    int64_t rows_ = 0;
    bool supported_ = false;
    ggml_backend_t backend_ = nullptr;
    ggml_context_ptr context_;
    ggml_gallocr_ptr allocator_;
    ggml_cgraph * graph_ = nullptr;
    ggml_tensor * logits_ = nullptr; // where the given ones are
    ggml_tensor * found_ = nullptr;  // [2 k + 1, rows]: tokens, logits, the largest one's probability
    std::vector<float> data_;        // found_ on the host
};

} // namespace mtp
