/* mtp.h: the C surface of mtp-gguf's native library.
 *
 * Two layers. The head (mtp_head_*) runs the Multi-Token Prediction block of a Qwen3.5 GGUF with
 * plain ggml: it drafts tokens from the trunk's hidden states. The session (mtp_session_*) runs a
 * llama.cpp context together with a head: prefill, draft, verify, roll back.
 *
 * Opaque handles, scalars and caller-owned buffers; every call that can fail returns an mtp_status
 * and leaves a sentence for mtp_last_error(). No C++ type and no exception crosses this header. A
 * handle belongs to one thread at a time.
 *
 * Words used throughout. Position p: index of a token in its sequence, from 0. Row: the pair that
 * the MTP block eats at position p, that is the token at p and the trunk's hidden state (after its
 * final norm, n_embd floats) of position p - 1. Depth: number of tokens drafted in one call. */
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

/* Raised whenever a signature or a struct below changes; a caller compares it with
 * mtp_api_version() before anything else. */
#define MTP_API_VERSION 4

/* Limits that keep graphs and buffers bounded; asking for more is MTP_ERROR_ARGUMENT. */
#define MTP_MAX_DEPTH 16
#define MTP_MAX_SEQUENCES 64

/* In the place of a depth: each cycle drafts as many tokens as pay at the moment, zero included. */
#define MTP_DEPTH_AUTO (-1)

typedef enum mtp_status {
    MTP_OK                = 0,
    MTP_ERROR_ARGUMENT    = 1, /* a value that the call does not accept */
    MTP_ERROR_FILE        = 2, /* a file cannot be read */
    MTP_ERROR_FORMAT      = 3, /* a file is read and is wrong */
    MTP_ERROR_NO_HEAD     = 4, /* a sound model file without an MTP block */
    MTP_ERROR_UNSUPPORTED = 5, /* sound, but not something this library runs */
    MTP_ERROR_MEMORY      = 6, /* an allocation failed */
    MTP_ERROR_BACKEND     = 7, /* ggml or llama.cpp failed */
    MTP_ERROR_FULL        = 8, /* no room left in a context or cache */
    MTP_ERROR_STATE       = 9, /* the call does not fit what was done before */
    MTP_ERROR_VERSION     = 10, /* another llama.cpp is loaded than this was built for */
    MTP_ERROR_INTERNAL    = 11, /* a bug here */
} mtp_status;

/* ---- library ---- */

/* The sentence left by the last failing call of this thread; "" when none failed. Valid until the
 * next failing call of this thread. */
MTP_API const char * mtp_last_error(void);

MTP_API int32_t      mtp_api_version(void);

/* The version of ggml and llama.cpp that this library was built for, e.g.
 * "ggml 0.25.3 (0c1e570), llama.cpp 0.5.0-dev". */
MTP_API const char * mtp_built_for(void);

/* MTP_ERROR_VERSION, with both versions named, unless the ggml and llama.cpp that this process has
 * loaded are those that the library was built for. */
MTP_API mtp_status   mtp_check_runtime(void);

/* ggml's name, for mtp_head_params.device, of the GPU that llama.cpp counts as number `index` (its
 * main_gpu); "CPU" when there is none. */
MTP_API const char * mtp_gpu_name(int32_t index);

/* Takes over the log of llama.cpp and ggml, for the whole process and all its threads. Only its last
 * lines are kept, those from now on; echo: everything also goes to stderr. */
MTP_API mtp_status   mtp_log_listen(bool echo);

/* The lines kept, oldest first, each ended by a newline. Valid until this thread asks again. */
MTP_API const char * mtp_log_last(void);

/* For programs: what would end the process without a word from now on (an assertion of ggml, a fault
 * in llama.cpp, a model file that is cut off while it is mapped) writes a sentence to stderr and ends it
 * with exit code 1. Signals that have a handler keep it. */
MTP_API mtp_status   mtp_tell_crashes(void);

/* ---- head ---- */

typedef struct mtp_head mtp_head;

