// Types that need no search, only rounding: Q8_0, F16 and, without importance, Q4_0.
#pragma once

#include "format.h"

namespace MTP_TARGET {

// Blocks whose scale has an infinite inverse: denormal ones.
inline Mask infinite_inverse(Float scale, Float inverse) {
    return (scale != 0) & (inverse - inverse != 0);
}

// Q8_0: 32 values as d * level. Bytes: F16 d, levels.
struct Q80 {
    static constexpr int TYPE   = 8;
    static constexpr int LENGTH = 32;
    static constexpr int BYTES  = 2 + 32;
    static constexpr Importance IMPORTANCE = Importance::IGNORED;

    template <bool Weighted> static inline Mask quantize(const Float * x, const Float *, Int * words) {
        Float magnitude = {};
        for (int i = 0; i < LENGTH; ++i) magnitude = max(magnitude, abs(x[i]));
        const Float d       = magnitude / 127.f;
        const Float inverse = select(d != 0, 1.f / d, Float{});
        Int levels[LENGTH];
        for (int i = 0; i < LENGTH; ++i) {
            // roundf rounds halves away from zero: round to nearest even, then correct halves.
            const Float v       = x[i] * inverse;
            const Float a       = abs(v);
            const Float nearest = (a + 12582912.f) - 12582912.f;
            const Float rounded = nearest + select(a - nearest == 0.5f, splat(1.f), Float{});
            const Float level   = min(rounded, splat(127.f));  // NaN too
            levels[i] = to_int(select(v < 0, -level, level)) & 0xff;
        }
        Int body[8];
        for (int i = 0; i < 8; ++i) body[i] = word_of(levels + 4 * i);
        store_half_and<8>(to_f16(d), body, words);
        return infinite_inverse(d, inverse);
    }
};

// Q4_0: 32 values as d * (level - 8). Bytes: F16 d, levels i and i + 16 in a byte.
struct Q40 {
    static constexpr int TYPE   = 2;
    static constexpr int LENGTH = 32;
    static constexpr int BYTES  = 2 + 16;
    // With importance, a block's weights depend on the whole row.
    static constexpr Importance IMPORTANCE = Importance::LEFT_TO_GGML;

    template <bool Weighted> static inline Mask quantize(const Float * x, const Float *, Int * words) {
        Float largest = {}, magnitude = {};
        for (int i = 0; i < LENGTH; ++i) {
            const Float a = abs(x[i]);
            largest   = select(magnitude < a, x[i], largest);
            magnitude = max(a, magnitude);
        }
        const Float d       = largest / -8.f;
        const Float inverse = select(d != 0, 1.f / d, Float{});
        Int levels[LENGTH];
        for (int i = 0; i < LENGTH; ++i) {
            const Float v = x[i] * inverse + 8.5f;
            levels[i] = to_int(min(max(v, Float{}), splat(15.f)));
        }
        store_half_and_nibbles(to_f16(d), levels, words);
        return infinite_inverse(d, inverse);
    }
};

// The low halves of the lanes of two vectors.
typedef uint16_t WideHalves __attribute__((vector_size(4 * LANES)));
inline WideHalves low_halves(Int a, Int b) {
    const WideHalves first = (WideHalves) a, second = (WideHalves) b;
#if defined(__AVX512F__)
    return __builtin_shufflevector(
        first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
        44, 46, 48, 50, 52, 54, 56, 58, 60, 62);
#elif defined(__AVX2__)
    return __builtin_shufflevector(
        first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#else
    return __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14);
#endif
}

// F16, which has no blocks: each value of a job is one.
template <typename Source> void round_to_f16(const Job & job) {
    constexpr int  N = 2 * LANES;
    const Source * source = (const Source *) job.source;
    const auto round = [](const Source * from) {
        return low_halves(to_f16(load(from)), to_f16(load(from + LANES)));
    };
    int64_t i = 0;
    for (; i + N <= job.n_blocks; i += N) {
        const WideHalves halves = round(source + i);
        memcpy(job.out + 2 * i, &halves, sizeof halves);
    }
    const int64_t rest = job.n_blocks - i;
    Source        last[N] = {};
    memcpy(last, source + i, rest * sizeof(Source));
    const WideHalves halves = round(last);
    memcpy(job.out + 2 * i, &halves, rest * sizeof(F16));
}

}  // namespace MTP_TARGET
