#pragma once
// Which parameters of speculative decoding are in the identity of a session of llama-server, as src/session_fields.h says it of
// the model and its context. Drafts decide nothing that is kept, so most of them are not; those that are belong to the drafter's
// state, which is in the file. tests/server/test_session_identity.py fails on a field that is not listed.
//
// KEPT(parameters, field)           in the identity
// LEFT_OUT(parameters, field, why)  not in it
#define MTP_SPECULATIVE_FIELDS(KEPT, LEFT_OUT)                                                                              \
    KEPT(speculative, types)                                                                                                \
    KEPT(speculative, synth_len)                                                                                            \
    KEPT(speculative, synth_rates)                                                                                          \
    LEFT_OUT(speculative, draft, "each of its fields is listed here")                                                       \
    LEFT_OUT(speculative, ngram_mod, "chooses drafts")                                                                      \
    LEFT_OUT(speculative, ngram_simple, "chooses drafts")                                                                   \
    LEFT_OUT(speculative, ngram_map_k, "chooses drafts")                                                                    \
    LEFT_OUT(speculative, ngram_map_k4v, "chooses drafts")                                                                  \
    LEFT_OUT(speculative, ngram_cache, "chooses drafts")                                                                    \
    LEFT_OUT(speculative, lookup_index, "chooses drafts")                                                                   \
    KEPT(draft, fused)                                                                                                      \
    KEPT(draft, n_vocab)                                                                                                    \
    LEFT_OUT(draft, head_type, "in the fingerprint of the head, whose state of another type is dropped")                     \
    KEPT(draft, cache_type_k)                                                                                               \
    KEPT(draft, cache_type_v)                                                                                               \
    LEFT_OUT(draft, n_max, "how many tokens are drafted; `cells` says where it changes the state")                          \
    LEFT_OUT(draft, n_min, "how many tokens are drafted")                                                                   \
    LEFT_OUT(draft, n_auto, "how many tokens are drafted")                                                                  \
    LEFT_OUT(draft, p_split, "how many tokens are drafted")                                                                 \
    LEFT_OUT(draft, p_min, "how many tokens are drafted")                                                                   \
    LEFT_OUT(draft, backend_sampling, "where drafts are chosen")                                                            \
    LEFT_OUT(draft, probabilistic, "another way to draw from the same distribution")                                        \
    LEFT_OUT(draft, mparams, "the files have a field of their own, `draft`")                                                \
    LEFT_OUT(draft, ctx_tgt, "an object of the program")                                                                    \
    LEFT_OUT(draft, ctx_dft, "an object of the program")                                                                    \
    LEFT_OUT(draft, head, "an object of the program")                                                                       \
    LEFT_OUT(draft, n_gpu_layers, "where drafts are computed")                                                              \
    LEFT_OUT(draft, devices, "where drafts are computed")                                                                   \
    LEFT_OUT(draft, tensor_buft_overrides, "where drafts are computed")                                                     \
    LEFT_OUT(draft, cpuparams, "where drafts are computed")                                                                 \
    LEFT_OUT(draft, cpuparams_batch, "where drafts are computed")