typedef struct mtp_head_params {
    const char * trunk_path; /* file with token_embd.weight, where the head's file has none; or NULL */
    const char * device;     /* ggml's name of a device, e.g. "CPU", "CUDA0"; NULL: "CPU" */
    int32_t n_threads;       /* of the CPU device; >= 1 */
    int32_t n_ctx;           /* positions per sequence; >= 1 */
    int32_t n_seq_max;       /* sequences; 1 .. MTP_MAX_SEQUENCES */
    int32_t n_batch;         /* most rows fed in one graph evaluation; >= MTP_MAX_DEPTH + 1 */
    int32_t fastmtp_size;    /* rows of a ranked draft vocabulary to use; 0: all; -1: draft from the
                              * whole vocabulary even if the file has a list (layout `ids` only) */
} mtp_head_params;

/* "CPU", 2 threads, 512 positions, 1 sequence, 512 rows, whole list. */
MTP_API mtp_head_params mtp_head_default_params(void);

typedef enum mtp_draft_layout {
    MTP_DRAFT_NONE    = 0, /* drafts from the whole vocabulary */
    MTP_DRAFT_IDS     = 1,
    MTP_DRAFT_TABLE   = 2,
    MTP_DRAFT_SIDECAR = 3,
} mtp_draft_layout;

typedef struct mtp_head_info {
    int32_t n_embd;
    int32_t n_vocab;       /* of the target */
    int32_t n_draft_vocab; /* rows of the head in use */
    int32_t block;         /* N of blk.N */
    int32_t n_ctx;
    int32_t n_seq_max;
    int32_t layout;        /* an mtp_draft_layout */
    bool    moe;
    bool    tied;          /* the head's rows are the embedding's */
    bool    draws;         /* the device can run mtp_session_step_sampled's drafts */
    int64_t weight_bytes;  /* allocated for weights; rows used in place from the file not counted */
    int64_t mapped_bytes;  /* used in place from the mapped file */
    int64_t cache_bytes;   /* of all sequences once they are full; a sequence's part grows with it */
} mtp_head_info;

/* Loads the MTP block of a GGUF and its draft vocabulary. Nothing of the file is trusted. */
MTP_API mtp_status mtp_head_load(const char * path, const mtp_head_params * params, mtp_head ** out);
MTP_API void       mtp_head_free(mtp_head * head);
MTP_API mtp_status mtp_head_get_info(const mtp_head * head, mtp_head_info * out);

/* Copies the target ids of the draft vocabulary in rank order: exactly n_draft_vocab of them. */
MTP_API mtp_status mtp_head_get_draft_ids(const mtp_head * head, int32_t * out, size_t n);

/* Number of the first position after the rows of a sequence; 0 when it is empty. */
MTP_API mtp_status mtp_head_next_position(const mtp_head * head, int32_t seq, int32_t * out);

/* Feeds n_rows rows at positions first .. first + n_rows - 1 into the cache and drafts nothing.
 * `first` is the sequence's next position, or any position when the sequence is empty.
 * hidden: [n_rows][n_embd]. On failure the rows count as not fed. */
MTP_API mtp_status mtp_head_feed(mtp_head * head, int32_t seq, int32_t first, const int32_t * tokens,
                                 const float * hidden, int32_t n_rows);

/* Feeds as mtp_head_feed (n_rows >= 1), then drafts `depth` tokens that follow the last row, in one
 * graph evaluation. The cache then ends after the last row fed: drafts are never part of it.
 * out_tokens, out_probs: [depth], target ids and their probabilities among the draft vocabulary.
 * out_logits: [depth][n_draft_vocab] or NULL. */
MTP_API mtp_status mtp_head_draft(mtp_head * head, int32_t seq, int32_t first, const int32_t * tokens,
                                  const float * hidden, int32_t n_rows, int32_t depth,
                                  int32_t * out_tokens, float * out_probs, float * out_logits);

/* Forgets the rows at positions >= position; 0 empties the sequence. */
MTP_API mtp_status mtp_head_rollback(mtp_head * head, int32_t seq, int32_t position);

/* Bytes of the rows that a sequence has. */
MTP_API mtp_status mtp_head_rows_size(const mtp_head * head, int32_t seq, size_t * out);

/* Copies these rows out. n: exactly mtp_head_rows_size. */
MTP_API mtp_status mtp_head_get_rows(const mtp_head * head, int32_t seq, void * out, size_t n);

/* Puts rows that mtp_head_get_rows copied from a head of the same model in the place of what a
 * sequence has. They end before position `end`. On failure the sequence is empty. */
