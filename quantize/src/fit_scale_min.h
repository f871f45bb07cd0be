// The search for a scale and a minimum: levels from zero upwards, for values of any sign.
#pragma once

#include "rounding.h"

namespace MTP_TARGET {

// Trials of a search: factors (first + step * i + levels) / range for i = 0 ... last.
struct Trials {
    float first, step;
    int   last;
};

// A group represented as scale * level - min, with levels 0 ... Levels.
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

// Fit P groups of N values at a time: x + N * p with weights w + N * p. Their sums are independent, which
// hides latency.
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

    // Each trial starts from the minimum found by the previous one.
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
        // A flat group keeps its minimum: no trial is better, so none has changed it.
        fits[p].min = -select(fits[p].flat, min(Float{}, low[p]), smallest[p]);
    }
}

}  // namespace MTP_TARGET
