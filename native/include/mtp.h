/* mtp.h: the C API of mtp-gguf's native library.
 *
 * The API has two layers. The head (mtp_head_*) runs the Multi-Token Prediction block of a Qwen3.5
 * GGUF with plain ggml: it drafts tokens from the trunk's hidden states. The session (mtp_session_*)
 * runs a llama.cpp context together with a head: prefill, draft, verify, roll back.
 *
 * The API uses opaque handles, scalars and buffers that the caller owns. Every call that can fail
 * returns an mtp_status and stores an error message for mtp_last_error(). No C++ type and no exception
 * crosses this header. A handle must not be used by two threads at the same time.
 *
 * Terms used throughout:
 * - position p: the index of a token in its sequence, starting at 0;
 * - row: the input of the MTP block at position p, which is the token at p and the trunk's hidden
 *   state at position p - 1 (n_embd floats, as llama.cpp gives it out: after the final norm, of Step 3.5
 *   before it);
 * - depth: the number of tokens drafted in one call. */
#ifndef MTP_H
#define MTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define MTP_API __declspec(dllexport)
#else
#define MTP_API __attribute__((visibility("default")))
#endif

/* Increased whenever a signature or a struct below changes. Callers should compare it with
 * mtp_api_version() before calling anything else. */
#define MTP_API_VERSION 13

/* Limits that keep graphs and buffers bounded; larger values return MTP_ERROR_ARGUMENT. */
#define MTP_MAX_DEPTH 16
#define MTP_MAX_SEQUENCES 64
#define MTP_MAX_STRUCT 1024 /* bytes */

/* Pass this as a depth to let each cycle choose the depth with the highest expected throughput, which
 * may be zero. */
#define MTP_DEPTH_AUTO (-1)

typedef enum mtp_status {
    MTP_OK                = 0,
    MTP_ERROR_ARGUMENT    = 1, /* the call does not accept this value */
    MTP_ERROR_FILE        = 2, /* a file cannot be read */
    MTP_ERROR_FORMAT      = 3, /* a file is readable but malformed */
    MTP_ERROR_NO_HEAD     = 4, /* a valid model file without an MTP block */
    MTP_ERROR_UNSUPPORTED = 5, /* valid, but not supported by this library */
    MTP_ERROR_MEMORY      = 6, /* an allocation failed */
    MTP_ERROR_BACKEND     = 7, /* ggml or llama.cpp failed */
    MTP_ERROR_FULL        = 8, /* no room left in a context or cache */
    MTP_ERROR_STATE       = 9, /* the call is not allowed in the current state */
    MTP_ERROR_VERSION     = 10, /* the loaded llama.cpp is not the one this library was built for */
    MTP_ERROR_INTERNAL    = 11, /* a bug in this library */
    MTP_ERROR_DEVICE      = 12, /* a device failed, such as a GPU that was lost, and with it what it held */
} mtp_status;

/* ---- library ---- */

/* Returns the message of this thread's last failed call, or "" if none has failed. It stays valid
 * until the next call of this thread fails. */
MTP_API const char * mtp_last_error(void);

MTP_API int32_t      mtp_api_version(void);

/* Returns the version of ggml and llama.cpp that this library was built for, e.g.
 * "ggml 0.25.3 (0c1e570), llama.cpp 0.5.0-dev". */
MTP_API const char * mtp_built_for(void);

/* Checks that the library can run on the ggml that this process has loaded: that it was built for it, or
 * that the parts of ggml.h that it uses are the same. Returns MTP_ERROR_VERSION, with both versions and the
 * first difference in the message, if not. */
MTP_API mtp_status   mtp_check_runtime(void);

/* Calls a function without arguments that returns a struct of more than 16 and at most MTP_MAX_STRUCT
 * bytes, such as llama_context_default_params, and stores the struct at `out`, which has room for
 * MTP_MAX_STRUCT bytes. Those that the function does not write keep their values, which shows the size
 * and the padding of the struct. */
MTP_API mtp_status   mtp_call_for_struct(void (*function)(void), void * out);

/* Returns ggml's name of the GPU that llama.cpp numbers `index` (as in main_gpu), for use in
 * mtp_head_params.device; "CPU" if there is no such GPU. */
MTP_API const char * mtp_gpu_name(int32_t index);

struct llama_context;

/* Whether a device of a llama.cpp context has failed. Then llama_free would end the process, because ggml's
 * Vulkan backend throws an exception where it waits for the device: leave the context as it is. */
MTP_API bool mtp_context_has_failed(struct llama_context * context);

/* Makes the running and all further llama_decode calls of the process's sessions fail soon, as far as they run
 * on a CPU. For the end of a process, where other threads may be decoding; they can be waited for after it. */
MTP_API void mtp_abort_decoding(void);

/* Redirects the log of llama.cpp and ggml for the whole process and clears the lines recorded so far.
 * Only the most recent lines are recorded. echo: also print everything to stderr. */
MTP_API mtp_status   mtp_log_listen(bool echo);

/* Returns the recorded log lines, oldest first, each ending with a newline. The text stays valid until
 * this thread calls the function again. */
MTP_API const char * mtp_log_last(void);

/* Installs crash handlers, meant for programs rather than libraries. From then on a failed assertion in
 * ggml, a fault in llama.cpp, or a model file that is truncated while mapped prints one sentence to
 * stderr and ends the process with exit code 1. Existing signal handlers are left in place. */
MTP_API mtp_status   mtp_tell_crashes(void);

/* ---- head ---- */

typedef struct mtp_head mtp_head;

struct ggml_tensor;
struct ggml_backend;

