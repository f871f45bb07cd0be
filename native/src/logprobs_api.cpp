// The C function of log-probabilities: it checks its arguments.

#include "error.h"
#include "logprobs.h"

using mtp::guard;
using mtp::require;
using mtp::require_range;

mtp_status mtp_token_logprobs(const float * const * rows, const int32_t * tokens, int32_t n, int32_t n_vocab, int32_t n_top,
                              int32_t n_threads, double * out, int32_t * out_top_ids, double * out_top) {
    return guard([&] {
        require_range(n, 0, INT32_MAX, "n");
        require_range(n_vocab, 1, 1 << 30, "n_vocab");
        require_range(n_top, 0, n_vocab, "n_top");
        require_range(n_threads, 1, INT32_MAX, "n_threads");
        for (int32_t i = 0; i < n; ++i) {
            require(require(rows, "rows")[i], "rows");
            require_range(require(tokens, "tokens")[i], 0, n_vocab - 1, "tokens");
        }
        if (n > 0) {
            require(out, "out");
        }
        if (n > 0 && n_top > 0) {
            require(out_top_ids, "out_top_ids");
            require(out_top, "out_top");
        }
        mtp::token_logprobs(rows, tokens, n, n_vocab, n_top, n_threads, out, out_top_ids, out_top);
    });
}
