// The C functions of the importance matrix: they check arguments that need no object, then call it.

#include "error.h"
#include "head/imatrix.h"

#include <iterator>

using mtp::guard;
using mtp::require;
using mtp::require_range;

mtp_status mtp_imatrix_new(bool with_output, mtp_imatrix ** out) {
    return guard([&] {
        *require(out, "out") = nullptr;
        *out = new mtp_imatrix(with_output);
    });
}

void mtp_imatrix_free(mtp_imatrix * imatrix) {
    delete imatrix;
}

bool mtp_imatrix_evaluate(ggml_tensor * node, bool ask, void * imatrix) {
    return static_cast<mtp_imatrix *>(imatrix)->evaluate(node, ask);
}

mtp_status mtp_imatrix_size(const mtp_imatrix * imatrix, int32_t * out) {
    return guard([&] {
        require(imatrix, "imatrix")->check();
        *require(out, "out") = int32_t(imatrix->entries().size());
    });
}

mtp_status mtp_imatrix_get(const mtp_imatrix * imatrix, int32_t i, mtp_imatrix_entry * out) {
    return guard([&] {
        require_range(i, 0, (long long) require(imatrix, "imatrix")->entries().size() - 1, "i");
        const auto & [name, entry] = *std::next(imatrix->entries().begin(), i);
        *require(out, "out") = {name.c_str(), entry.sums.data(), entry.sums.size(), entry.counts.data(), entry.counts.size()};
    });
}