typedef struct mtp_head_params {
    const char * trunk_path; /* file with token_embd.weight if the head's file has none; else NULL */
    const char * device;     /* ggml's device name, e.g. "CPU", "CUDA0"; NULL means "CPU" */
    int32_t n_threads;       /* threads of the CPU device; >= 1 */
    int32_t n_ctx;           /* positions per sequence; >= 1 */
    int32_t n_seq_max;       /* number of sequences; 1 .. MTP_MAX_SEQUENCES */
    int32_t n_batch;         /* maximum rows fed in one graph evaluation; >= MTP_MAX_DEPTH + 1 */
    int32_t fastmtp_size;    /* rows of a ranked draft vocabulary to use; 0: all; -1: draft from the
                              * full vocabulary even if the file has a draft vocabulary (layout
                              * `ids` only). A file without one gets a list of this size, special
                              * tokens and then by id; 0: of 32,768, or a quarter of a vocabulary
                              * below 131,072, and none below 32,768 */
    int32_t n_ring;          /* ids at the end of the draft vocabulary that sessions replace by tokens
                              * of the text as these appear, at most a quarter of it; 0: 2,048; -1:
                              * none. Three eighths of a list that was made when the file was
                              * loaded are replaced, too, by other tokens that are like them.
                              * Always none if the file has only the rows of its list */
    const struct ggml_tensor * embedding; /* token embeddings and output matrix of the loaded trunk */
    const struct ggml_tensor * output;    /* (mtp_model_matrix), or NULL. A head that drafts from the full
                              * vocabulary uses them where they are, if that is its device, a GPU, in
                              * place of copies. They must outlive the head */
    const char * type;       /* ggml's name of a type, such as "q4_K": matrices of the MTP block that are
                              * stored in more bits are quantized to it in memory. NULL or "": as stored.
                              * Routers and rows of the trunk's matrices stay as they are, and so does a
                              * matrix whose rows are no whole blocks of the type */
} mtp_head_params;

/* Returns the defaults: "CPU", 2 threads, 512 positions, 1 sequence, 512 rows, the whole draft
 * vocabulary. */
MTP_API mtp_head_params mtp_head_default_params(void);

typedef enum mtp_draft_layout {
    MTP_DRAFT_NONE    = 0, /* drafts from the full vocabulary */
    MTP_DRAFT_IDS     = 1,
    MTP_DRAFT_TABLE   = 2,
    MTP_DRAFT_SIDECAR = 3,
    MTP_DRAFT_MADE    = 4, /* the file has no list, so one was made when it was loaded */
} mtp_draft_layout;

typedef struct mtp_head_info {
    int32_t n_embd;
    int32_t n_vocab;       /* size of the target vocabulary */
    int32_t n_draft_vocab; /* size of the draft vocabulary in use */
    int32_t n_ring;        /* how many of its last ids follow the text */
    int32_t block;         /* N of blk.N, of the first one if there are several */
    int32_t n_ctx;
    int32_t n_seq_max;
    int32_t max_depth;     /* the most tokens that one call drafts: MTP_MAX_DEPTH, or the number of MTP
                            * blocks if there are several, of which each drafts one token */
    int32_t layout;        /* an mtp_draft_layout */
    bool    moe;
    bool    tied;          /* output and embedding share one tensor */
    bool    draws;         /* the device can sample drafts, as mtp_session_step_sampled needs */
    int64_t weight_bytes;  /* memory allocated for weights, without those used in place or of the trunk */
    int64_t mapped_bytes;  /* weights used in place from the mapped file */
    int64_t cache_bytes;   /* cache of all sequences when full; it grows with each sequence */
} mtp_head_info;

/* Loads the MTP block of a GGUF and its draft vocabulary. The file is fully validated. */
MTP_API mtp_status mtp_head_load(const char * path, const mtp_head_params * params, mtp_head ** out);

/* Checks the file and the draft vocabulary, and that the device can read rows of the embedding, before a large
 * trunk is loaded. embedding and output are not used. */
MTP_API mtp_status mtp_head_check(const char * path, const mtp_head_params * params);
MTP_API void       mtp_head_free(mtp_head * head);
MTP_API mtp_status mtp_head_get_info(const mtp_head * head, mtp_head_info * out);

/* Copies the target ids of the draft vocabulary in rank order, those that follow the text at the end. n must be
 * n_draft_vocab. */
MTP_API mtp_status mtp_head_get_draft_ids(const mtp_head * head, int32_t * out, size_t n);

/* Returns the first position after the rows of a sequence, 0 if the sequence is empty. */
MTP_API mtp_status mtp_head_next_position(const mtp_head * head, int32_t seq, int32_t * out);

/* Feeds n_rows rows at positions first .. first + n_rows - 1 into the cache without drafting. `first`
 * must be the sequence's next position; if the sequence is empty, it may be any position.
 * hidden: [n_rows][n_embd]. If the call fails, none of the rows are added. */
MTP_API mtp_status mtp_head_feed(mtp_head * head, int32_t seq, int32_t first, const int32_t * tokens,
                                 const float * hidden, int32_t n_rows);

/* Feeds rows like mtp_head_feed (n_rows >= 1), then drafts the `depth` tokens that follow the last row,
 * all in one graph evaluation. Drafts do not stay in the cache, which ends after the last row fed.
 * out_tokens, out_probs: [depth], target ids and their probabilities within the draft vocabulary.
 * out_logits: [depth][n_draft_vocab] or NULL. */
MTP_API mtp_status mtp_head_draft(mtp_head * head, int32_t seq, int32_t first, const int32_t * tokens,
                                  const float * hidden, int32_t n_rows, int32_t depth,
                                  int32_t * out_tokens, float * out_probs, float * out_logits);

/* Hidden states of one sequence for mtp_head_keep_hidden. */
typedef struct mtp_kept_rows {
    int32_t seq;
    int32_t at;    /* how many hidden states the sequence has there already; they are kept in order */
    int32_t first; /* the first row of `tensor` */
    int32_t n;
    bool    kept;  /* written: false if the head is on another device, or without room: at + n rows must be at
                    * most MTP_MAX_DEPTH + 1 */
} mtp_kept_rows;

/* Copies hidden states of n sequences to memory of the head on the device where llama.cpp computes them, so
 * that they need not go through the host. tensor, backend: from llama_get_embeddings_nextn_tensor
 * (patches/0107). The copies follow llama.cpp's computation there; wait for both with llama_synchronize before
 * these hidden states are used. */
MTP_API mtp_status mtp_head_keep_hidden(mtp_head * head, struct ggml_tensor * tensor, struct ggml_backend * backend,
                                        mtp_kept_rows * parts, int32_t n);

