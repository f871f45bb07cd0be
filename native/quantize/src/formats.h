// The block formats, LANES blocks at a time.
//
// A format has its ggml type, the values and bytes of a block, and quantize(), which takes the
// values of a block in each lane (and their importance, when Weighted) and leaves the block's bytes
// in `words`, as many as needed. It returns the lanes whose result ggml must make instead.
#pragma once

#include "lanes.h"
#include "search.h"

namespace MTP_TARGET {

// Q4_K and Q5_K: eight groups of 32 values as d * scale * level - dmin * min, with 6-bit scales and
// mins. Bytes: F16 d, F16 dmin, 12 of scales and mins, the fifth bits (Q5_K), the low four bits.
template <int Type, int Bits> struct ScaleMinFormat {
    static constexpr int TYPE   = Type;
    static constexpr int LENGTH = 256;
    static constexpr int GROUPS = 8;
    static constexpr int GROUP  = 32;
    static constexpr int LEVELS = (1 << Bits) - 1;
    static constexpr int BYTES  = 2 + 2 + 12 + (Bits == 5 ? 32 : 0) + 128;

    static constexpr Trials PLAIN    = Bits == 4 ? Trials{-1.f, 0.1f, 20} : Trials{-0.5f, 0.1f, 15};
    static constexpr Trials WEIGHTED = {-0.9f, 0.05f, 36};

    template <bool Weighted>
    static inline Mask quantize(const Float * x, const Float * importance, Int * words) {
        ScaleMin fits[GROUPS];
        Float    scales[GROUPS], mins[GROUPS], sum_w[GROUPS];
        Float    square_sum = {};
        if (Weighted) {
            for (int i = 0; i < LENGTH; ++i) square_sum += x[i] * x[i];
        }
        const Float variance = 2 * square_sum / LENGTH;
        for (int j = 0; j < GROUPS; j += 2) {
            Float w[2 * GROUP];
            for (int k = 0; k < 2; ++k) {
                const Float * group = x + GROUP * (j + k);
                if (Weighted) {
                    sum_w[j + k] = Float{};
                    for (int i = 0; i < GROUP; ++i) {
                        const Float spread = sqrt(variance + group[i] * group[i]);
                        w[GROUP * k + i] = importance[GROUP * (j + k) + i] * spread;
                        sum_w[j + k] += w[GROUP * k + i];
                    }
                } else {
                    Float sum = {};
                    for (int i = 0; i < GROUP; ++i) sum += group[i] * group[i];
                    const Float average = sqrt(sum / GROUP);
                    for (int i = 0; i < GROUP; ++i) w[GROUP * k + i] = average + abs(group[i]);
                }
            }
            fit_scale_min<GROUP, 2, LEVELS, false>(
                x + GROUP * j, w, Weighted ? WEIGHTED : PLAIN, fits + j);
        }
        Mask irregular = {};
        for (int j = 0; j < GROUPS; ++j) {
            scales[j] = fits[j].scale;
            mins[j]   = fits[j].min;
            irregular |= fits[j].irregular;
        }

        Int   packed[12], scale_levels[GROUPS], min_levels[GROUPS];
        Float d, dmin;
        if (Weighted) {
            d    = fit_positive<GROUPS, 63>(scales, sum_w, scale_levels);
            dmin = fit_positive<GROUPS, 63>(mins, sum_w, min_levels);
        } else {
            d    = share_of_largest(scales, scale_levels);
            dmin = share_of_largest(mins, min_levels);
        }
        if (!Weighted || Bits == 5) {
            for (int j = 0; j < GROUPS; ++j) {
                scale_levels[j] = min(scale_levels[j], splat(63));
                min_levels[j]   = min(min_levels[j], splat(63));
            }
        }
        irregular |= not_number(d) | not_number(dmin);
        const Int half_d = to_f16(d), half_dmin = to_f16(dmin);
        d    = from_f16(half_d);
        dmin = from_f16(half_dmin);

        // The first four scales and mins take six bits of a byte each, whose upper two hold the
        // high bits of the last four.
        for (int j = 0; j < 4; ++j) {
            const Int scale = scale_levels[j + 4], min = min_levels[j + 4];
            packed[j]     = scale_levels[j] | scale >> 4 << 6;
            packed[j + 4] = min_levels[j] | min >> 4 << 6;
            packed[j + 8] = (scale & 15) | (min & 15) << 4;
        }
        words[0] = half_d | half_dmin << 16;
        for (int j = 0; j < 12; ++j) packed[j] &= 0xff;
        for (int k = 0; k < 3; ++k) words[1 + k] = word_of(packed + 4 * k);
        for (int j = 0; j < 4; ++j) {  // as they are read back
            scale_levels[j]     = packed[j] & 63;
            min_levels[j]       = packed[j + 4] & 63;
            scale_levels[j + 4] = (packed[j + 8] & 15) | packed[j] >> 6 << 4;
            min_levels[j + 4]   = packed[j + 8] >> 4 | packed[j + 4] >> 6 << 4;
        }

        Int * high = words + 4;
        Int * low  = words + (Bits == 5 ? 12 : 4);
        if (Bits == 5) {
            for (int k = 0; k < 8; ++k) high[k] = Int{};
        }
        for (int j = 0; j < GROUPS; j += 2) {
            Int levels[2][GROUP];
            for (int k = 0; k < 2; ++k) {
                const Float step  = d * to_float(scale_levels[j + k]);
                const Float start = dmin * to_float(min_levels[j + k]);
                const Mask  none  = step == 0;
                const Float * group = x + GROUP * (j + k);
                for (int i = 0; i < GROUP; ++i) {
                    const Int l = nearest_int((group[i] + start) / step);
                    levels[k][i] = max(Int{}, min(splat(LEVELS), l));
                }
                if (any(none)) {  // the levels of the search stay
                    for (int i = 0; i < GROUP; ++i) {
                        const Float l = level<LEVELS>(fits[j + k], group[i]);
                        levels[k][i]  = select(none, nearest_int(l), levels[k][i]);
                    }
                }
            }
            for (int i = 0; i < GROUP; i += 4) {
                const Int first = word_of(levels[0] + i), second = word_of(levels[1] + i);
                *low++ = (first & 0x0f0f0f0f) | (second & 0x0f0f0f0f) << 4;
                if (Bits == 5) {
                    high[i / 4] |= (first & 0x10101010) >> 4 << j;
                    high[i / 4] |= (second & 0x10101010) >> 4 << (j + 1);
                }
            }
        }
        return irregular;
    }

    // Levels 0 ... 63 (a byte each) of the largest value, which gets 63; returns a level's worth.
    static inline Float share_of_largest(const Float * values, Int * levels) {
        Float largest = {};
        for (int j = 0; j < GROUPS; ++j) largest = max(values[j], largest);
        const Float inverse = select(largest > 0, 63.f / largest, Float{});
        for (int j = 0; j < GROUPS; ++j) levels[j] = nearest_int(inverse * values[j]) & 0xff;
        return largest / 63.f;
    }
};

// Q6_K: sixteen groups of 16 values as d * scale * level, with 8-bit signed scales. Bytes: the low
// four bits, the high two, the scales, F16 d.
struct Q6K {
    static constexpr int TYPE   = 14;
    static constexpr int LENGTH = 256;
    static constexpr int GROUPS = 16;
    static constexpr int GROUP  = 16;
    static constexpr int BYTES  = 128 + 64 + 16 + 2;

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

}  // namespace MTP_TARGET
