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
#define MTP_API_VERSION 1

/* Limits that keep graphs and buffers bounded; asking for more is MTP_ERROR_ARGUMENT. */
#define MTP_MAX_DEPTH 16
#define MTP_MAX_SEQUENCES 64

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
    int64_t weight_bytes;  /* allocated for weights; rows used in place from the file not counted */
    int64_t mapped_bytes;  /* used in place from the mapped file */
    int64_t cache_bytes;
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

/* The names of the ggml ops that a graph of this head uses, sorted, joined by spaces, for checks
 * against a backend. The text lives as long as the head. */
MTP_API mtp_status mtp_head_ops(mtp_head * head, const char ** out);

#ifdef __cplusplus
}
#endif

#endif