/* Copies the first n hidden states of a sequence that were kept to `out`, [n][n_embd]; size: n * n_embd. */
MTP_API mtp_status mtp_head_get_hidden(mtp_head * head, int32_t seq, int32_t n, float * out, size_t size);

/* One sequence of mtp_head_draft_batch. Each field is an argument of mtp_head_draft. hidden: NULL for the
 * first n_rows hidden states that mtp_head_keep_hidden has kept for the sequence. */
typedef struct mtp_draft_task {
    int32_t         seq;
    int32_t         first;
    const int32_t * tokens;
    const float *   hidden;
    int32_t         n_rows;
    int32_t         depth;
    int32_t *       out_tokens;
    float *         out_probs;
} mtp_draft_task;

/* Drafts for n different sequences in one graph evaluation, which reads each weight once for all of
 * them. If the call fails, none of the rows are added. */
MTP_API mtp_status mtp_head_draft_batch(mtp_head * head, const mtp_draft_task * tasks, int32_t n);

/* Removes the rows at positions >= position; 0 empties the sequence. */
MTP_API mtp_status mtp_head_rollback(mtp_head * head, int32_t seq, int32_t position);

/* Returns the size in bytes of a sequence's rows. */
MTP_API mtp_status mtp_head_rows_size(const mtp_head * head, int32_t seq, size_t * out);

/* Copies a sequence's rows to `out`. n must be mtp_head_rows_size. */
MTP_API mtp_status mtp_head_get_rows(const mtp_head * head, int32_t seq, void * out, size_t n);

/* Replaces the rows of a sequence with rows that mtp_head_get_rows copied from a head of the same
 * model. The last row is at position end - 1. If the call fails, the sequence is empty. */
MTP_API mtp_status mtp_head_set_rows(mtp_head * head, int32_t seq, int32_t end, const void * rows, size_t n);

/* Returns the names of the ggml ops that this head's graphs use, sorted and separated by spaces, to
 * check whether a backend supports them. The text lives as long as the head. */
MTP_API mtp_status mtp_head_ops(mtp_head * head, const char ** out);

/* Returns how many draft graphs the head has built so far. Those for other rows, depths or lengths are built
 * when they are needed, and kept. */
MTP_API mtp_status mtp_head_built_graphs(const mtp_head * head, int64_t * out);

/* ---- importance matrix ----
 *
 * For each weight matrix the sum of its squared inputs by column, as llama.cpp's tools/imatrix collects it. It is
 * collected from a trunk while its llama_context has mtp_imatrix_evaluate as cb_eval and the mtp_imatrix as
 * cb_eval_user_data, and from a head between two calls of mtp_head_set_imatrix. */

typedef struct mtp_imatrix mtp_imatrix;

/* What was collected of a tensor. The pointers are valid until more is collected. */
typedef struct mtp_imatrix_entry {
    const char * name;      /* of the tensor in the model's file */
    const float * sums;     /* [matrices][columns] */
    size_t n_sums;
    const int64_t * counts; /* rows summed, of each expert; one for a tensor without experts */
    size_t n_counts;
} mtp_imatrix_entry;

/* with_output: collect the matrix output.weight, too, and not only those of the blocks. */
MTP_API mtp_status mtp_imatrix_new(bool with_output, mtp_imatrix ** out);
MTP_API void mtp_imatrix_free(mtp_imatrix * imatrix);

/* A ggml_backend_sched_eval_callback. Its errors are those of the next mtp_imatrix_size. */
MTP_API bool mtp_imatrix_evaluate(struct ggml_tensor * node, bool ask, void * imatrix);

/* Returns the number of tensors that were seen. MTP_ERROR_BACKEND if an input was not finite. */
MTP_API mtp_status mtp_imatrix_size(const mtp_imatrix * imatrix, int32_t * out);

/* Returns what was collected of tensor i, in the order of their names. */
MTP_API mtp_status mtp_imatrix_get(const mtp_imatrix * imatrix, int32_t i, mtp_imatrix_entry * out);

/* Collects from the MTP blocks in the calls that follow: mtp_head_feed, mtp_head_draft and mtp_head_draft_batch, with
 * as many tokens for each sequence of a batch, as padding would count. imatrix must outlive them; NULL: no more. */
MTP_API mtp_status mtp_head_set_imatrix(mtp_head * head, mtp_imatrix * imatrix);

/* ---- session ----
 *
 * A session combines a trunk (a llama.cpp context that the caller owns) with a head. Change the trunk's
 * memory only through the session, or call mtp_session_sync() afterwards. One cycle consists of:
 *
 *   mtp_cycle_begin   drafts after a token that the trunk has not seen, then decodes token and drafts
 *   mtp_cycle_row     makes the trunk's logits after the token and the first i drafts available
 *   mtp_cycle_end     reports how many drafts were accepted; the others are rolled back
 *
 * mtp_session_step runs all three around a sampler. Rollback is deferred until the trunk is needed
 * again, so that mtp_seq_rm can remove more tokens in the same operation. */

struct llama_sampler;

struct llama_model;

typedef struct mtp_session mtp_session;

/* Finds the output matrix of a loaded model, or its token embeddings, for mtp_head_params. out: NULL if
 * llama.cpp does not tell (without patches/). */
MTP_API mtp_status mtp_model_matrix(const struct llama_model * model, bool output, const struct ggml_tensor ** out);

/* How rejected drafts are rolled back in the trunk's recurrent state, which, unlike a KV cache, cannot
 * be truncated. */
typedef enum mtp_rollback {
    MTP_ROLLBACK_SNAPSHOT   = 0, /* the context keeps n_rs_seq snapshots; requires n_rs_seq >= depth
                                 * and n_ubatch >= n_rs_seq + 2 */
    MTP_ROLLBACK_CHECKPOINT = 1, /* restores a copy in device memory and decodes the accepted tokens
                                 * again */
    MTP_ROLLBACK_TWO_PHASE  = 2, /* decodes a draft only once it is accepted, one token at a time */
    MTP_ROLLBACK_HOST       = 3, /* like CHECKPOINT, with the copy in host memory */
} mtp_rollback;

