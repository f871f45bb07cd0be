// The searches of ggml's k-quants for the scale of a group of values, one group per lane.
//
// The order of operations is the reference's (make_qx_quants, make_qkx2_quants, make_qkx3_quants,
// make_qp_quants), expression by expression; what may differ is only what no bit depends on. Two
// such liberties are taken throughout:
//
// Rounding to an integer stays in floating point: adding and subtracting 1.5 * 2^23 rounds to
// nearest even and is exact, and clamping between the two steps needs no conversion. That equals
// nearest_int up to 2^22, which the search of a scale and a minimum must check (`irregular`).
//
// The levels of the best trial are not kept. They matter only where the final scale rounds to zero,
// and follow from the factor and offset that the trial began with.
#pragma once

#include "simd.h"

namespace MTP_TARGET {

constexpr float ROUNDER       = 12582912.f;  // 1.5 * 2^23
constexpr float ROUNDER_RANGE = 4194303.f;
constexpr float ALL_ZERO      = 1e-15f;      // below it ggml takes a group for zeros

// nearest_int(v) clamped, as a float.
inline Float round_clamped(Float v, float lowest, float highest) {
    return min(max(v + ROUNDER, splat(ROUNDER + lowest)), splat(ROUNDER + highest)) - ROUNDER;
}

// Trials of a search: factors (first + step * i + levels) / range for i = 0 ... last.
struct Trials {
    float first, step;
    int   last;
};

// A group as scale * level - min, with levels 0 ... Levels.
struct ScaleMin {
    Float scale, min;
    Float factor, offset;  // level = clamp(nearest(factor * (x - offset)))
    Mask  flat;            // all levels are zero
    Mask  irregular;       // some rounding left the range of round_clamped
};

template <int Levels> inline Float level(const ScaleMin & fit, Float x) {
    const Float l = round_clamped(fit.factor * (x - fit.offset), 0, Levels);
    return select(fit.flat, Float{}, l);
}

// Fit P groups of N values at a time: x + N * p with weights w + N * p. Their independent sums hide
// one another's latency.
template <int N, int P, int Levels, bool AbsoluteError>
inline void fit_scale_min(const Float * x, const Float * w, Trials trials, ScaleMin * fits) {
    Float low[P], high[P], smallest[P], sum_w[P], sum_x[P], best_error[P];
    for (int p = 0; p < P; ++p) {
        low[p] = high[p] = x[N * p];
        sum_w[p] = w[N * p];
        sum_x[p] = sum_w[p] * x[N * p];
    }
    for (int i = 1; i < N; ++i) {
        for (int p = 0; p < P; ++p) {
            const Float xi = x[N * p + i], wi = w[N * p + i];
            low[p]  = min(xi, low[p]);
            high[p] = max(xi, high[p]);
            sum_w[p] += wi;
            sum_x[p] += wi * xi;
        }
    }
    const auto in_range = [&](int p, Float factor, Float offset) {
        const Float reach = max(abs(high[p] - offset), abs(low[p] - offset));
        return abs(factor) * reach < ROUNDER_RANGE;  // false for NaN
    };
    const auto error_of = [](Float difference) {
        return AbsoluteError ? abs(difference) : difference * difference;
    };

    Mask regular[P];
    for (int p = 0; p < P; ++p) {
        smallest[p]        = min(Float{}, low[p]);
        fits[p].flat       = high[p] == smallest[p];
        const Float factor = (float) Levels / (high[p] - smallest[p]);
        fits[p].factor     = factor;
        fits[p].offset     = smallest[p];
        fits[p].scale      = 1 / factor;
        regular[p]         = in_range(p, factor, smallest[p]);
        best_error[p]      = Float{};
    }
    for (int i = 0; i < N; ++i) {
        for (int p = 0; p < P; ++p) {
            const Float xi = x[N * p + i];
            const Float l  = round_clamped(fits[p].factor * (xi - smallest[p]), 0, Levels);
            best_error[p] += w[N * p + i] * error_of(fits[p].scale * l + smallest[p] - xi);
        }
    }

    // The minimum found by one trial is where the next one starts from.
    Float levels[N * P];
    for (int trial = 0; trial <= trials.last; ++trial) {
        const float steps = trials.first + trials.step * trial + Levels;
        Float factor[P], sum_l[P], sum_l2[P], sum_xl[P];
        for (int p = 0; p < P; ++p) {
            factor[p] = steps / (high[p] - smallest[p]);
            sum_l[p] = sum_l2[p] = sum_xl[p] = Float{};
        }
        for (int i = 0; i < N; ++i) {
            for (int p = 0; p < P; ++p) {
                const Float xi = x[N * p + i];
                const Float l  = round_clamped(factor[p] * (xi - smallest[p]), 0, Levels);
                const Float wl = w[N * p + i] * l;
                levels[N * p + i] = l;
                sum_l[p] += wl;
                sum_l2[p] += wl * l;
                sum_xl[p] += wl * xi;
            }
        }
        Float scale[P], start[P], error[P];
        Mask  solvable[P];
        for (int p = 0; p < P; ++p) {
            const Float determinant = sum_w[p] * sum_l2[p] - sum_l[p] * sum_l[p];
            scale[p] = (sum_w[p] * sum_xl[p] - sum_x[p] * sum_l[p]) / determinant;
            start[p] = (sum_l2[p] * sum_x[p] - sum_l[p] * sum_xl[p]) / determinant;
            const Mask above = start[p] > 0;
            scale[p]    = select(above, sum_xl[p] / sum_l2[p], scale[p]);
            start[p]    = select(above, Float{}, start[p]);
            solvable[p] = determinant > 0;
            error[p]    = Float{};
        }
        for (int i = 0; i < N; ++i) {
            for (int p = 0; p < P; ++p) {
                const Float difference = scale[p] * levels[N * p + i] + start[p] - x[N * p + i];
                error[p] += w[N * p + i] * error_of(difference);
            }
        }
        for (int p = 0; p < P; ++p) {
            const Mask better = (error[p] < best_error[p]) & solvable[p];
            regular[p] &= in_range(p, factor[p], smallest[p]);
            fits[p].factor = select(better, factor[p], fits[p].factor);
            fits[p].offset = select(better, smallest[p], fits[p].offset);
            fits[p].scale  = select(better, scale[p], fits[p].scale);
            best_error[p]  = select(better, error[p], best_error[p]);
            smallest[p]    = select(better, start[p], smallest[p]);
        }
    }
    for (int p = 0; p < P; ++p) {
        fits[p].irregular = ~(regular[p] | fits[p].flat);
        fits[p].scale     = select(fits[p].flat, Float{}, fits[p].scale);
        // A flat group still has its minimum; no trial has moved it, none being better there.
        fits[p].min = -select(fits[p].flat, min(Float{}, low[p]), smallest[p]);
    }
}

// A group as scale * level, with levels -Levels ... Levels - 1.
struct Scale {
    Float scale;
    Float factor;  // level = clamp(nearest(factor * x))
    Mask  zero;    // taken for zeros; the levels are stored as 0 then, not as 0 + Levels
};

template <int Levels> inline Float level_above_lowest(const Scale & fit, Float x) {
    return select(fit.zero, Float{}, round_clamped(fit.factor * x, -Levels, Levels - 1) + (float) Levels);
}

// What a trial factor is judged by: the sums of w * x * level and of w * level * level.
struct Sums {
    Float xl, l2;
};

// The sums of T trials on one group, side by side to hide their latency. wx: w * x.
template <int N, int T, int Levels>
inline void try_factors(const Float * x, const Float * w, const Float * wx, const Float * factors,
                        Sums * sums) {
    Float xl[T] = {}, l2[T] = {};
    for (int i = 0; i < N; ++i) {
        for (int t = 0; t < T; ++t) {
            const Float l = round_clamped(factors[t] * x[i], -Levels, Levels - 1);
            xl[t] += wx[i] * l;
            l2[t] += w[i] * l * l;
        }
    }
    for (int t = 0; t < T; ++t) sums[t] = {xl[t], l2[t]};
}

// Fit a group of N values x with weights w. Every product that is rounded lies within Levels + 1,
// so nothing can be irregular here.
template <int N, int Levels> inline Scale fit_scale(const Float * x, const Float * w) {
    Float largest = {}, magnitude = {}, wx[N];
    for (int i = 0; i < N; ++i) {
        const Float a = abs(x[i]);
        largest   = select(a > magnitude, x[i], largest);
        magnitude = max(a, magnitude);
        wx[i]     = w[i] * x[i];
    }
    Scale fit;
    fit.zero   = magnitude < ALL_ZERO;
    fit.factor = (float) -Levels / largest;
    Sums first;
    try_factors<N, 1, Levels>(x, w, wx, &fit.factor, &first);
    fit.scale  = select(first.l2 != 0, first.xl / first.l2, Float{});
    Float best = fit.scale * first.xl;

    constexpr int T = 3;
    for (int trial = 0; trial < 18; trial += T) {
        Float factors[T];
        Sums  sums[T];
        for (int t = 0; t < T; ++t) {
            const int step = trial + t < 9 ? trial + t - 9 : trial + t - 8;  // -9 ... 9 without 0
            factors[t] = -(Levels + 0.1f * step) / largest;
        }
        try_factors<N, T, Levels>(x, w, wx, factors, sums);
        for (int t = 0; t < T; ++t) {
            const auto [xl, l2] = sums[t];
            const Mask  better  = (l2 > 0) & (xl * xl > best * l2);
            const Float scale   = xl / l2;
            fit.scale  = select(better, scale, fit.scale);
            fit.factor = select(better, factors[t], fit.factor);
            best       = select(better, scale * xl, best);
        }
    }
    fit.scale = select(fit.zero, Float{}, fit.scale);
    return fit;
}

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

}  // namespace MTP_TARGET
