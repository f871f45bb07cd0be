#pragma once
// Which of llama.cpp's parameters are in the identity of a session, for Python (mtp_session_fields) and for llama-server. A
// field is in it unless it is proved harmless. Python takes one that is not listed, too, and tests/native/test_identity.py
// fails.
//
// KEPT(parameters, field)           in the identity
// PLACED(parameters, field)         in it if there is a GPU: where something is computed decides how it is rounded
// LEFT_OUT(parameters, field, why)  not in it
#define MTP_SESSION_FIELDS(KEPT, PLACED, LEFT_OUT)                                                                          \
    PLACED(model, devices)                                                                                                  \
    PLACED(model, tensor_buft_overrides)                                                                                    \
    PLACED(model, n_gpu_layers)                                                                                             \
    PLACED(model, split_mode)                                                                                               \
    LEFT_OUT(model, load_mode, "how weights get into memory, not which")                                                    \
    LEFT_OUT(model, lazy_mode, "when weights get into memory, not which")                                                   \
    PLACED(model, main_gpu)                                                                                                 \
    PLACED(model, tensor_split)                                                                                             \
    LEFT_OUT(model, progress_callback, "only watches a model being loaded")                                                 \
    LEFT_OUT(model, progress_callback_user_data, "only watches a model being loaded")                                       \
    LEFT_OUT(model, kv_overrides, "each key has a field of its own, `override KEY`")                                        \
    LEFT_OUT(model, vocab_only, "a model without weights computes nothing that could be saved")                             \
    LEFT_OUT(model, check_tensors, "only refuses models")                                                                   \
    KEPT(model, use_extra_bufts)                                                                                            \
    KEPT(model, no_host)                                                                                                    \
    LEFT_OUT(model, no_alloc, "a model without weights computes nothing that could be saved")                               \
    LEFT_OUT(model, load_mtp, "the head has a field of its own, and a session may go on without one")                       \
    LEFT_OUT(context, n_ctx, "compared with the tokens; `long_rope` says where it chooses a rotation")                      \
    LEFT_OUT(context, n_batch, "with our kernels no token depends on its batch, and elsewhere every prompt does")           \
    LEFT_OUT(context, n_ubatch, "with our kernels no token depends on its batch, and elsewhere every prompt does")          \
    LEFT_OUT(context, n_seq_max, "the state of one sequence is saved, in whichever place it was")                           \
    LEFT_OUT(context, n_rs_seq, "the last state is saved, not those to roll back to")                                       \
    LEFT_OUT(context, n_outputs_max, "room for logits, which are not saved")                                                \
    LEFT_OUT(context, n_outputs_max_per_seq, "room for logits, which are not saved")                                        \
    LEFT_OUT(context, n_threads, "threads share the rows of a product, not its sums")                                       \
    LEFT_OUT(context, n_threads_batch, "threads share the rows of a product, not its sums")                                 \
    KEPT(context, ctx_type)                                                                                                 \
    KEPT(context, rope_scaling_type)                                                                                        \
    KEPT(context, pooling_type)                                                                                             \
    KEPT(context, attention_type)                                                                                           \
    KEPT(context, flash_attn_type)                                                                                          \
    KEPT(context, rope_freq_base)                                                                                           \
    KEPT(context, rope_freq_scale)                                                                                          \
    KEPT(context, yarn_ext_factor)                                                                                          \
    KEPT(context, yarn_attn_factor)                                                                                         \
    KEPT(context, yarn_beta_fast)                                                                                           \
    KEPT(context, yarn_beta_slow)                                                                                           \
    KEPT(context, yarn_orig_ctx)                                                                                            \
    LEFT_OUT(context, defrag_thold, "llama.cpp ignores it")                                                                 \
    LEFT_OUT(context, cb_eval, "only watches what is computed")                                                             \
    LEFT_OUT(context, cb_eval_user_data, "only watches what is computed")                                                   \
    KEPT(context, type_k)                                                                                                   \
    KEPT(context, type_v)                                                                                                   \
    PLACED(context, moe_cache_size)                                                                                         \
    PLACED(context, moe_cache_cpu_share)                                                                                    \
    LEFT_OUT(context, abort_callback, "what it ends is not saved")                                                          \
    LEFT_OUT(context, abort_callback_data, "what it ends is not saved")                                                     \
    LEFT_OUT(context, embeddings, "outputs, which are not saved")                                                           \
    PLACED(context, offload_kqv)                                                                                            \
    LEFT_OUT(context, no_perf, "measures times")                                                                            \
    PLACED(context, op_offload)                                                                                             \
    KEPT(context, swa_full)                                                                                                 \
    LEFT_OUT(context, kv_unified, "the state of one sequence is saved, in whichever place it was")                          \
    LEFT_OUT(context, samplers, "sampling may change from one token to the next")                                           \
    LEFT_OUT(context, n_samplers, "sampling may change from one token to the next")                                         \
    LEFT_OUT(context, ctx_other, "the target of a context for drafts, which decide nothing")
