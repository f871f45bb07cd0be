// Formats whose groups have only a scale: Q6_K, Q3_K.
#pragma once

#include "fit_scale.h"
#include "format.h"

namespace MTP_TARGET {

// Q6_K: sixteen groups of 16 values as d * scale * level, with 8-bit signed scales. Bytes: the low
// four bits, the high two, the scales, F16 d.
struct Q6K {
    static constexpr int TYPE   = 14;
    static constexpr int LENGTH = 256;
    static constexpr int GROUPS = 16;
    static constexpr int GROUP  = 16;
    static constexpr int BYTES  = 128 + 64 + 16 + 2;
    static constexpr Importance IMPORTANCE = Importance::USED;

    template <bool Weighted>
    static inline Mask quantize(const Float * x, const Float * importance, Int * words) {
        Scale fits[GROUPS];
        Float largest = {}, magnitude = {};
        for (int j = 0; j < GROUPS; ++j) {
            Float         squares[GROUP];
            const Float * group = x + GROUP * j;
            for (int i = 0; i < GROUP; ++i) squares[i] = group[i] * group[i];
            fits[j] = fit_scale<GROUP, 32>(group, Weighted ? importance + GROUP * j : squares);
            const Float a = abs(fits[j].scale);
            largest   = select(a > magnitude, fits[j].scale, largest);
            magnitude = max(a, magnitude);
        }
        const Mask  zero    = magnitude < ALL_ZERO;
        const Float inverse = -128.f / largest;
        const Int   half_d  = to_f16(1 / inverse);
        const Float d       = from_f16(half_d);

        Int scales[GROUPS], levels[LENGTH];
        for (int j = 0; j < GROUPS; ++j) {
            scales[j] = min(splat(127), nearest_int(inverse * fits[j].scale)) << 24 >> 24;
            const Float * group = x + GROUP * j;
            const Float   step  = d * to_float(scales[j]);
            const Mask    none  = step == 0;
            for (int i = 0; i < GROUP; ++i) {
                const Int l = nearest_int(group[i] / step);
                levels[GROUP * j + i] = max(splat(-32), min(splat(31), l)) + 32;
            }
            if (any(none)) {  // the levels of the search stay
                for (int i = 0; i < GROUP; ++i) {
                    const Int l = nearest_int(level_above_lowest<32>(fits[j], group[i]));
                    levels[GROUP * j + i] = select(none, l, levels[GROUP * j + i]);
                }
            }
            scales[j] &= 0xff;
        }

        for (int half = 0; half < 2; ++half) {
            const Int * from = levels + 128 * half;
            Int * low = words + 16 * half, * high = words + 32 + 8 * half;
            for (int i = 0; i < 8; ++i) {
                const Int a = word_of(from + 4 * i), b = word_of(from + 32 + 4 * i);
                const Int c = word_of(from + 64 + 4 * i), e = word_of(from + 96 + 4 * i);
                low[i]     = (a & 0x0f0f0f0f) | (c & 0x0f0f0f0f) << 4;
                low[i + 8] = (b & 0x0f0f0f0f) | (e & 0x0f0f0f0f) << 4;
                high[i]    = (a >> 4 & 0x03030303) | (b >> 4 & 0x03030303) << 2 |
                             (c >> 4 & 0x03030303) << 4 | (e >> 4 & 0x03030303) << 6;
            }
        }
        for (int k = 0; k < 4; ++k) words[48 + k] = word_of(scales + 4 * k);
        words[52] = half_d;
        for (int i = 0; i < 53; ++i) words[i] = select(zero, Int{}, words[i]);
        return not_number(inverse) & ~zero;
    }
};

// Q3_K: sixteen groups of 16 values as d * scale * level, with 6-bit scales (less 32). Bytes: the
// third bits, the low two bits, 12 of scales, F16 d.
struct Q3K {
    static constexpr int TYPE   = 11;
    static constexpr int LENGTH = 256;
    static constexpr int GROUPS = 16;
    static constexpr int GROUP  = 16;
    static constexpr int BYTES  = 32 + 64 + 12 + 2;
    static constexpr Importance IMPORTANCE = Importance::USED;