typedef struct mtp_session_params {
    int32_t rollback;  /* an mtp_rollback */
    int32_t max_depth; /* 0 .. MTP_MAX_DEPTH; 0: the session never drafts */
    int32_t max_rows;  /* maximum tokens verified in one batch; further drafts are verified once
                        * those are accepted. 0: no limit. For kernels whose results depend on the
                        * batch size */
    int32_t min_rows;  /* minimum tokens computed in one batch of a cycle, 1 or 2; 0 means 1. With 2,
                        * a single token is padded with a second one that is rolled back immediately,
                        * so that kernels for single rows never run. 2 requires n_rs_seq >= 1 and
                        * makes the context's last position unusable */
    int32_t max_lookup; /* maximum tokens drafted from the text itself in one cycle (prompt lookup),
                         * 0 .. MTP_MAX_DEPTH; 0: none */
} mtp_session_params;

/* Totals since the session was created or mtp_session_reset_stats() was called. Index 0 is the first
 * draft of a cycle. */
typedef struct mtp_session_stats {
    int64_t cycles;
    int64_t tokens;    /* generated by the cycles: accepted drafts plus one bonus token per cycle */
    int64_t rollbacks; /* cycles whose rejected drafts had to be rolled back */
    int64_t prefilled; /* tokens decoded by mtp_session_decode */
    int64_t drafted[MTP_MAX_DEPTH];
    int64_t accepted[MTP_MAX_DEPTH];
    double  prefill_ms;      /* mtp_session_decode, in the trunk */
    double  prefill_head_ms; /* mtp_session_decode, in the head */
    double  draft_ms;
    double  verify_ms;
    double  sample_ms; /* sampling in mtp_session_step and mtp_session_step_sampled */
    double  rollback_ms;
    int64_t text_cycles;   /* cycles that drafted from the text; `drafted` and `accepted` above */
    int64_t text_drafted;  /* count only the head's drafts */
    int64_t text_accepted;
    int64_t decodes;         /* calls of llama_decode by the cycles */
    int64_t draft_graphs;    /* what the cycles exchanged with the head's device: graph launches, */
    int64_t draft_syncs;     /* waits for the device, */
    int64_t draft_bytes_up;  /* and bytes, 0 if the device computes in host memory */
    int64_t draft_bytes_down;
} mtp_session_stats;

/* head: a head that no other session uses, or NULL for a session that never drafts with a head. Context
 * and head must outlive the session. */
MTP_API mtp_status mtp_session_new(struct llama_context * context, mtp_head * head,
                                   const mtp_session_params * params, mtp_session ** out);
MTP_API void       mtp_session_free(mtp_session * session);
MTP_API mtp_status mtp_session_get_stats(const mtp_session * session, mtp_session_stats * out);
MTP_API mtp_status mtp_session_reset_stats(mtp_session * session);

/* Returns the number of tokens in a sequence, not counting rejected drafts. */
MTP_API mtp_status mtp_session_length(const mtp_session * session, int32_t seq, int32_t * out);

/* Appends tokens to a sequence, in the trunk and in the head. Afterwards logits are available for the
 * last token or, with all_logits, for row i of the last batch (of at most the context's n_ubatch tokens).
 * Returns MTP_ERROR_FULL and changes nothing if the tokens do not fit; in a unified KV cache that also
 * depends on the other sequences. If the call fails in another way after its arguments were checked,
 * the sequence is empty. */
MTP_API mtp_status mtp_session_decode(mtp_session * session, int32_t seq, const int32_t * tokens,
                                      int32_t n, bool all_logits);

/* Makes the trunk's hidden states available after each further mtp_session_decode, in a session without a
 * head, too. */
MTP_API mtp_status mtp_session_want_hidden(mtp_session * session);

/* Copies the trunk's hidden states (after the final norm) of the last n tokens that mtp_session_decode
 * decoded. They must belong to its last batch, and no cycle may have followed. out: [n][n_embd]; `size`
 * is the number of its floats. */
MTP_API mtp_status mtp_session_get_hidden(mtp_session * session, int32_t n, float * out, size_t size);

/* Finds the hidden states of all tokens of a context's last batch, whoever decoded it, [n_tokens][n_embd], valid
 * until the next one. out: NULL if there are none, as before mtp_session_want_hidden. */
MTP_API mtp_status mtp_context_hidden(struct llama_context * context, const float ** out);

/* Begins a cycle: drafts, and decodes the token and its drafts.
 * token: the next token of the sequence, not yet decoded.
 * depth: number of tokens to draft with the head, at most max_depth, or MTP_DEPTH_AUTO. Fewer are
 * drafted if the context is nearly full, if the head has no hidden states to start from, or if it cannot
 * draft as many (mtp_head_info.max_depth).
 * If max_lookup is set and lookup in the text promises more tokens per millisecond, drafts come from
 * the text instead, with out_probs of 1.
 * out_tokens, out_probs: [MTP_MAX_DEPTH], or the maximum of depth (or max_depth) and max_lookup.
 * Fails like mtp_session_decode; no cycle is open after a failure. */
MTP_API mtp_status mtp_cycle_begin(mtp_session * session, int32_t seq, int32_t token, int32_t depth,
                                   int32_t * out_tokens, float * out_probs, int32_t * out_n);

/* Makes row `row` available: the logits after the token and its first `row` drafts. Request rows in
 * order, each once its draft is accepted. *out: the index for llama_get_logits_ith and
 * llama_sampler_sample. If llama.cpp fails, the sequence is empty and the cycle has ended. */
MTP_API mtp_status mtp_cycle_row(mtp_session * session, int32_t row, int32_t * out);

/* Ends the cycle. n_accepted: number of accepted drafts. The sequence is then 1 + n_accepted tokens
 * longer. */
MTP_API mtp_status mtp_cycle_end(mtp_session * session, int32_t n_accepted);

/* Returns whether the drafts of the last cycle came from the text rather than from the head. */
MTP_API mtp_status mtp_cycle_from_text(const mtp_session * session, bool * out);

