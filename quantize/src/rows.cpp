#include "rows.h"

#include "ggml.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace {

const void * value_at(const Rows & rows, int64_t index) {
    return (const char *) rows.source + index * (int64_t) ggml_type_size((ggml_type) rows.source_type);
}

// `count` values from `index` on as F32; converted into `scratch` if stored in another type.
const float * as_f32(const Rows & rows, int64_t index, int64_t count, std::vector<float> & scratch) {
    const void * source = value_at(rows, index);
    if (rows.source_type == GGML_TYPE_F32) return (const float *) source;
    scratch.resize(count);
    if (rows.source_type == GGML_TYPE_F16) {
        ggml_fp16_to_fp32_row((const ggml_fp16_t *) source, scratch.data(), count);
    } else {
        ggml_bf16_to_fp32_row((const ggml_bf16_t *) source, scratch.data(), count);
    }
    return scratch.data();
}

// The context of `leave`.
struct Context {
    const Rows & rows;
    int64_t      length;  // of a block
    int64_t *    n_not_finite;
};

void leave_to_ggml(const Job & job, int64_t block, bool is_finite) {
    const Context & context = *(const Context *) job.context;
    if (!is_finite && context.n_not_finite) {
        ++*context.n_not_finite;
        return;
    }
    const Rows &       rows   = context.rows;
    const int64_t      length = context.length;
    std::vector<float> scratch;
    const float * values     = as_f32(rows, block * length, length, scratch);
    const float * importance = rows.importance;
    if (importance) importance += block % job.blocks_per_row * length;
    uint8_t * out = job.out + block * ggml_type_size((ggml_type) rows.type);
    ggml_quantize_chunk((ggml_type) rows.type, values, out, 0, 1, length, importance);
}

}  // namespace

void quantize_by_ggml(const Rows & rows, uint8_t * out) {
    const ggml_type type = (ggml_type) rows.type;
    // If rows must be converted first, only a few are processed at a time, to keep the copy small.
    const bool    is_f32 = rows.source_type == GGML_TYPE_F32;
    const int64_t step   = is_f32 ? rows.n_rows : std::max<int64_t>(1, 16384 / rows.row_length);
    std::vector<float> scratch;
    for (int64_t row = 0; row < rows.n_rows; row += step) {
        const int64_t n = std::min(step, rows.n_rows - row);
        const float * values = as_f32(rows, row * rows.row_length, n * rows.row_length, scratch);
        out += ggml_quantize_chunk(type, values, out, 0, n, rows.row_length, rows.importance);
    }
}

void quantize_by_kernel(const Rows & rows, Kernel kernel, uint8_t * out, int64_t * n_not_finite) {
    const int64_t length  = ggml_blck_size((ggml_type) rows.type);
    Context       context = {rows, length, n_not_finite};
    const int64_t per_row = rows.row_length / length;
    kernel({rows.source, rows.n_rows * per_row, per_row, rows.importance, out, leave_to_ggml, &context});
}

int64_t count_not_finite(const Rows & rows) {
    const int64_t length   = ggml_blck_size((ggml_type) rows.type);
    const int64_t n_blocks = rows.n_rows * (rows.row_length / length);
    std::vector<float> scratch;
    int64_t count = 0;
    for (int64_t block = 0; block < n_blocks; ++block) {
        const float * x = as_f32(rows, block * length, length, scratch);
        float poison = 0;  // stays zero while all values are finite
        for (int64_t i = 0; i < length; ++i) poison += x[i] - x[i];
        count += poison != 0;
    }
    return count;
}