    template <bool Weighted>
    static inline Mask quantize(const Float * x, const Float * importance, Int * words) {
        Float scales[GROUPS], d;
        Int   levels[LENGTH], scale_levels[GROUPS];
        Mask  irregular;
        if (Weighted) {
            Float       sum_w[GROUPS];
            const Float variance = 2 * sum_of_squares<LENGTH>(x) / LENGTH;
            for (int j = 0; j < GROUPS; ++j) {
                const Float * group = x + GROUP * j;
                Float         w[GROUP];
                sum_w[j] = weigh<GROUP>(group, importance + GROUP * j, variance, w);
                const Scale fit = fit_scale<GROUP, 4>(group, w);
                scales[j] = fit.scale;
                for (int i = 0; i < GROUP; ++i) {
                    levels[GROUP * j + i] = nearest_int(level_above_lowest<4>(fit, group[i]));
                }
            }
            const Scale fit = fit_scale<GROUPS, 32>(scales, sum_w);
            for (int j = 0; j < GROUPS; ++j) {
                scale_levels[j] = nearest_int(level_above_lowest<32>(fit, scales[j]));
            }
            d         = fit.scale;
            irregular = not_finite<GROUPS>(scales) | not_number(d);
        } else {
            Float largest = {}, magnitude = {};
            for (int j = 0; j < GROUPS; ++j) {
                scales[j] = fit_scale_stepwise<GROUP, 4>(x + GROUP * j, levels + GROUP * j);
                const Float a = abs(scales[j]);
                largest   = select(a > magnitude, scales[j], largest);
                magnitude = max(a, magnitude);
            }
            const Mask  zero   = largest == 0;
            const Float factor = -32.f / largest;
            for (int j = 0; j < GROUPS; ++j) {
                const Int wrapped = nearest_int(factor * scales[j]) << 24 >> 24;
                const Int l = max(splat(-32), min(splat(31), wrapped)) + 32;
                scale_levels[j] = select(zero, Int{}, l);
            }
            d         = select(zero, Float{}, 1 / factor);
            irregular = not_number(d);
        }
        const Int half_d = to_f16(d);
        d = from_f16(half_d);

        for (int j = 0; j < GROUPS; ++j) {
            const Float   step  = d * to_float(scale_levels[j] - 32);
            const Mask    none  = step == 0;
            const Float * group = x + GROUP * j;
            for (int i = 0; i < GROUP; ++i) {
                const Int l = max(splat(-4), min(splat(3), nearest_int(group[i] / step))) + 4;
                levels[GROUP * j + i] = select(none, levels[GROUP * j + i], l);
            }
        }

        for (int i = 0; i < 8; ++i) {  // bit k of byte b: whether level 32 * k + b exceeds 3
            words[i] = Int{};
            for (int k = 0; k < 8; ++k) {
                words[i] |= (word_of(levels + 32 * k + 4 * i) >> 2 & 0x01010101) << k;
            }
        }
        pack_pairs_of_bits(levels, words + 8);
        Int packed[12];
        for (int j = 0; j < 8; ++j) {
            packed[j] = (scale_levels[j] & 15) | (scale_levels[j + 8] & 15) << 4;
        }
        for (int j = 0; j < 4; ++j) {
            packed[8 + j] = scale_levels[j] >> 4 | scale_levels[j + 4] >> 4 << 2 |
                            scale_levels[j + 8] >> 4 << 4 | scale_levels[j + 12] >> 4 << 6;
        }
        for (int k = 0; k < 3; ++k) words[24 + k] = word_of(packed + 4 * k);
        words[27] = half_d;
        return irregular;
    }
};

}  // namespace MTP_TARGET
