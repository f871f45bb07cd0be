// Rounding in the searches, and other shared code.
//
// The searches are those of ggml's k-quants (make_qkx2_quants, make_qx_quants and so on), one group
// of values per lane. Operations are in the order of the reference, expression by expression, except
// where no bit of the result depends on it. There are two such differences:
//
// Rounding to an integer stays in floating point: adding and subtracting 1.5 * 2^23 rounds to
// nearest even and is exact, and clamping between the two steps needs no conversion. That equals
// nearest_int up to 2^22; a search whose arguments may leave that range reports where they did.
//
// The levels of the best trial are not stored. They matter only if the final scale rounds to zero, and
// can be recomputed from the factor (and offset) of that trial.
#pragma once

#include "simd.h"

namespace MTP_TARGET {

constexpr float ROUNDER       = 12582912.f;  // 1.5 * 2^23
constexpr float ROUNDER_RANGE = 4194303.f;
constexpr float ALL_ZERO      = 1e-15f;      // below this ggml treats a group as zeros

// nearest_int(v) clamped, as a float.
inline Float round_clamped(Float v, float lowest, float highest) {
    return min(max(v + ROUNDER, splat(ROUNDER + lowest)), splat(ROUNDER + highest)) - ROUNDER;
}

}  // namespace MTP_TARGET
