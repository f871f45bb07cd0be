// The search for a scale without a minimum: levels on both sides of zero.
#pragma once

#include "rounding.h"

namespace MTP_TARGET {

// A group represented as scale * level, with levels -Levels ... Levels - 1.
struct Scale {
    Float scale;
    Float factor;  // level = clamp(nearest(factor * x))
    Mask  zero;    // treated as all zeros; the levels are then stored as 0, not as 0 + Levels
};

template <int Levels> inline Float level_above_lowest(const Scale & fit, Float x) {
    return select(fit.zero, Float{}, round_clamped(fit.factor * x, -Levels, Levels - 1) + (float) Levels);
}

// The sums that rate a trial factor: of w * x * level and of w * level * level.
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

// Fit a group of N values x with weights w. Every rounded product is within Levels + 1, so no rounding
// can leave the range of round_clamped.
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

// Fit a group of N values as fit_scale does, weighted by their squares, improving one level at a
// time instead of trying factors (make_q3_quants). levels: 0 ... 2 * Levels - 1.
template <int N, int Levels> inline Float fit_scale_stepwise(const Float * x, Int * levels) {
    Float largest = {}, magnitude = {};
    for (int i = 0; i < N; ++i) {
        const Float a = abs(x[i]);
        largest   = select(a > magnitude, x[i], largest);
        magnitude = max(a, magnitude);
    }
    const Mask  zero   = magnitude < ALL_ZERO;
    const Float factor = (float) -Levels / largest;
    Float l[N], w[N], wx[N], sum_xl = {}, sum_l2 = {};
    for (int i = 0; i < N; ++i) {
        l[i]  = round_clamped(factor * x[i], -Levels, Levels - 1);
        w[i]  = x[i] * x[i];
        wx[i] = w[i] * x[i];
        sum_xl += wx[i] * l[i];
        sum_l2 += w[i] * l[i] * l[i];
    }
    // A lane in which a whole pass changed nothing stays as it is.
    for (int pass = 0; pass < 5; ++pass) {
        Mask changed = {};
        for (int i = 0; i < N; ++i) {
            Float xl = sum_xl - wx[i] * l[i];
            Float l2 = sum_l2 - w[i] * l[i] * l[i];
            const Int   nearest = nearest_int(x[i] * l2 / xl);
            const Float next    = to_float(max(splat(-Levels), min(splat(Levels - 1), nearest)));
            Mask better = (xl > 0) & (next != l[i]);
            xl += wx[i] * next;
            l2 += w[i] * next * next;
            better &= (l2 > 0) & (xl * xl * sum_l2 > sum_xl * sum_xl * l2);
            l[i]   = select(better, next, l[i]);
            sum_xl = select(better, xl, sum_xl);
            sum_l2 = select(better, l2, sum_l2);
            changed |= better;
        }
        if (!any(changed)) break;
    }
    for (int i = 0; i < N; ++i) levels[i] = select(zero, Int{}, nearest_int(l[i]) + Levels);
    return select(zero | ~(sum_l2 > 0), Float{}, sum_xl / sum_l2);
}

}  // namespace MTP_TARGET
