// Rounding inside the searches, and what they share.
//
// The searches are those of ggml's k-quants (make_qkx2_quants, make_qx_quants and so on), one group
// of values per lane. The order of operations is the reference's, expression by expression; what
// may differ is only what no bit depends on. Two such liberties are taken throughout:
//
// Rounding to an integer stays in floating point: adding and subtracting 1.5 * 2^23 rounds to
// nearest even and is exact, and clamping between the two steps needs no conversion. That equals
// nearest_int up to 2^22; a search whose arguments may leave that range reports where they did.
//
// The levels of the best trial are not kept. They matter only where the final scale rounds to zero,
// and follow from the factor (and offset) of that trial.
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

}  // namespace MTP_TARGET
