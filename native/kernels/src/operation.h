// An operation of ggml that the library computes.

#pragma once

#include "lanes/lanes.h"
#include "thread_team.h"

namespace mtp {

// A case of an operation as small as its check takes: types, sizes and strides of its sources and of its result.
struct small_case {
    struct tensor {
        ggml_type type;
        int64_t ne[4];
        uint8_t order[4];  // the dimensions in the order of their strides
        bool apart[4];     // whether there is room between elements of order[i] and the next ones
        bool is_result;    // whether a source is in the place of the result
        int64_t below;     // of I32: values from 0 to this
        float low, high;   // of numbers: their range
    };
    tensor src[GGML_MAX_SRC];  // type GGML_TYPE_COUNT: none
    tensor result;
};

struct operation {
    const char * name;  // as ggml says it

    // Whether the kernels compute it. Looks at types, sizes and parameters only, so that every thread gets the same answer.
    bool (*fits)(const kernel_set & kernels, const ggml_tensor * op);

    // Computes it, by each thread. False, before anything is written and in every thread, if ggml has to, because the
    // graph's work memory is smaller than expected.
    bool (*compute)(const kernel_set & kernels, const task & task, ggml_tensor * op);

    // Makes the small case, which has the sizes of `op` at first, smaller. The code that computes it must be the same: all
    // operations with the same small case have one proof.
    void (*shrink)(const ggml_tensor * op, small_case & small);

    // The largest normalized mean squared difference from ggml's result; 0: none at all.
    double bound;

    // Computes a small case in both ways, and returns the difference, or less than 0 if that is not possible; NULL: that of
    // the operation alone.
    double (*try_out)(const operation & operation, const ggml_tensor * op, int n_threads) = nullptr;

    // What else is to be done for `op` before its graph is computed; NULL: nothing.
    void (*plan)(const kernel_set & kernels, const ggml_tensor * op, int n_threads) = nullptr;
};

// Whether the kernels compute `op` when its turn comes, in a graph that is planned.
bool will_compute(const ggml_tensor * op, int n_threads);

extern const operation product_operation, expert_product_operation, attention_operation, delta_net_operation,
    delta_net_replay_operation, convolution_operation, concat_operation, rms_norm_operation, multiply_operation,
    scale_operation, argmax_operation, copy_operation, get_rows_operation;

// The number of rows of all matrices.
inline int64_t rows_of(const ggml_tensor * t) { return t->ne[1] * t->ne[2] * t->ne[3]; }

// Row i of all matrices.
inline char * row_at(const ggml_tensor * t, int64_t i) {
    const int64_t i1 = i % t->ne[1], i2 = i / t->ne[1] % t->ne[2], i3 = i / (t->ne[1] * t->ne[2]);
    return (char *) t->data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
}

inline bool is_contiguous(const ggml_tensor * t, size_t element) {
    size_t next = element;
    for (int i = 0; i < 4; i++) {
        if (t->ne[i] != 1 && t->nb[i] != next) {
            return false;
        }
        next *= t->ne[i];
    }
    return true;
}

inline bool same_shape(const ggml_tensor * a, const ggml_tensor * b) {
    return a->ne[0] == b->ne[0] && a->ne[1] == b->ne[1] && a->ne[2] == b->ne[2] && a->ne[3] == b->ne[3];
}

inline bool is_float(const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float); }

}  // namespace mtp
