// Operations on rows of floats: CONCAT, SSM_CONV, RMS_NORM, MUL, SCALE, ARGMAX, CPY, GET_ROWS.

#include "operation.h"
#include "states.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace mtp {

namespace {

constexpr int64_t least_long_row = 16384;  // shorter ones take no longer than waking the other threads

float float_param(const ggml_tensor * op, int i) {
    float value;
    memcpy(&value, op->op_params + i, sizeof(value));
    return value;
}

// Two rows, as long as it takes, with the same rest.
void shrink_long_rows(small_case::tensor & t) {
    t.ne[0] = std::min<int64_t>(t.ne[0], 19968 + t.ne[0] % 64);
    for (int i = 1; i < 4; i++) {
        t.ne[i] = std::min<int64_t>(t.ne[i], 2);
    }
}

void shrink_rows(small_case::tensor & t, int64_t most) {
    t.ne[1] = std::min(t.ne[1], most);
    t.ne[2] = std::min<int64_t>(t.ne[2], 2);
    t.ne[3] = std::min<int64_t>(t.ne[3], 2);
}

// CONCAT: rows are taken some at a time, from one plane and one or both sources.

bool concat_fits(const kernel_set &, const ggml_tensor * op) {
    const int dim = op->op_params[0];
    if (dim < 0 || dim > 3 || op->type != GGML_TYPE_F32 || op->nb[0] != sizeof(float)) {
        return false;
    }
    for (int i = 0; i < 4; i++) {
        const int64_t a = op->src[0]->ne[i], b = op->src[1]->ne[i];
        if (op->ne[i] != (i == dim ? a + b : a) || (i != dim && a != b)) {
            return false;
        }
    }
    return op->src[0]->type == GGML_TYPE_F32 && op->src[1]->type == GGML_TYPE_F32;
}

bool concat(const kernel_set & kernels, const task & task, ggml_tensor * op) {
    const ggml_tensor * a = op->src[0];
    const ggml_tensor * b = op->src[1];
    const int dim = op->op_params[0];
    int64_t offset[4] = {};
    offset[dim] = a->ne[dim];

    const int64_t last = task.last(rows_of(op));
    for (int64_t i = task.first(rows_of(op)), n; i < last; i += n) {
        const int64_t i1 = i % op->ne[1], i2 = i / op->ne[1] % op->ne[2], i3 = i / op->ne[1] / op->ne[2];
        n = std::min(op->ne[1] - i1, last - i);
        if (dim == 1 && i1 < a->ne[1]) {
            n = std::min(n, a->ne[1] - i1);
        }
        char * y = (char *) op->data + i1 * op->nb[1] + i2 * op->nb[2] + i3 * op->nb[3];
        const bool in_a = i1 < a->ne[1] && i2 < a->ne[2] && i3 < a->ne[3];
        if (in_a) {
            const char * x = (const char *) a->data + i1 * a->nb[1] + i2 * a->nb[2] + i3 * a->nb[3];
            kernels.copy_block(y, op->nb[0], op->nb[1], x, a->nb[0], a->nb[1], a->ne[0], n);
        }
        if (!in_a || dim == 0) {
            const char * x = (const char *) b->data + (i1 - offset[1]) * b->nb[1] + (i2 - offset[2]) * b->nb[2] + (i3 - offset[3]) * b->nb[3];
            kernels.copy_block(y + offset[0] * op->nb[0], op->nb[0], op->nb[1], x, b->nb[0], b->nb[1], b->ne[0], n);
        }
    }
    return true;
}

// Rows that lie across are copied in blocks of up to 16 by 16.
void concat_shrink(const ggml_tensor * op, small_case & small) {
    const int dim = op->op_params[0];
    for (int i = 0; i < 4; i++) {
        for (int s = 0; s < 2; s++) {
            small.src[s].ne[i] = std::min<int64_t>(small.src[s].ne[i], i == 0 ? 40 : i == 1 ? 150 : 2);
        }
        small.result.ne[i] = small.src[0].ne[i] + (i == dim ? small.src[1].ne[i] : 0);
    }
}

// SSM_CONV: some channels for each thread, some tokens in a pass over them.

bool convolution_fits(const kernel_set &, const ggml_tensor * op) {
    const ggml_tensor * x = op->src[0];  // [taps - 1 + tokens, channels, sequences]
    const ggml_tensor * c = op->src[1];  // [taps, channels]
    return is_float(x) && is_float(c) && is_float(op) && x->nb[1] == x->ne[0] * sizeof(float) && c->nb[1] == c->ne[0] * sizeof(float) &&
           c->ne[1] == x->ne[1] && op->ne[0] == c->ne[1] && op->ne[1] == x->ne[0] - c->ne[0] + 1 && op->ne[2] == x->ne[2] &&
           x->ne[3] == 1 && c->ne[2] == 1 && c->ne[3] == 1;
}

bool convolution(const kernel_set & kernels, const task & task, ggml_tensor * op) {
    const ggml_tensor * x = op->src[0];
    const ggml_tensor * c = op->src[1];
    const int taps = (int) c->ne[0], tokens = (int) op->ne[1];
    const int64_t first = task.first(op->ne[0]), last = task.last(op->ne[0]);
    // Vectors write whole cache lines of x, so more tokens at a time read s in longer runs. Without them, a cache line of
    // s should serve all of its tokens before the next channel.
    const int at_once = taps == row_taps ? 64 : 8;
    for (int64_t s = 0; s < op->ne[2]; s++) {
        const float * from = (const float *) ((const char *) x->data + first * x->nb[1] + s * x->nb[2]);
        const float * by = (const float *) ((const char *) c->data + first * c->nb[1]);
        float * to = (float *) ((char *) op->data + s * op->nb[2]) + first;
        for (int t = 0; t < tokens; t += at_once) {
            kernels.convolve(from, by, to, taps, (int) x->ne[0], op->nb[1] / sizeof(float), (int) (last - first), t,
                             std::min(t + at_once, tokens));
        }
    }
    return true;
}

void convolution_shrink(const ggml_tensor *, small_case & small) {
    const int64_t tokens = std::min<int64_t>(small.result.ne[1], 19), channels = std::min<int64_t>(small.result.ne[0], 128 + small.result.ne[0] % 64);
    small.src[0].ne[0] = small.src[1].ne[0] - 1 + tokens;
    small.src[0].ne[1] = small.src[1].ne[1] = small.result.ne[0] = channels;
    small.result.ne[1] = tokens;
    small.src[0].ne[2] = small.result.ne[2] = std::min<int64_t>(small.result.ne[2], 2);
}

// RMS_NORM

bool rms_norm_fits(const kernel_set &, const ggml_tensor * op) {
    return is_float(op->src[0]) && is_float(op) && same_shape(op, op->src[0]) && float_param(op, 0) >= 0.0f;
}

bool rms_norm(const kernel_set & kernels, const task & task, ggml_tensor * op) {
    const ggml_tensor * x = op->src[0];
    const int64_t n = x->ne[0];
    const float eps = float_param(op, 0);
    for (int64_t i = task.first(rows_of(x)); i < task.last(rows_of(x)); i++) {
        const float * from = (const float *) row_at(x, i);
        const float mean = (float) (kernels.sum_of_squares(from, n) / n);
        kernels.scale(from, nullptr, (float *) row_at(op, i), n, 1.0f / sqrtf(mean + eps));
    }
    return true;
}

void rms_norm_shrink(const ggml_tensor *, small_case & small) {
    shrink_rows(small.src[0], 5);
    std::copy_n(small.src[0].ne + 1, 3, small.result.ne + 1);
}

// MUL of each row by one number, or of all rows by the same row of weights

bool multiply_fits(const kernel_set &, const ggml_tensor * op) {
    const ggml_tensor * x = op->src[0];
    const ggml_tensor * by = op->src[1];
    const bool numbers = by->ne[0] == 1 && by->ne[1] == x->ne[1] && by->ne[2] == x->ne[2] && by->ne[3] == x->ne[3];
    const bool weights = by->ne[0] == x->ne[0] && rows_of(by) == 1 && is_float(by);
    return is_float(x) && is_float(op) && same_shape(op, x) && by->type == GGML_TYPE_F32 && (numbers || weights);
}

bool multiply(const kernel_set & kernels, const task & task, ggml_tensor * op) {
    const ggml_tensor * x = op->src[0];
    const ggml_tensor * by = op->src[1];
    const float * weights = by->ne[0] == 1 ? nullptr : (const float *) by->data;
    for (int64_t i = task.first(rows_of(x)); i < task.last(rows_of(x)); i++) {
        kernels.scale((const float *) row_at(x, i), weights, (float *) row_at(op, i), x->ne[0],
                      weights ? 1.0f : *(const float *) row_at(by, i));
    }
    return true;
}

void multiply_shrink(const ggml_tensor * op, small_case & small) {
    shrink_rows(small.src[0], 5);
    if (op->src[1]->ne[0] == 1) {
        std::copy_n(small.src[0].ne + 1, 3, small.src[1].ne + 1);
    }
    std::copy_n(small.src[0].ne + 1, 3, small.result.ne + 1);
}

// SCALE of long rows, such as a state that is cleared. ggml gives each thread whole rows, so a single row is left to one thread.

bool scale_fits(const kernel_set &, const ggml_tensor * op) {
    const ggml_tensor * x = op->src[0];
    const float bias = float_param(op, 1);
    return is_float(x) && is_float(op) && same_shape(op, x) && is_contiguous(x, sizeof(float)) && is_contiguous(op, sizeof(float)) &&
           op->ne[0] >= least_long_row && bias == 0.0f;
}

bool scale(const kernel_set & kernels, const task & task, ggml_tensor * op) {
    constexpr int64_t line = 64 / sizeof(float);
    const int64_t n = op->ne[0] * rows_of(op), lines = (n + line - 1) / line;
    const int64_t first = task.first(lines) * line, last = std::min(task.last(lines) * line, n);
    kernels.scale((const float *) op->src[0]->data + first, nullptr, (float *) op->data + first, last - first, float_param(op, 0));
    return true;
}

void scale_shrink(const ggml_tensor *, small_case & small) {
    for (auto * t : { &small.src[0], &small.result }) {
        shrink_long_rows(*t);
    }
}

// ARGMAX

bool argmax_fits(const kernel_set &, const ggml_tensor * op) {
    const ggml_tensor * x = op->src[0];
    return is_float(x) && x->ne[2] == 1 && x->ne[3] == 1 && op->type == GGML_TYPE_I32 && op->nb[0] == sizeof(int32_t) &&
           op->ne[0] == x->ne[1];
}

bool argmax(const kernel_set & kernels, const task & task, ggml_tensor * op) {
    const ggml_tensor * x = op->src[0];
    for (int64_t i = task.first(x->ne[1]); i < task.last(x->ne[1]); i++) {
        ((int32_t *) op->data)[i] = (int32_t) kernels.last_largest((const float *) row_at(x, i), x->ne[0]);
    }
    return true;
}

void argmax_shrink(const ggml_tensor *, small_case & small) {
    small.src[0].ne[1] = small.result.ne[0] = std::min<int64_t>(small.src[0].ne[1], 5);
}

// CPY and GET_ROWS of long rows, such as recurrent states.

constexpr int64_t most_long_rows = 64;

// Whole rows for each thread, or a slice of each row where rows are fewer. row(i): the addresses that row i is copied to and
// from.
template <class F> bool copy_slices(const task & task, int64_t rows, int64_t n, F row) {
    constexpr int64_t line = 64 / sizeof(float);
    const bool whole = rows >= task.nth();
    const int64_t slice = GGML_PAD((n + task.nth() - 1) / task.nth(), line);
    const int64_t first = whole ? 0 : std::min(slice * task.ith(), n), last = whole ? n : std::min(first + slice, n);
    for (int64_t i = whole ? task.first(rows) : 0; i < (whole ? task.last(rows) : rows); i++) {
        const auto [to, from] = row(i);
        if (to == from) {
            continue;
        }
        memcpy((float *) to + first, (const float *) from + first, (last - first) * sizeof(float));
    }
    return true;
}

bool copy_fits(const kernel_set &, const ggml_tensor * op) {
    const ggml_tensor * x = op->src[0];
    const bool reshaped = is_contiguous(x, sizeof(float)) && rows_of(x) * x->ne[0] == rows_of(op) * op->ne[0];
    return is_float(x) && is_float(op) && (same_shape(x, op) || reshaped) && rows_of(op) <= most_long_rows &&
           op->ne[0] >= least_long_row;
}

bool copy(const kernel_set &, const task & task, ggml_tensor * op) {
    const ggml_tensor * x = op->src[0];
    const bool as_it_is = same_shape(x, op);
    float * const * const noted = rows_noted(x->data);
    return copy_slices(task, rows_of(op), op->ne[0], [&](int64_t i) {
        const char * from = as_it_is ? row_at(x, i) : (const char *) x->data + i * op->ne[0] * sizeof(float);
        return std::pair(row_at(op, i), noted ? (const char *) noted[i] : from);
    });
}

bool get_rows_fits(const kernel_set &, const ggml_tensor * op) {
    const ggml_tensor * x = op->src[0];
    const ggml_tensor * ids = op->src[1];
    return is_float(x) && is_float(op) && ids->type == GGML_TYPE_I32 && is_contiguous(ids, sizeof(int32_t)) && x->ne[2] == 1 &&
           x->ne[3] == 1 && rows_of(ids) == 1 && op->ne[0] == x->ne[0] && rows_of(op) == ids->ne[0] &&
           rows_of(op) <= most_long_rows && op->ne[0] >= least_long_row;
}

bool get_rows(const kernel_set &, const task & task, ggml_tensor * op) {
    const ggml_tensor * x = op->src[0];
    const int32_t * ids = (const int32_t *) op->src[1]->data;
    for (int64_t i = 0; i < rows_of(op); i++) {
        if (ids[i] < 0 || ids[i] >= x->ne[1]) {
            return false;  // an error that ggml reports
        }
    }
    return leave_rows(task, op) ||
           copy_slices(task, rows_of(op), x->ne[0], [&](int64_t i) { return std::pair(row_at(op, i), row_at(x, ids[i])); });
}

void get_rows_shrink(const ggml_tensor *, small_case & small) {
    shrink_long_rows(small.src[0]);
    small.src[0].ne[1] = small.src[1].below = 3;  // whatever their number
    small.src[1].ne[0] = small.result.ne[1] = std::min<int64_t>(small.src[1].ne[0], 2);
    small.result.ne[0] = small.src[0].ne[0];
}

void copy_shrink(const ggml_tensor * op, small_case & small) {
    const bool as_it_is = same_shape(op->src[0], op);
    shrink_long_rows(small.result);
    small.result.ne[0] -= as_it_is ? 0 : small.result.ne[0] % 2;
    for (auto * t : { &small.src[0], &small.src[1] }) {
        std::copy_n(small.result.ne, 4, t->ne);
    }
    if (!as_it_is) {  // rows of half the length
        small.src[0].ne[0] /= 2;
        small.src[0].ne[1] *= 2;
    }
}

}  // namespace

const operation concat_operation = { "CONCAT", concat_fits, concat, concat_shrink, 0 };
const operation convolution_operation = { "SSM_CONV", convolution_fits, convolution, convolution_shrink, 1e-9 };
const operation rms_norm_operation = { "RMS_NORM", rms_norm_fits, rms_norm, rms_norm_shrink, 1e-9 };
const operation multiply_operation = { "MUL", multiply_fits, multiply, multiply_shrink, 0 };
const operation scale_operation = { "SCALE", scale_fits, scale, scale_shrink, 0 };
const operation argmax_operation = { "ARGMAX", argmax_fits, argmax, argmax_shrink, 0 };
const operation get_rows_operation = { "GET_ROWS", get_rows_fits, get_rows, get_rows_shrink, 0 };
const operation copy_operation = { "CPY", copy_fits, copy, copy_shrink, 0, nullptr, plan_states };

}  // namespace mtp