MTP_API mtp_status mtp_head_set_rows(mtp_head * head, int32_t seq, int32_t end, const void * rows, size_t n);

/* The names of the ggml ops that a graph of this head uses, sorted, joined by spaces, for checks
 * against a backend. The text lives as long as the head. */
MTP_API mtp_status mtp_head_ops(mtp_head * head, const char ** out);

/* ---- session ----
 *
 * A trunk (a llama.cpp context that the caller owns) and a head. The trunk's memory is changed
 * through the session alone, or mtp_session_sync() is called afterwards. One cycle:
 *
 *   mtp_cycle_begin   drafts after a token that the trunk has not seen, and decodes both
 *   mtp_cycle_row     makes row i available: what the trunk says after the token and i drafts
 *   mtp_cycle_end     says how many drafts were accepted; the others are undone
 *
 * or mtp_session_step, which is the three of them around a sampler. Undoing is put off until the
 * trunk is needed again, so that mtp_seq_rm can take back more in the same stroke. */

struct llama_context;
struct llama_sampler;

typedef struct mtp_session mtp_session;

/* How rejected drafts leave the trunk's recurrent state, which cannot be cut like a KV cache. */
typedef enum mtp_rollback {
    MTP_ROLLBACK_SNAPSHOT   = 0, /* the context keeps n_rs_seq snapshots; needs n_rs_seq >= depth
                                 * and n_ubatch >= n_rs_seq + 2 */
    MTP_ROLLBACK_CHECKPOINT = 1, /* copy on the device, restore, decode the accepted tokens again */
    MTP_ROLLBACK_TWO_PHASE  = 2, /* decode a draft only once it is accepted: one token at a time */
    MTP_ROLLBACK_HOST       = 3, /* as CHECKPOINT, the copy in host memory */
} mtp_rollback;

typedef struct mtp_session_params {
    int32_t rollback;  /* an mtp_rollback */
    int32_t max_depth; /* 0 .. MTP_MAX_DEPTH; 0: never drafts */
    int32_t max_rows;  /* most tokens verified in one batch, the others once those are accepted;
                        * 0: all at once. For kernels that change with the size of a batch */
    int32_t min_rows;  /* fewest tokens computed in one batch of a cycle, 1 or 2; 0: 1. With 2 a lone
                        * token gets a companion, taken back at once, so that kernels for one row
                        * are never met. Needs n_rs_seq >= 1, and costs the context's last position */
    int32_t max_lookup; /* 0 .. MTP_MAX_DEPTH: most tokens drafted from the text in one cycle; 0: none */
} mtp_session_params;

/* Sums since the session began or mtp_session_reset_stats(). Position 0 is the first draft. */
typedef struct mtp_session_stats {
    int64_t cycles;
    int64_t tokens;    /* that the cycles gave: accepted drafts and one more each */
    int64_t rollbacks; /* cycles whose rejected drafts had to be undone */
    int64_t prefilled; /* tokens decoded by mtp_session_decode */
    int64_t drafted[MTP_MAX_DEPTH];
    int64_t accepted[MTP_MAX_DEPTH];
    double  prefill_ms;      /* the trunk's part of mtp_session_decode */
    double  prefill_head_ms; /* the head's part */
    double  draft_ms;
    double  verify_ms;
    double  sample_ms; /* by mtp_session_step */
    double  rollback_ms;
    int64_t text_cycles;   /* cycles whose drafts came from the text; drafted and accepted above are */
    int64_t text_drafted;  /* those of the head alone */
    int64_t text_accepted;
} mtp_session_stats;

/* head: or NULL, for a session that never drafts; one that no other session uses. Both must outlive
 * the session. */
MTP_API mtp_status mtp_session_new(struct llama_context * context, mtp_head * head,
                                   const mtp_session_params * params, mtp_session ** out);
MTP_API void       mtp_session_free(mtp_session * session);
MTP_API mtp_status mtp_session_get_stats(const mtp_session * session, mtp_session_stats * out);
MTP_API mtp_status mtp_session_reset_stats(mtp_session * session);

/* Number of tokens of a sequence, those of rejected drafts not counted. */
MTP_API mtp_status mtp_session_length(const mtp_session * session, int32_t seq, int32_t * out);

