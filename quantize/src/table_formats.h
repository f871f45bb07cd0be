// Formats whose levels are entries of a table: IQ4_NL, IQ4_XS.
#pragma once

#include "fit_scale.h"
#include "format.h"

namespace MTP_TARGET {

constexpr int ENTRIES = 16;
constexpr float TABLE[ENTRIES] = {  // kvalues_iq4nl in ggml-common.h
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
};

// The threshold from which entry k + 1 is chosen instead of k. ggml compares the distances to both, and
// the upper entry wins a tie; near the midpoint the distances are exact, so the result is the same.
constexpr float middle(int k) { return (TABLE[k] + TABLE[k + 1]) / 2; }

inline Int nearest_entry(Float v) {
    Int index = {};
    for (int k = 0; k + 1 < ENTRIES; ++k) index -= v >= middle(k);
    return index;
}

// TABLE[nearest_entry(v)]. All sums are of small integers, so their order is free.
inline Float nearest_in_table(Float v) {
    Float sums[3] = {splat(TABLE[0]), {}, {}};
    for (int k = 0; k + 1 < ENTRIES; ++k) {
        sums[k % 3] += select(v >= middle(k), splat(TABLE[k + 1] - TABLE[k]), Float{});
    }
    return sums[0] + sums[1] + sums[2];
}

// The scale for a group of 32 values with weights w (quantize_row_iq4_nl_impl).
inline Float fit_to_table(const Float * x, const Float * w) {
    constexpr int N = 32;
    Float largest = {}, magnitude = {};
    for (int i = 0; i < N; ++i) {
        const Float a = abs(x[i]);
        largest   = select(a > magnitude, x[i], largest);
        magnitude = max(a, magnitude);
    }
    const auto sums = [&](Float factor) {
        Sums sums = {};
        for (int i = 0; i < N; ++i) {
            const Float q  = nearest_in_table(factor * x[i]);
            const Float wq = w[i] * q;
            sums.xl += wq * x[i];
            sums.l2 += wq * q;
        }
        return sums;
    };
    const Sums first = sums(1 / (-largest / TABLE[0]));
    Float scale = select(first.l2 > 0, first.xl / first.l2, Float{});
    Float best  = scale * first.xl;
    for (int trial = -7; trial <= 7; ++trial) {
        const auto [xl, l2] = sums((trial + TABLE[0]) / largest);
        const Mask  better  = (l2 > 0) & (xl * xl > best * l2);
        const Float trial_scale = xl / l2;
        scale = select(better, trial_scale, scale);
        best  = select(better, trial_scale * xl, best);
    }
    return select(magnitude < ALL_ZERO, Float{}, scale);
}

// Weights of N values: from their importance or their squares.
template <int N, bool Weighted>
inline void weigh_or_square(const Float * x, const Float * importance, Float variance, Float * w) {
    if (Weighted) {
        weigh<N>(x, importance, variance, w);
    } else {
        for (int i = 0; i < N; ++i) w[i] = x[i] * x[i];
    }
}

// IQ4_NL: 32 values as d * entry. Bytes: F16 d, indices i and i + 16 in a byte.
struct IQ4NL {
    static constexpr int TYPE   = 20;
    static constexpr int LENGTH = 32;
    static constexpr int BYTES  = 2 + 16;
    static constexpr Importance IMPORTANCE = Importance::USED;

    template <bool Weighted>
    static inline Mask quantize(const Float * x, const Float * importance, Int * words) {
        Float       w[LENGTH];
        const Float variance = sum_of_squares<LENGTH>(x) * (2.f / LENGTH);
        weigh_or_square<LENGTH, Weighted>(x, importance, variance, w);
        const Float d       = fit_to_table(x, w);
        const Float inverse = select(d != 0, 1 / d, Float{});
        Int levels[LENGTH];
        for (int i = 0; i < LENGTH; ++i) levels[i] = nearest_entry(inverse * x[i]);
        store_half_and_nibbles(to_f16(d), levels, words);
        return d - d + inverse - inverse != 0;  // something is infinite
    }
};

// IQ4_XS: eight groups of 32 values as d * scale * entry, with 6-bit scales (less 32). Bytes:
// F16 d, the high two bits of the scales, their low four, indices i and i + 16 of a group.
struct IQ4XS {
    static constexpr int TYPE   = 23;
    static constexpr int LENGTH = 256;
    static constexpr int GROUPS = 8;
    static constexpr int GROUP  = 32;
    static constexpr int BYTES  = 2 + 2 + 4 + 128;
    static constexpr Importance IMPORTANCE = Importance::USED;

    template <bool Weighted>
    static inline Mask quantize(const Float * x, const Float * importance, Int * words) {
        Float       scales[GROUPS], largest = {}, magnitude = {};
        const Float variance = sum_of_squares<LENGTH>(x) * (2.f / LENGTH);
        for (int j = 0; j < GROUPS; ++j) {
            Float w[GROUP];
            weigh_or_square<GROUP, Weighted>(x + GROUP * j, importance + GROUP * j, variance, w);
            scales[j] = fit_to_table(x + GROUP * j, w);
            const Float a = abs(scales[j]);
            largest   = select(a > magnitude, scales[j], largest);
            magnitude = max(a, magnitude);
        }
        const Float d       = -largest / 32;
        const Float inverse = select(d != 0, 1 / d, Float{});
        Mask irregular = not_finite<GROUPS>(scales) | (inverse - inverse != 0);
        Int  high = {}, low = {};
        for (int j = 0; j < GROUPS; ++j) {
            const Int   l    = max(splat(-32), min(splat(31), nearest_int(inverse * scales[j])));
            const Float step = d * to_float(l);
            const Float inverse_step = select(step != 0, 1 / step, Float{});
            irregular |= inverse_step - inverse_step != 0;
            low |= ((l + 32) & 15) << 4 * j;
            high |= (l + 32) >> 4 << 2 * j;
            for (int i = 0; i < 16; i += 4) {
                Int first[4], second[4];
                for (int k = 0; k < 4; ++k) {
                    first[k]  = nearest_entry(inverse_step * x[GROUP * j + i + k]);
                    second[k] = nearest_entry(inverse_step * x[GROUP * j + i + k + 16]);
                }
                words[2 + 4 * j + i / 4] = word_of(first) | word_of(second) << 4;
            }
        }
        words[0] = to_f16(d) | high << 16;
        words[1] = low;
        return irregular;
    }
};

}  // namespace MTP_TARGET