/* Runs a whole cycle. sampler: chooses and accepts each token; NULL takes the most likely token. A draft
 * is accepted if the sampler chooses the same token. depth and out are as in mtp_cycle_begin, except
 * that `out` holds one more token. *out_n tokens are new. The last one is not decoded yet: pass it to
 * the next cycle. */
MTP_API mtp_status mtp_session_step(mtp_session * session, int32_t seq, int32_t token, int32_t depth,
                                    struct llama_sampler * sampler, int32_t * out, int32_t * out_n);

/* Every function that chooses a token from a row, here and below, checks the row's logits. It returns
 * MTP_ERROR_BACKEND if one of them is NaN or +Inf, if all of them are equal, or if the hidden state that
 * they were computed from has a NaN or an infinity; a session that drafts knows it. */

/* A sampler chain whose distribution is known: top-k, top-p, min-p, temperature, in this order, each
 * as in the llama.cpp sampler of that name. */
typedef struct mtp_sampling {
    float    temperature; /* <= 0: the most likely token */
    int32_t  top_k;       /* <= 0: off */
    float    top_p;       /* >= 1: off; <= 0: the most likely token */
    float    min_p;       /* <= 0: off; > 1: the most likely token */
    uint64_t seed;
} mtp_sampling;

/* Sets the chain of mtp_session_sample and mtp_session_step_sampled and seeds their random numbers. */
MTP_API mtp_status mtp_session_set_sampling(mtp_session * session, const mtp_sampling * sampling);

/* Samples a token from a row. row: an index from mtp_cycle_row, or -1 for the last row. */
MTP_API mtp_status mtp_session_sample(mtp_session * session, int32_t row, int32_t * out);

/* Runs a cycle like mtp_session_step, but with rejection sampling. Drafts are sampled from the head's
 * own distribution q (the chain's temperature, with a logit cutoff like that of the trunk's last
 * distribution) and accepted with probability min(1, p / q), where p is the trunk's distribution. A
 * rejected draft is replaced by a token sampled from max(0, p - q). The generated text follows p,
 * whatever q is. */
MTP_API mtp_status mtp_session_step_sampled(mtp_session * session, int32_t seq, int32_t token,
                                            int32_t depth, int32_t * out, int32_t * out_n);

/* Returns the most likely token of a row. row: an index from mtp_cycle_row, or -1 for the last row. */
MTP_API mtp_status mtp_session_argmax(mtp_session * session, int32_t row, int32_t * out);

/* Returns the token that a sampler chain of llama.cpp chooses for a row, and tells the chain. It fails where
 * llama_sampler_sample would end the process, as where a grammar allows no token. */
MTP_API mtp_status mtp_session_choose(mtp_session * session, int32_t row, struct llama_sampler * sampler, int32_t * out);

/* Removes the tokens at positions p0 .. p1 - 1 from trunk and head; p1 < 0 means to the end. Because of
 * the recurrent state only the end of a sequence can be removed, as far back as rollback reaches, or the
 * whole sequence. Any other removal is rejected with the reason, and nothing is changed. Removing no
 * tokens rolls back rejected drafts right away. Removing everything also ends an open cycle of this
 * sequence. */
MTP_API mtp_status mtp_seq_rm(mtp_session * session, int32_t seq, int32_t p0, int32_t p1);

/* Updates the session after the trunk's memory was changed from outside, for example by loading a state.
 * The head's rows of the sequence are dropped; it starts again with the tokens that follow. */
MTP_API mtp_status mtp_session_sync(mtp_session * session, int32_t seq);

/* As mtp_session_sync, where the next token is at position `length`: a picture that was decoded from
 * outside advances the positions of M-RoPE by more than the last one in the memory. It occupies more
 * cells than positions, so the context may be full earlier. */
MTP_API mtp_status mtp_session_skip(mtp_session * session, int32_t seq, int64_t length);

/* Replaces sequence `to` with a copy of sequence `from`, in trunk and head. The attention cache is shared
 * if llama.cpp supports it; the recurrent state is copied. A later rollback in one sequence does not
 * affect the other. If the call fails, `to` is empty. */
MTP_API mtp_status mtp_seq_cp(mtp_session * session, int32_t from, int32_t to);

/* ---- checkpoint ----
 *
 * A checkpoint is the state of a sequence at one length: of the trunk, of the head, of the text that is
 * drafted from, and of the choice of depths. Decoding after a restore continues exactly as it did after the save. The caller owns the
 * checkpoint, which may outlive its session. */

typedef struct mtp_checkpoint mtp_checkpoint;

typedef enum mtp_checkpoint_kind {
    /* Only the recurrent state, which cannot be truncated; the caches stay in place. Valid in this
     * session as long as none of the checkpoint's tokens are removed; it can be restored into any
     * sequence that holds them. */
    MTP_CHECKPOINT_DEVICE = 0, /* in device memory, which holds one copy per sequence: a newer copy or
                                * a cycle with MTP_ROLLBACK_CHECKPOINT invalidates it */
    MTP_CHECKPOINT_HOST   = 1, /* in host memory; serializable if the model is recurrent */
    /* Serializable; can be restored in another session or process that has loaded the same model. */
    MTP_CHECKPOINT_HEAD   = 2, /* all but the trunk's state, for callers that save that themselves */
    MTP_CHECKPOINT_WHOLE  = 3, /* trunk, head and text */
} mtp_checkpoint_kind;

typedef struct mtp_checkpoint_info {
    int32_t kind;          /* an mtp_checkpoint_kind */
    int32_t length;        /* number of tokens */
    int64_t bytes;         /* size in host memory */
    int64_t written_bytes; /* size for mtp_checkpoint_write; 0 if the kind cannot be written */
} mtp_checkpoint_info;

/* Saves a checkpoint of a sequence, which must not be empty. Rejected drafts are rolled back first. */
MTP_API mtp_status mtp_checkpoint_save(mtp_session * session, int32_t seq, int32_t kind, mtp_checkpoint ** out);

