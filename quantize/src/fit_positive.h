// The search for the scale of non-negative values: the scales and minima of a super-block.
#pragma once

#include "rounding.h"

namespace MTP_TARGET {

// Fit N values >= 0, such as the scales of a super-block's groups, as scale * level with levels
// 0 ... Levels (a byte each, wrapping as ggml's do for values outside this assumption).
template <int N, int Levels> inline Float fit_positive(const Float * x, const Float * w, Int * levels) {
    Float largest = {};
    for (int i = 0; i < N; ++i) largest = max(largest, x[i]);
    const Mask zero = largest < ALL_ZERO;
    Float factor = (float) Levels / largest;
    Float scale = 1 / factor, best = {};
    for (int i = 0; i < N; ++i) {
        const Float difference = x[i] - scale * to_float(nearest_int(factor * x[i]) & 0xff);
        best += w[i] * difference * difference;
    }
    for (int trial = -4; trial <= 4; ++trial) {
        if (trial == 0) continue;
        const Float trial_factor = (0.1f * trial + Levels) / largest;
        const Float trial_scale  = 1 / trial_factor;
        Float error = {};
        for (int i = 0; i < N; ++i) {
            const Int   l          = min(nearest_int(trial_factor * x[i]), splat(Levels));
            const Float difference = x[i] - trial_scale * to_float(l);
            error += w[i] * difference * difference;
        }
        const Mask better = error < best;
        best   = select(better, error, best);
        factor = select(better, trial_factor, factor);
    }
    Float sum_xl = {}, sum_l2 = {};
    for (int i = 0; i < N; ++i) {
        const Int   l = min(nearest_int(factor * x[i]), splat(Levels));
        const Float f = to_float(l);
        levels[i] = l & 0xff;
        sum_xl += w[i] * x[i] * f;
        sum_l2 += w[i] * f * f;
    }
    // Improve one level at a time. A lane in which a whole pass changed nothing stays as it is.
    for (int pass = 0; pass < 5; ++pass) {
        Mask changed = {};
        for (int i = 0; i < N; ++i) {
            const Float old = to_float(levels[i]);
            Float xl = sum_xl - w[i] * x[i] * old;
            Float l2 = sum_l2 - w[i] * old * old;
            Mask  better = (xl > 0) & (l2 > 0);
            const Int   l = min(nearest_int(x[i] * l2 / xl), splat(Levels));
            const Float f = to_float(l);
            better &= l != levels[i];
            xl += w[i] * x[i] * f;
            l2 += w[i] * f * f;
            better &= xl * xl * sum_l2 > sum_xl * sum_xl * l2;
            levels[i] = select(better, l & 0xff, levels[i]);
            sum_xl = select(better, xl, sum_xl);
            sum_l2 = select(better, l2, sum_l2);
            changed |= better;
        }
        if (!any(changed)) break;
    }
    for (int i = 0; i < N; ++i) levels[i] = select(zero, Int{}, levels[i]);
    return select(zero | ~(sum_l2 > 0), Float{}, sum_xl / sum_l2);
}

// Quantize to levels 0 ... Levels (a byte each), the largest value to Levels, and return the value of one
// level. This is what ggml does without importance weights.
template <int N, int Levels> inline Float share_of_largest(const Float * values, Int * levels) {
    Float largest = {};
    for (int j = 0; j < N; ++j) largest = max(values[j], largest);
    const Float factor = select(largest > 0, (float) Levels / largest, Float{});
    for (int j = 0; j < N; ++j) levels[j] = nearest_int(factor * values[j]) & 0xff;
    return largest / (float) Levels;
}

}  // namespace MTP_TARGET