/* Appends tokens to a sequence: trunk and head. Logits are left for the last token, or for all
 * (all_logits; row i of the last batch of the context's n_batch). MTP_ERROR_FULL where they do not
 * fit, which in a unified KV cache other sequences decide, too: nothing is changed. On another failure
 * after its arguments were checked the sequence is empty. */
MTP_API mtp_status mtp_session_decode(mtp_session * session, int32_t seq, const int32_t * tokens,
                                      int32_t n, bool all_logits);

/* token: the next of the sequence, not yet decoded. depth: drafts wanted of the head, at most
 * max_depth, or MTP_DEPTH_AUTO; fewer come where the context is full or the head knows too little.
 * Where the text itself promises more tokens per millisecond (max_lookup), drafts come from there
 * instead, with out_probs of 1. out_tokens, out_probs: [MTP_MAX_DEPTH], or the largest of depth (or
 * max_depth) and max_lookup. Failures are those of mtp_session_decode: no cycle
 * is open after one. */
MTP_API mtp_status mtp_cycle_begin(mtp_session * session, int32_t seq, int32_t token, int32_t depth,
                                   int32_t * out_tokens, float * out_probs, int32_t * out_n);

/* Rows are asked for in order, each once its draft is accepted. *out: the index for
 * llama_get_logits_ith and llama_sampler_sample. Where llama.cpp fails the sequence is empty and the
 * cycle ended. */
MTP_API mtp_status mtp_cycle_row(mtp_session * session, int32_t row, int32_t * out);

/* n_accepted: of the drafts of this cycle. The sequence is then 1 + n_accepted tokens longer. */
MTP_API mtp_status mtp_cycle_end(mtp_session * session, int32_t n_accepted);

/* A whole cycle. sampler: decides each token (and accepts it); NULL: the most likely one. A draft
 * is accepted when it is what the sampler chooses. depth and out as in mtp_cycle_begin, out being one
 * longer; *out_n of them are new, and the last one is not yet decoded: it is the next cycle's token. */
MTP_API mtp_status mtp_session_step(mtp_session * session, int32_t seq, int32_t token, int32_t depth,
                                    struct llama_sampler * sampler, int32_t * out, int32_t * out_n);

/* Whatever chooses a token of a row, here and below, checks the row's logits: MTP_ERROR_BACKEND where
 * one of them is NaN or infinite, -Inf excepted, or where there is nothing but -Inf. */

/* A chain whose distribution is known: top-k, top-p, min-p, temperature, in this order, as
 * llama.cpp's samplers of these names. */
typedef struct mtp_sampling {
    float    temperature; /* > 0 */
    int32_t  top_k;       /* <= 0: all */
    float    top_p;       /* 1: all */
    float    min_p;       /* 0: all */
    uint64_t seed;
} mtp_sampling;

/* Starts the random numbers of mtp_session_sample and mtp_session_step_sampled anew. */
MTP_API mtp_status mtp_session_set_sampling(mtp_session * session, const mtp_sampling * sampling);

/* Draws a token from a row, as mtp_cycle_row gives it; -1: the last row. */
MTP_API mtp_status mtp_session_sample(mtp_session * session, int32_t row, int32_t * out);

/* As mtp_session_step, by rejection sampling: drafts are drawn from the head's own distribution q
 * (temperature and a cutoff like the chain's last one) and accepted with probability min(1, p / q), p being the trunk's;
 * in the place of a rejected one a token is drawn from max(0, p - q). The distribution of the text
 * is p, whatever q is. */
MTP_API mtp_status mtp_session_step_sampled(mtp_session * session, int32_t seq, int32_t token,
                                            int32_t depth, int32_t * out, int32_t * out_n);

/* The most likely token of a row, as mtp_cycle_row gives it; -1: the last row. */
MTP_API mtp_status mtp_session_argmax(mtp_session * session, int32_t row, int32_t * out);

/* Removes the tokens at positions p0 .. p1 - 1 from trunk and head; p1 < 0: to the end. What the
 * recurrent state cannot do is refused with the reason, and nothing is changed: only a tail can
 * go, and only as far back as rollback reaches, or everything. To remove nothing is to undo rejected
 * drafts now. To remove everything also ends a cycle of this sequence that somebody left open. */