/* Restores a checkpoint into a sequence; this can be repeated. Logits are not restored: decode a token
 * next. If the checkpoint does not fit, nothing is changed: MTP_ERROR_STATE means that its tokens have
 * been removed, that its device copy has been overwritten, or that it belongs to another model;
 * MTP_ERROR_FULL means that the context has no room for it. If the call fails in another way, the
 * sequence is empty. MTP_CHECKPOINT_WHOLE restores no head if the session has a different one or none.
 * MTP_CHECKPOINT_HEAD requires that the trunk's state has been restored before. A text is restored if
 * the session drafts from the text; a checkpoint without one, as older versions wrote it, clears it. */
MTP_API mtp_status mtp_checkpoint_restore(mtp_session * session, int32_t seq, const mtp_checkpoint * checkpoint);

/* Whether mtp_checkpoint_restore would find that a checkpoint fits: MTP_OK, or the error that it would return. */
MTP_API mtp_status mtp_checkpoint_check(mtp_session * session, int32_t seq, const mtp_checkpoint * checkpoint);

/* Attaches an MTP_CHECKPOINT_HOST that was read to a sequence that holds its tokens, so that it can be restored there.
 * The caller vouches for the tokens, for instance after restoring an MTP_CHECKPOINT_WHOLE of the same text. If the session
 * has a different head, the head's part is dropped. MTP_ERROR_STATE: the kind, the model or the length does not fit;
 * MTP_ERROR_FORMAT: a size does not fit. */
MTP_API mtp_status mtp_checkpoint_attach(mtp_session * session, int32_t seq, mtp_checkpoint * checkpoint);

MTP_API void       mtp_checkpoint_free(mtp_checkpoint * checkpoint);
MTP_API mtp_status mtp_checkpoint_get_info(const mtp_checkpoint * checkpoint, mtp_checkpoint_info * out);

/* Serializes a checkpoint. n must be its written_bytes. */
MTP_API mtp_status mtp_checkpoint_write(const mtp_checkpoint * checkpoint, void * out, size_t n);

/* Reads the output of mtp_checkpoint_write, also that of older versions. The data is fully validated:
 * MTP_ERROR_FORMAT names the first fault. Whether it belongs to the loaded model is checked by
 * mtp_checkpoint_restore. */
MTP_API mtp_status mtp_checkpoint_read(const void * data, size_t n, mtp_checkpoint ** out);

/* As mtp_checkpoint_read, without a copy of the large parts: `data` must stay as it is until the checkpoint is
 * freed. */
MTP_API mtp_status mtp_checkpoint_borrow(const void * data, size_t n, mtp_checkpoint ** out);

/* ---- session files ----
 *
 * Files that hold a session: its tokens, its checkpoints, and what it has in common with the model that
 * continues it. src/session_file.h describes the bytes. */

typedef struct mtp_session_file mtp_session_file; /* an open file, whose header is valid */

typedef struct mtp_session_file_info {
    uint64_t     nbytes; /* of the file */
    uint64_t     owner;  /* the conversation's owner in llama-server; 0: everybody's */
    int32_t      program; /* 1: MTPLlama, 2: llama-server */
    int32_t      n_tokens;
    int32_t      n_sections;
    int32_t      n_fields; /* of the identity */
    const void * extra; /* bytes of the program's own */
    size_t       n_extra;
} mtp_session_file_info;

typedef struct mtp_session_section {
    const char * name; /* "tokens", "checkpoint" or "slot", "earlier" */
    uint64_t     offset;
    uint64_t     nbytes;
    uint32_t     checksum; /* the CRC-32 of its bytes */
    int32_t      n_tokens; /* that it belongs to; fewer than the file has if it is earlier */
} mtp_session_section;

typedef struct mtp_session_field {
    const char * name;
    const char * value;
} mtp_session_field;

/* Opens a file and validates its header. MTP_ERROR_FILE: it cannot be read; MTP_ERROR_FORMAT names the first fault. */
MTP_API mtp_status mtp_session_file_open(const char * path, mtp_session_file ** out);
MTP_API void       mtp_session_file_close(mtp_session_file * file);

/* The strings and bytes that these return stay valid until the file is closed. */
MTP_API mtp_status mtp_session_file_get_info(const mtp_session_file * file, mtp_session_file_info * out);
MTP_API mtp_status mtp_session_file_get_section(const mtp_session_file * file, int32_t i, mtp_session_section * out);
MTP_API mtp_status mtp_session_file_get_field(const mtp_session_file * file, int32_t i, mtp_session_field * out);

/* Reads a section; n: its nbytes. out: NULL, with n = 0, only checks it. MTP_ERROR_FORMAT: its checksum does not hold. */
MTP_API mtp_status mtp_session_file_read(const mtp_session_file * file, int32_t i, void * out, size_t n);

/* Stores the bytes of a header at `out`, [n], of which there are *out_n, and in `sections` the offsets that belong to it.
 * The nbytes and names that are passed do not matter. out: NULL to learn the number. MTP_ERROR_ARGUMENT, which begins with
 * `path`, if a reader would refuse them. */
MTP_API mtp_status mtp_session_file_header(const char * path, const mtp_session_file_info * info,
                                           mtp_session_section * sections, const mtp_session_field * fields, void * out,
                                           size_t n, size_t * out_n);

/* Returns which of llama.cpp's parameters a session has to have in common with the model that continues it: a line for
 * each field, "model FIELD WHY" or "context FIELD WHY". WHY is "kept", "placed" if it matters with a GPU only, or the
 * reason why it never does. */
MTP_API const char * mtp_session_fields(void);

/* ---- draft depth ----
 *
 * Chooses the draft depth of each cycle from measured costs and outcomes. It reads no clock and uses no
 * random numbers, so the same history leads to the same choices. Sessions use it for MTP_DEPTH_AUTO;
 * other runtimes can use it directly. One cycle: mtp_depth_plan, draft, mtp_depth_keep, verify,
 * mtp_depth_report. */

typedef struct mtp_depth mtp_depth;

/* The outcome of a cycle: n_drafted tokens were drafted, the first n_verified of them verified, and the
 * first n_accepted of those accepted. */
