#pragma once
// An importance matrix: how much each column of a weight matrix is used. Quantizers weight the errors of a column
// with the mean of its squared inputs. The sums are those of llama.cpp's tools/imatrix.
//
// Knows ggml and nothing of llama.cpp: its inputs are computed nodes of any graph.

#include "mtp.h"

#include "ggml.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace mtp {

class Imatrix {
public:
    struct Entry {
        std::vector<float> sums;     // [matrices][columns], of squared inputs
        std::vector<int64_t> counts; // rows that were summed: of each expert, or one for all matrices
    };

    // with_output: also collect output.weight, which is no part of a block.
    explicit Imatrix(bool with_output) : with_output_(with_output) {}

    // Whether a node multiplies by a matrix of a block: its inputs are src[1] and, with experts, src[2].
    static bool multiplies_block(const ggml_tensor * node);

    // Whether a node multiplies by a matrix that is collected.
    bool wants(const ggml_tensor * node) const;

    // Adds the inputs of such a node, which has been computed. Throws MTP_ERROR_BACKEND if they are not finite.
    void add(const ggml_tensor * node);

    // Does both for ggml_backend_sched_eval_callback, in which nothing can be thrown. The first error is kept for
    // check().
    bool evaluate(ggml_tensor * node, bool ask) noexcept;

    // Throws the error of evaluate(), if there was any.
    void check() const;

    const std::map<std::string, Entry> & entries() const { return entries_; }

private:
    void add_experts(const ggml_tensor * node, const char * inputs, Entry & entry);
    void add_rows(const ggml_tensor * node, const char * inputs, Entry & entry);

    bool with_output_;
    std::map<std::string, Entry> entries_;
    std::string error_;
    std::vector<char> copy_; // of inputs that are on a device
};

} // namespace mtp

// The opaque importance matrix of mtp.h.
struct mtp_imatrix : mtp::Imatrix {
    using Imatrix::Imatrix;
};