MTP_API mtp_status mtp_seq_rm(mtp_session * session, int32_t seq, int32_t p0, int32_t p1);

/* Takes the trunk's memory as it now is, changed by others (a loaded state). The head forgets the
 * sequence and learns on from here. */
MTP_API mtp_status mtp_session_sync(mtp_session * session, int32_t seq);

/* Makes sequence `to` hold what `from` holds, trunk and head, in the place of what it held: the
 * attention cache shared where llama.cpp can, the recurrent cell copied. What is undone later in one
 * does not touch the other. On failure `to` is empty. */
MTP_API mtp_status mtp_seq_cp(mtp_session * session, int32_t from, int32_t to);

/* ---- checkpoint ----
 *
 * The state of a sequence at one length, to come back to: trunk and head, so that what follows is
 * what followed. A checkpoint belongs to the caller and does not hold on to its session. */

typedef struct mtp_checkpoint mtp_checkpoint;

typedef enum mtp_checkpoint_kind {
    /* What cannot be cut, the recurrent state; everything else stays where it is. Good for this
     * session, for as long as none of its tokens is removed, in any sequence that holds them. */
    MTP_CHECKPOINT_DEVICE = 0, /* in device memory, which has room for one copy of each sequence: a
                                * newer one ends it, and so does a cycle of MTP_ROLLBACK_CHECKPOINT */
    MTP_CHECKPOINT_HOST   = 1, /* in host memory */
    /* Bytes that outlive session and process, for the same model. */
    MTP_CHECKPOINT_HEAD   = 2, /* the head's part, for a caller that keeps the trunk's state itself */
    MTP_CHECKPOINT_WHOLE  = 3, /* both */
} mtp_checkpoint_kind;

typedef struct mtp_checkpoint_info {
    int32_t kind;          /* an mtp_checkpoint_kind */
    int32_t length;        /* tokens */
    int64_t bytes;         /* held in host memory */
    int64_t written_bytes; /* for mtp_checkpoint_write; 0: cannot be written */
} mtp_checkpoint_info;

/* Saves a sequence that is not empty, as mtp_session_length has it: rejected drafts are undone. */
MTP_API mtp_status mtp_checkpoint_save(mtp_session * session, int32_t seq, int32_t kind, mtp_checkpoint ** out);

/* Brings a checkpoint back into a sequence, as often as wanted. There are no logits of it: decode a
 * token next. What does not fit is refused and nothing is changed: tokens gone, a copy on the device
 * that is gone, another model (MTP_ERROR_STATE), a context without room for it (MTP_ERROR_FULL).
 * On another failure the sequence is empty. A whole one brings back the trunk alone where
 * the head is another one or none; a head's needs the trunk's state in place before. */
MTP_API mtp_status mtp_checkpoint_restore(mtp_session * session, int32_t seq, const mtp_checkpoint * checkpoint);

MTP_API void       mtp_checkpoint_free(mtp_checkpoint * checkpoint);
MTP_API mtp_status mtp_checkpoint_get_info(const mtp_checkpoint * checkpoint, mtp_checkpoint_info * out);

/* Writes the bytes of a checkpoint; n: exactly its written_bytes. */
MTP_API mtp_status mtp_checkpoint_write(const mtp_checkpoint * checkpoint, void * out, size_t n);

/* Reads what mtp_checkpoint_write wrote. Nothing of the bytes is trusted: MTP_ERROR_FORMAT says what
 * is wrong. Whether the model is the right one is seen when it is restored. */
MTP_API mtp_status mtp_checkpoint_read(const void * data, size_t n, mtp_checkpoint ** out);

/* ---- how deep to draft ----
 *
 * Decides by itself, from costs and outcomes alone: it reads no clock and draws no random number. A
 * session uses one where a depth is MTP_DEPTH_AUTO; other runtimes can use it for themselves. One
 * cycle: mtp_depth_plan, draft, mtp_depth_keep, verify, mtp_depth_report. */

typedef struct mtp_depth mtp_depth;

/* What a cycle of n_drafted drafts did; of these the first n_verified were verified and the first
 * n_accepted of them accepted. */
