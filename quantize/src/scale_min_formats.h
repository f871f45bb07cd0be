// Formats whose groups have a scale and a minimum: Q4_K, Q5_K, Q2_K.
#pragma once

#include "fit_positive.h"
#include "fit_scale_min.h"
#include "format.h"

namespace MTP_TARGET {

// The scales and mins of a block's groups as levels of up to Most, which are multiplied with d and dmin.
template <bool Weighted, int Groups, int Most> struct PackedScales {
    Int   scales[Groups], mins[Groups];
    Float d, dmin;  // as they are read back
    Int   halves;   // both, as F16
    Mask  irregular = {};

    PackedScales(const ScaleMin * fits, const Float * sum_w) {
        Float group_scales[Groups], group_mins[Groups];
        for (int j = 0; j < Groups; ++j) {
            group_scales[j] = fits[j].scale;
            group_mins[j]   = fits[j].min;
            irregular |= fits[j].irregular;
        }
        if (Weighted) {
            d    = fit_positive<Groups, Most>(group_scales, sum_w, scales);
            dmin = fit_positive<Groups, Most>(group_mins, sum_w, mins);
        } else {
            d    = share_of_largest<Groups, Most>(group_scales, scales);
            dmin = share_of_largest<Groups, Most>(group_mins, mins);
        }
        irregular |= not_number(d) | not_number(dmin);
        const Int half_d = to_f16(d), half_dmin = to_f16(dmin);
        d      = from_f16(half_d);
        dmin   = from_f16(half_dmin);
        halves = half_d | half_dmin << 16;
    }
};

// The levels of a group of N values as step * level - start.
template <int N, int Levels>
inline void levels_of(const Float * group, Float step, Float start, const ScaleMin & fit, Int * levels) {
    const Mask none = step == 0;
    for (int i = 0; i < N; ++i) {
        const Int l = nearest_int((group[i] + start) / step);
        levels[i] = max(Int{}, min(splat(Levels), l));
    }
    if (any(none)) {  // the levels of the search stay
        for (int i = 0; i < N; ++i) {
            levels[i] = select(none, nearest_int(level<Levels>(fit, group[i])), levels[i]);
        }
    }
}

// Q4_K and Q5_K: eight groups of 32 values as d * scale * level - dmin * min, with 6-bit scales and
// mins. Bytes: F16 d, F16 dmin, 12 of scales and mins, the fifth bits (Q5_K), the low four bits.
template <int Type, int Bits> struct ScaleMinFormat {
    static constexpr int TYPE   = Type;
    static constexpr Importance IMPORTANCE = Importance::USED;
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
        Float    sum_w[GROUPS];
        const Float variance = Weighted ? 2 * sum_of_squares<LENGTH>(x) / LENGTH : Float{};
        for (int j = 0; j < GROUPS; j += 2) {
            Float w[2 * GROUP];
            for (int k = 0; k < 2; ++k) {
                const Float * group = x + GROUP * (j + k);
                Float *       wk    = w + GROUP * k;
                if (Weighted) {
                    sum_w[j + k] = weigh<GROUP>(group, importance + GROUP * (j + k), variance, wk);
                } else {
                    const Float average = sqrt(sum_of_squares<GROUP>(group) / GROUP);
                    for (int i = 0; i < GROUP; ++i) wk[i] = average + abs(group[i]);
                }
            }
            fit_scale_min<GROUP, 2, LEVELS, false>(
                x + GROUP * j, w, Weighted ? WEIGHTED : PLAIN, fits + j);
        }
        PackedScales<Weighted, GROUPS, 63> all(fits, sum_w);
        Int * scale_levels = all.scales, * min_levels = all.mins;
        if (!Weighted || Bits == 5) {
            for (int j = 0; j < GROUPS; ++j) {
                scale_levels[j] = min(scale_levels[j], splat(63));
                min_levels[j]   = min(min_levels[j], splat(63));
            }
        }

        Int packed[12];
        // The first four scales and mins take six bits of a byte each, whose upper two hold the
        // high bits of the last four.
        for (int j = 0; j < 4; ++j) {
            const Int scale = scale_levels[j + 4], min = min_levels[j + 4];
            packed[j]     = scale_levels[j] | scale >> 4 << 6;
            packed[j + 4] = min_levels[j] | min >> 4 << 6;
            packed[j + 8] = (scale & 15) | (min & 15) << 4;
        }
        words[0] = all.halves;
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
                const Float step  = all.d * to_float(scale_levels[j + k]);
                const Float start = all.dmin * to_float(min_levels[j + k]);
                levels_of<GROUP, LEVELS>(x + GROUP * (j + k), step, start, fits[j + k], levels[k]);
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
        return all.irregular;
    }
};

// Q2_K: sixteen groups of 16 values as d * scale * level - dmin * min, with 4-bit scales and mins.
// Bytes: scales (low nibble) and mins (high), levels, F16 d, F16 dmin.
struct Q2K {
    static constexpr int TYPE   = 10;
    static constexpr int LENGTH = 256;
    static constexpr int GROUPS = 16;
    static constexpr int GROUP  = 16;
    static constexpr int LEVELS = 3;
    static constexpr int BYTES  = 16 + 64 + 2 + 2;
    static constexpr Importance IMPORTANCE = Importance::USED;

    template <bool Weighted>
    static inline Mask quantize(const Float * x, const Float * importance, Int * words) {
        ScaleMin fits[GROUPS];
        Float    sum_w[GROUPS];
        const Float variance = Weighted ? sum_of_squares<LENGTH>(x) / LENGTH : Float{};
        for (int j = 0; j < GROUPS; j += 2) {
            Float w[2 * GROUP];
            for (int k = 0; k < 2; ++k) {
                const Float * group = x + GROUP * (j + k);
                Float *       wk    = w + GROUP * k;
                if (Weighted) {
                    sum_w[j + k] = weigh<GROUP>(group, importance + GROUP * (j + k), variance, wk);
                } else {
                    for (int i = 0; i < GROUP; ++i) wk[i] = abs(group[i]);
                }
            }
            constexpr Trials trials = Weighted ? Trials{-0.9f, 0.05f, 36} : Trials{-0.5f, 0.1f, 15};
            fit_scale_min<GROUP, 2, LEVELS, !Weighted>(x + GROUP * j, w, trials, fits + j);
        }
        const PackedScales<Weighted, GROUPS, 15> all(fits, sum_w);
        Int packed[GROUPS], levels[LENGTH];
        for (int j = 0; j < GROUPS; ++j) {
            packed[j] = (all.scales[j] | all.mins[j] << 4) & 0xff;
            const Float step  = all.d * to_float(packed[j] & 15);
            const Float start = all.dmin * to_float(packed[j] >> 4);
            levels_of<GROUP, LEVELS>(x + GROUP * j, step, start, fits[j], levels + GROUP * j);
        }
        for (int k = 0; k < 4; ++k) words[k] = word_of(packed + 4 * k);
        pack_pairs_of_bits(levels, words + 4);
        words[20] = all.halves;
        return all.irregular;
    }
};

}  // namespace MTP_TARGET
