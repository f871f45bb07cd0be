// Rows to blocks, by a kernel or by ggml.
#pragma once

#include "job.h"

// The checked arguments of mtp_quantize_rows().
struct Rows {
    int           type;         // enum ggml_type, as the next
    int           source_type;
    const void *  source;
    int64_t       n_rows;
    int64_t       row_length;
    const float * importance;
};

void quantize_by_ggml(const Rows & rows, uint8_t * out);

// With n_not_finite, blocks with NaN or infinity are counted; without it, ggml quantizes them.
void quantize_by_kernel(const Rows & rows, Kernel kernel, uint8_t * out, int64_t * n_not_finite);

// The number of blocks that hold NaN or infinity.
int64_t count_not_finite(const Rows & rows);