typedef struct mtp_cycle_outcome {
    int32_t n_drafted;
    int32_t n_verified;
    int32_t n_accepted;
    const float * probabilities; /* [n_drafted], the head's probability of each draft */
    float  next_right; /* if all verified drafts were accepted and at least one more was drafted: 1 if
                        * the first unverified draft matched the token generated at its position, 0 if
                        * not, or the probability of a match; < 0: unknown */
    double draft_ms;   /* 0 if not measured; the same holds for the next two */
    double verify_ms;
    double undo_ms;    /* time to roll back rejected drafts */
} mtp_cycle_outcome;

/* max_depth: 0 .. MTP_MAX_DEPTH. */
MTP_API mtp_status mtp_depth_new(int32_t max_depth, mtp_depth ** out);
MTP_API void       mtp_depth_free(mtp_depth * depth);

/* Creates a chooser for another sequence of the same runtime, whose drafts may share a batch with those
 * of `other`. The two share their measured costs; outcomes are kept per chooser. */
MTP_API mtp_status mtp_depth_new_beside(const mtp_depth * other, mtp_depth ** out);

/* Sets the acceptance of first drafts (0 .. 1) that is expected before any outcome, such as the one that a
 * file states; 0.7 otherwise. A session does so if the head's file states less than 0.3. */
MTP_API mtp_status mtp_depth_expect(mtp_depth * depth, double acceptance);

/* Sets how many sequences (1 .. MTP_MAX_SEQUENCES, initially 1) share the next batches. */
MTP_API mtp_status mtp_depth_share(mtp_depth * depth, int32_t n_sequences);

/* Reports the time of a batch that verified n_tokens, counted over all its sequences. Call it once per
 * batch and leave verify_ms of the sequences' outcomes at 0. */
MTP_API mtp_status mtp_depth_report_batch(mtp_depth * depth, int32_t n_tokens, double ms);

/* Sets costs that are known in advance: verify_ms[i] is the time of a batch of i + 1 tokens, draft_ms[i]
 * the time of drafting i + 1 tokens; 0 means unknown. There are at most MTP_MAX_DEPTH + 1 and
 * MTP_MAX_DEPTH values. */
MTP_API mtp_status mtp_depth_set_costs(mtp_depth * depth, const double * verify_ms, int32_t n_verify,
                                       const double * draft_ms, int32_t n_draft);

/* Returns how many tokens to draft in the next cycle, 0 .. room. */
MTP_API mtp_status mtp_depth_plan(mtp_depth * depth, int32_t room, int32_t * out);

/* Returns how many of n drafted tokens to verify. drawn: the drafts were sampled; then a draft's own
 * probability must not decide whether it is verified, because that would bias the distribution. */
MTP_API mtp_status mtp_depth_keep(const mtp_depth * depth, const float * probabilities, int32_t n,
                                  bool drawn, int32_t * out);
MTP_API mtp_status mtp_depth_report(mtp_depth * depth, const mtp_cycle_outcome * outcome);

/* The state of a chooser as bytes: its acceptance and its measured costs. The number of bytes changes with each
 * report; it is below 128 KiB. out: [n], which is what mtp_depth_state_size returned. */
MTP_API mtp_status mtp_depth_state_size(const mtp_depth * depth, size_t * out);
MTP_API mtp_status mtp_depth_get_state(const mtp_depth * depth, void * out, size_t n);

/* Restores a state, after which the same reports lead to the same choices. Costs are restored only if none have
 * been measured here, and then for all choosers that share them: times of another process are not worth more than
 * those of this one. The bytes are fully validated: MTP_ERROR_FORMAT names the first fault, and nothing is
 * changed. */
MTP_API mtp_status mtp_depth_set_state(mtp_depth * depth, const void * data, size_t n);

/* mtp_depth_plan and mtp_depth_keep for n sequences that are drafted in one graph and verified in one
 * batch: the depth with the most tokens per millisecond of all of them together, less where there is no
 * room for it. depths: different choosers that share their costs. others: further sequences in the batch,
 * with a token each. rooms, out, probabilities, n_drafted: [n]. The drafts must not be sampled. */
MTP_API mtp_status mtp_depth_plan_batch(mtp_depth * const * depths, const int32_t * rooms, int32_t n,
                                        int32_t * out);
MTP_API mtp_status mtp_depth_keep_batch(mtp_depth * const * depths, const float * const * probabilities,
                                        const int32_t * n_drafted, int32_t n, int32_t others, int32_t * out);

/* Reports the time of a graph that drafted for n_sequences, n_tokens for the deepest of them. Call it
 * once per graph and leave draft_ms of the sequences' outcomes at 0. */
MTP_API mtp_status mtp_depth_report_draft(mtp_depth * depth, int32_t n_sequences, int32_t n_tokens, double ms);

/* Like mtp_depth_set_costs, for a session's own depth choosers. */
MTP_API mtp_status mtp_session_set_costs(mtp_session * session, const double * verify_ms,
                                         int32_t n_verify, const double * draft_ms, int32_t n_draft);

/* Begins with what the choice of depths had learned when `path` was written, and writes that file when the session is
 * freed. path: UTF-8. The caller gives each model, and each setting that changes what a batch costs, a file of its own; a
 * file of another head or version, or a damaged one, is ignored and replaced. Before anything is drafted. */
MTP_API mtp_status mtp_session_remember_depth(mtp_session * session, const char * path);

/* ---- suffix index ----
 *
 * Finds the longest suffix of a token sequence that also occurs earlier in it. The tokens that follow
 * the earlier occurrence serve as drafts (prompt lookup). Matches are up to 64 tokens long: a longer one is
 * no more likely to go on, and the bound makes every append and every removal of a token constant, also if
 * they alternate. The index takes about 65 bytes per token and is independent of any model. */

typedef struct mtp_suffix_index mtp_suffix_index;

#define MTP_MAX_INDEXED 16777216 /* tokens */

MTP_API mtp_status mtp_suffix_index_new(mtp_suffix_index ** out);
MTP_API void       mtp_suffix_index_free(mtp_suffix_index * index);

/* Appends tokens, each >= 0, in constant time per token, but for the growth of arrays. If the call fails, the
 * index is unchanged. */
