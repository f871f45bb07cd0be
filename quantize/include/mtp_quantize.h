/* mtp_quantize.h: rows of floats to ggml's block formats, the bytes of ggml_quantize_chunk.
 *
 * Kernels for the types named in docs/quantize.md, one compiled copy for each instruction set, the
 * best one chosen by what the processor has. Before its first use a kernel is compared with the
 * linked ggml on a few thousand blocks; where a byte differs (a ggml that was compiled to round
 * differently), and for every other type, ggml itself does the work. The bytes are ggml's either
 * way. All functions may be called from several threads at once. */
#ifndef MTP_QUANTIZE_H
#define MTP_QUANTIZE_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define MTP_QUANTIZE_API __declspec(dllexport)
#else
#define MTP_QUANTIZE_API __attribute__((visibility("default")))
#endif

/* Raised whenever a signature changes. */
#define MTP_QUANTIZE_API_VERSION 1

typedef enum mtp_quantize_status {
    MTP_QUANTIZE_OK           = 0,
    MTP_QUANTIZE_ERROR_TYPE   = 1, /* not a type, or a pair of types, that can be quantized */
    MTP_QUANTIZE_ERROR_SIZE   = 2, /* a row is no multiple of the type's block, or a size < 0 */
    MTP_QUANTIZE_ERROR_WEIGHTS = 3, /* the type needs importance weights and none are given */
    MTP_QUANTIZE_ERROR_TARGET = 4, /* MTP_QUANTIZE_TARGET names nothing that runs here */
    MTP_QUANTIZE_ERROR_MEMORY = 5,
} mtp_quantize_status;

MTP_QUANTIZE_API int32_t mtp_quantize_api_version(void);

/* Quantize `n_rows` contiguous rows of `row_length` values.
 *
 * type, source_type: ids of enum ggml_type; the source is F32, F16 or BF16.
 * importance: `row_length` weights, one for each column, or NULL.
 * out: n_rows * ggml_row_size(type, row_length) bytes.
 * n_not_finite: NULL, and NaN or infinity are treated as ggml treats them; or, with a block-wise
 *   type, receives the number of blocks that hold such values, whose bytes are then unspecified
 *   (and ggml, which may assert that there are none, never sees them). */
MTP_QUANTIZE_API mtp_quantize_status mtp_quantize_rows(
    int32_t type, int32_t source_type, const void * rows, int64_t n_rows, int64_t row_length,
    const float * importance, void * out, int64_t * n_not_finite);

/* What quantizes this type: the name of an instruction set, or "ggml" followed by ": " and the
 * reason where a kernel exists but is not used. Runs the comparison if it has not run yet. */
MTP_QUANTIZE_API const char * mtp_quantize_kernel(int32_t type, bool with_importance);

/* The instruction sets that can be used here, best first, separated by spaces; "ggml" is the last.
 * The environment variable MTP_QUANTIZE_TARGET, read at the first call, forces one of them. */
MTP_QUANTIZE_API const char * mtp_quantize_targets(void);

#ifdef __cplusplus
}
#endif
#endif
