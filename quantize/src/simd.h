// The vectors of the instruction set this file is compiled for, with one super-block per lane.
//
// GCC's and Clang's vector extensions: +, -, *, / and comparisons work lane by lane, each with the
// rounding of the scalar operation, and nothing is reordered or contracted (-ffp-contract=off). So
// a kernel reads like the scalar code it stands for and computes, in every lane, the same bits.
//
// All functions are in a namespace named after the instruction set, so that the linker does not replace
// one with a function of the same name compiled for another set.
#pragma once

#include <stdint.h>
#include <string.h>

namespace MTP_TARGET {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float    Float __attribute__((vector_size(4 * LANES)));
typedef int32_t  Int __attribute__((vector_size(4 * LANES)));
typedef uint32_t UInt __attribute__((vector_size(4 * LANES)));
typedef Int      Mask;  // all bits of a lane, or none

inline Float splat(float value) { return value - Float{}; }
inline Int   splat(int32_t value) { return value - Int{}; }

inline Int   bits(Float v) { return (Int) v; }
inline Float from_bits(Int v) { return (Float) v; }
inline Float to_float(Int v) { return __builtin_convertvector(v, Float); }
inline Int   to_int(Float v) { return __builtin_convertvector(v, Int); }  // towards zero

inline Float select(Mask mask, Float yes, Float no) { return mask ? yes : no; }
inline Int   select(Mask mask, Int yes, Int no) { return mask ? yes : no; }

// As the scalar expressions do: the second operand where one is NaN.
inline Float min(Float a, Float b) { return a < b ? a : b; }
inline Float max(Float a, Float b) { return a > b ? a : b; }
inline Int min(Int a, Int b) { return a < b ? a : b; }
inline Int max(Int a, Int b) { return a > b ? a : b; }

inline Float abs(Float v) { return from_bits(bits(v) & 0x7fffffff); }

inline Float sqrt(Float v) {
    for (int i = 0; i < LANES; ++i) v[i] = __builtin_sqrtf(v[i]);  // one instruction when compiled
    return v;
}

inline bool any(Mask mask) {
    int64_t parts[LANES / 2], seen = 0;
    memcpy(parts, &mask, sizeof mask);
    for (int i = 0; i < LANES / 2; ++i) seen |= parts[i];
    return seen != 0;
}

// ggml's nearest_int for any float: adding 1.5 * 2^23 leaves the integer in the low bits of the
// mantissa. Beyond 2^22 (and for NaN) the result is meaningless but identical to ggml's.
inline Int nearest_int(Float v) {
    return (bits(v + 12582912.f) & 0x7fffff) - 0x400000;
}

// F16 and BF16 given in the low halves of lanes. Exact, denormals included: the power of two moves
// the exponent's bias from 15 to 127.
inline Float from_f16(Int half) {
    const Int   magnitude = (half & 0x7fff) << 13;
    const Int   finite    = bits(from_bits(magnitude) * 0x1p112f);
    const Int   value     = select(magnitude < 0x0f800000, finite, magnitude | 0x7f800000);
    return from_bits(value | (half & 0x8000) << 16);
}
inline Float from_bf16(Int half) { return from_bits(half << 16); }

inline Mask not_number(Float v) { return v != v; }

// Rounds to the nearest F16 like ggml: ties to even, beyond 65504 to infinity, NaN to a quiet NaN.
inline Int to_f16(Float v) {
    const Int sign      = (bits(v) >> 16) & 0x8000;
    const Int magnitude = min(bits(v) & 0x7fffffff, splat(0x7f800000));
    // Normal: drop 13 bits with the carry of a rounding to even, and 112 from the exponent.
    const Int normal = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112 << 10);
    // Denormal: 0.5 has the unit of the last place that F16's denormals have.
    const Int tiny = bits(from_bits(magnitude) + 0.5f) - 0x3f000000;
    const Int half = min(select(magnitude < 0x38800000, tiny, normal), splat(0x7c00));
    return sign | select(not_number(v), splat(0x7e00), half);
}

}  // namespace MTP_TARGET