MTP_API mtp_status mtp_suffix_index_append(mtp_suffix_index * index, const int32_t * tokens, int64_t n);

/* Removes all but the first `size` tokens, in constant time per token; needs no memory. */
MTP_API mtp_status mtp_suffix_index_truncate(mtp_suffix_index * index, int64_t size);

/* Finds the longest suffix, of up to 64 tokens, that also ends before the last token. out_length: its length,
 * 0 if there is none. out_next: the position of the token that follows the earlier occurrence. out_agreeing: how
 * many occurrences in a row up to the most recent one were followed by the same token, at most 4; 0 if there was
 * only one. After tokens were removed it may count some of those. */
MTP_API mtp_status mtp_suffix_index_match(const mtp_suffix_index * index, int64_t * out_length, int64_t * out_next,
                                          int32_t * out_agreeing);

/* Copies the n tokens that follow the match. out_n: n, or 0 if there is no match. */
MTP_API mtp_status mtp_suffix_index_propose(const mtp_suffix_index * index, int32_t * out, int32_t n,
                                            int32_t * out_n);

/* Returns the index's memory in bytes. */
MTP_API mtp_status mtp_suffix_index_bytes(const mtp_suffix_index * index, size_t * out);

/* ---- drafts from the text ----
 *
 * For runtimes other than a session: a suffix index of one sequence, the acceptance of its drafts, and the
 * choice between them and the drafts of a head. */

typedef struct mtp_text_drafts mtp_text_drafts;
typedef struct mtp_corpus mtp_corpus; /* an index of lookup files, see below */

MTP_API mtp_status mtp_text_drafts_new(mtp_text_drafts ** out);
MTP_API void       mtp_text_drafts_free(mtp_text_drafts * text);

/* Makes the text equal to `tokens`, each >= 0; n: at most MTP_MAX_INDEXED. It costs a comparison with the
 * tokens that are known, and constant time for each one that is new or removed. generated: whether those were
 * generated by the model, so that they tell how often drafts from the text are right. If the call fails, the
 * text is empty. */
MTP_API mtp_status mtp_text_drafts_set(mtp_text_drafts * text, const int32_t * tokens, int64_t n, bool generated);

/* Also drafts from an index of lookup files, which must outlive `text`; NULL: no longer. Many texts can share one. */
MTP_API mtp_status mtp_text_drafts_set_corpus(mtp_text_drafts * text, const mtp_corpus * corpus);

/* Drafts the tokens that follow the text, at most n, if they promise more tokens per millisecond than
 * head_depth (or MTP_DEPTH_AUTO) drafts of a head whose costs and outcomes `depth` knows; 0 without a head.
 * room: the most tokens that the head may draft with MTP_DEPTH_AUTO. out: [n]. out_n: 0 if the head promises more. */
MTP_API mtp_status mtp_text_drafts_plan(const mtp_text_drafts * text, mtp_depth * depth, int32_t head_depth,
                                        int32_t room, int32_t * out, int32_t n, int32_t * out_n);

/* Reports a cycle whose drafts came from the text, in place of mtp_depth_report. verify_ms, undo_ms: as in
 * mtp_cycle_outcome. */
MTP_API mtp_status mtp_depth_report_text(mtp_depth * depth, int32_t n_verified, int32_t n_accepted, double verify_ms,
                                         double undo_ms);

/* ---- index of lookup files ----
 *
 * An index of texts that do not change, such as the files of a project: a file that is written once,
 * mapped read-only and shared by sessions and processes. Sessions also draft from it. 8 bytes per token. */

/* Writes an index. tokens: the texts one after another, each followed by -1; n: at most MTP_MAX_INDEXED.
 * tokenizer: identifies the vocabulary, see mtp_tokenizer_fingerprint. */
MTP_API mtp_status mtp_corpus_write(const char * path, const int32_t * tokens, int64_t n, int32_t n_vocab,
                                    uint64_t tokenizer);

/* Maps an index. The file is fully validated: MTP_ERROR_FORMAT if it is damaged or was written for another
 * vocabulary. */
MTP_API mtp_status mtp_corpus_open(const char * path, int32_t n_vocab, uint64_t tokenizer, mtp_corpus ** out);
MTP_API void       mtp_corpus_free(mtp_corpus * corpus);

/* Finds the longest suffix of `tokens`, each >= 0, that occurs in a text and does not end it. out_length: its
 * length, at most 32, 0 if there is none. out_next: the position of the token that follows it. */
MTP_API mtp_status mtp_corpus_match(const mtp_corpus * corpus, const int32_t * tokens, int64_t n,
                                    int64_t * out_length, int64_t * out_next);

/* Copies up to n_out tokens that follow the match of mtp_corpus_match, to the end of that text. */
MTP_API mtp_status mtp_corpus_propose(const mtp_corpus * corpus, const int32_t * tokens, int64_t n, int32_t * out,
                                      int32_t n_out, int32_t * out_n);

/* Lets a session with max_lookup > 0 draft from an index, too, which must outlive it; NULL: no longer. */
MTP_API mtp_status mtp_session_set_corpus(mtp_session * session, const mtp_corpus * corpus);

/* Returns a fingerprint of a vocabulary. texts: [n_vocab], the text of each token, "" if it has none. */
MTP_API mtp_status mtp_tokenizer_fingerprint(const char * const * texts, int32_t n_vocab, uint64_t * out);

/* Returns that of the session's model. */
MTP_API mtp_status mtp_session_tokenizer(const mtp_session * session, uint64_t * out);

/* ---- log-probabilities ---- */

/* Computes the log-probability of each of n tokens by the logits in its row, and the n_top likeliest tokens of
 * each row. rows: [n], pointers to n_vocab logits. out: [n]. out_top_ids, out_top: [n, n_top], the likeliest token
 * first, of equal ones the lowest id; both unused if n_top is 0. n_threads share the rows. */
MTP_API mtp_status mtp_token_logprobs(const float * const * rows, const int32_t * tokens, int32_t n, int32_t n_vocab,
                                      int32_t n_top, int32_t n_threads, double * out, int32_t * out_top_ids,
                                      double * out_top);

#ifdef __cplusplus
}
#endif

#endif
