// The C API: it checks arguments and lets no exception through.
#include "mtp_quantize.h"

#include "choose.h"
#include "ggml.h"
#include "rows.h"

#include <new>

namespace {

bool can_quantize(int32_t type) {
    if (type < 0 || type >= GGML_TYPE_COUNT) return false;
    if (type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) return true;
    // Q8_1 and Q8_K exist only during computation.
    return ggml_is_quantized((ggml_type) type) && type != GGML_TYPE_Q8_1 && type != GGML_TYPE_Q8_K;
}

bool can_read(int32_t type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

mtp_quantize_status quantize(const Rows & rows, void * out, int64_t * n_not_finite) {
    if (!can_quantize(rows.type) || !can_read(rows.source_type)) return MTP_QUANTIZE_ERROR_TYPE;
    const ggml_type type = (ggml_type) rows.type;
    if (rows.n_rows < 0 || rows.row_length < 0 || rows.row_length % ggml_blck_size(type)) {
        return MTP_QUANTIZE_ERROR_SIZE;
    }
    if (!rows.importance && ggml_quantize_requires_imatrix(type)) return MTP_QUANTIZE_ERROR_WEIGHTS;
    if (!target_exists()) return MTP_QUANTIZE_ERROR_TARGET;
    if (n_not_finite) *n_not_finite = 0;
    if (!rows.n_rows || !rows.row_length) return MTP_QUANTIZE_OK;

    const KernelSet::BySource & kernels = choose(rows.type, rows.importance).kernels;
    const Kernel kernel = rows.source_type == GGML_TYPE_F32   ? kernels.f32
                          : rows.source_type == GGML_TYPE_F16 ? kernels.f16
                                                              : kernels.bf16;
    if (kernel) {
        quantize_by_kernel(rows, kernel, (uint8_t *) out, n_not_finite);
        return MTP_QUANTIZE_OK;
    }
    if (n_not_finite && ggml_is_quantized(type)) {
        *n_not_finite = count_not_finite(rows);
        if (*n_not_finite) return MTP_QUANTIZE_OK;
    }
    quantize_by_ggml(rows, (uint8_t *) out);
    return MTP_QUANTIZE_OK;
}

}  // namespace

int32_t mtp_quantize_api_version(void) { return MTP_QUANTIZE_API_VERSION; }

mtp_quantize_status mtp_quantize_rows(
    int32_t type, int32_t source_type, const void * rows, int64_t n_rows, int64_t row_length,
    const float * importance, void * out, int64_t * n_not_finite) {
    try {
        return quantize({type, source_type, rows, n_rows, row_length, importance}, out, n_not_finite);
    } catch (const std::bad_alloc &) {
        return MTP_QUANTIZE_ERROR_MEMORY;
    }
}

const char * mtp_quantize_kernel(int32_t type, bool with_importance) {
    if (!can_quantize(type)) return "ggml";
    try {
        return choose(type, with_importance).name;
    } catch (const std::bad_alloc &) {
        return "ggml: out of memory";
    }
}

const char * mtp_quantize_targets(void) { return target_names(); }
