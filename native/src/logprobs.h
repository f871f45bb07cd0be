// Log-probabilities of tokens, from rows of logits: for llama-server (server/prompt_logprobs.h) and for Python.
#pragma once

#include <cstdint>

namespace mtp {

// The log-probability of tokens[i], one of n_vocab, by the logits in rows[i], for n rows, and the n_top likeliest tokens of each
// row with theirs, [n, n_top], the likeliest first and of equal ones the lowest id. With a large vocabulary a row takes about as
// long as it takes to read it from memory; n_threads share the rows.
void token_logprobs(const float * const * rows, const int32_t * tokens, int n, int n_vocab, int n_top, int n_threads,
                    double * out, int32_t * out_top_ids, double * out_top);

} // namespace mtp