typedef struct mtp_cycle_outcome {
    int32_t n_drafted;
    int32_t n_verified;
    int32_t n_accepted;
    const float * probabilities; /* [n_drafted], the head's */
    float  next_right; /* with all verified drafts accepted and one more drafted: 1 if the token that
                        * came in its place was the draft, 0 if not, a chance between; < 0: unknown */
    double draft_ms;   /* 0: not measured, as the two below */
    double verify_ms;
    double undo_ms;    /* of taking rejected drafts back */
} mtp_cycle_outcome;

/* max_depth: 0 .. MTP_MAX_DEPTH. */
MTP_API mtp_status mtp_depth_new(int32_t max_depth, mtp_depth ** out);
MTP_API void       mtp_depth_free(mtp_depth * depth);

/* For another sequence of the same runtime, whose drafts may go into one batch with those of `other`:
 * costs hold for both, whoever reports them; outcomes for the one that they are reported to. */
MTP_API mtp_status mtp_depth_new_beside(const mtp_depth * other, mtp_depth ** out);

/* How many sequences, 1 .. MTP_MAX_SEQUENCES, share the next batches; 1 at first. */
MTP_API mtp_status mtp_depth_share(mtp_depth * depth, int32_t n_sequences);

/* What a batch took that verified n_tokens of all its sequences together, once for each batch; the
 * verify_ms of their outcomes are then 0. */
MTP_API mtp_status mtp_depth_report_batch(mtp_depth * depth, int32_t n_tokens, double ms);

/* Costs that are known beforehand: verify_ms[i] of a batch of i + 1 tokens, draft_ms[i] of i + 1
 * drafts; at most MTP_MAX_DEPTH + 1 and MTP_MAX_DEPTH of them. 0: not known. */
MTP_API mtp_status mtp_depth_set_costs(mtp_depth * depth, const double * verify_ms, int32_t n_verify,
                                       const double * draft_ms, int32_t n_draft);

/* Tokens to draft in the next cycle, 0 .. room. */
MTP_API mtp_status mtp_depth_plan(mtp_depth * depth, int32_t room, int32_t * out);

/* How many of n finished drafts to verify. drawn: they were drawn at random, so that none of them
 * may decide about itself. */
MTP_API mtp_status mtp_depth_keep(const mtp_depth * depth, const float * probabilities, int32_t n,
                                  bool drawn, int32_t * out);
MTP_API mtp_status mtp_depth_report(mtp_depth * depth, const mtp_cycle_outcome * outcome);

/* The same for what a session knows of its own costs before it has measured them. */
MTP_API mtp_status mtp_session_set_costs(mtp_session * session, const double * verify_ms,
                                         int32_t n_verify, const double * draft_ms, int32_t n_draft);

/* ---- suffix index ----
 *
 * The longest suffix of a sequence of tokens that occurs earlier in it, and the tokens that follow
 * there: drafts from the text itself. About 130 bytes per token of text. Knows no model. */

typedef struct mtp_suffix_index mtp_suffix_index;

#define MTP_MAX_INDEXED 16777216 /* tokens */

MTP_API mtp_status mtp_suffix_index_new(mtp_suffix_index ** out);
MTP_API void       mtp_suffix_index_free(mtp_suffix_index * index);

/* Appends tokens, each >= 0, in amortized constant time per token. An error leaves the index as it
 * was. */
MTP_API mtp_status mtp_suffix_index_append(mtp_suffix_index * index, const int32_t * tokens, int64_t n);

/* Keeps the first `size` tokens. */
MTP_API mtp_status mtp_suffix_index_truncate(mtp_suffix_index * index, int64_t size);

/* out_length: length of the longest suffix that also ends before the last token, 0 if there is none.
 * out_next: position of the token that follows its earlier occurrence. */
MTP_API mtp_status mtp_suffix_index_match(const mtp_suffix_index * index, int64_t * out_length,
                                          int64_t * out_next);

/* Copies the n tokens that follow the match; out_n: n, or 0 without a match. */
MTP_API mtp_status mtp_suffix_index_propose(const mtp_suffix_index * index, int32_t * out, int32_t n,
                                            int32_t * out_n);

/* Memory of the index. */
MTP_API mtp_status mtp_suffix_index_bytes(const mtp_suffix_index * index, size_t * out);

#ifdef __cplusplus
}
#endif

#endif
