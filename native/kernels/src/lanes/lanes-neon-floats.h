// The vectors of lanes-floats.h for NEON.

#pragma once

#include "lanes-floats.h"

#include <arm_neon.h>

namespace mtp {
namespace {

// Two registers: half floats are read a register at a time.
struct neon_floats {
    static constexpr int floats = 8;
    struct F { float32x4_t lo, hi; };

    LANES_INLINE F zerof() { return { vdupq_n_f32(0), vdupq_n_f32(0) }; }
    LANES_INLINE F fma(F a, F b, F c) { return { vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi) }; }
    LANES_INLINE F load_f32(const void * p) { return { vld1q_f32((const float *) p), vld1q_f32((const float *) p + 4) }; }
    LANES_INLINE F load_f16(const void * p) {
        const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16((const uint16_t *) p));
        return { vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x) };
    }
    LANES_INLINE F load_bf16(const void * p) {
        const uint16x8_t x = vld1q_u16((const uint16_t *) p);
        return { vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(x, 16)) };
    }
    LANES_INLINE F setf(float x) { return { vdupq_n_f32(x), vdupq_n_f32(x) }; }
    LANES_INLINE F mul(F a, F b) { return { vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi) }; }
    LANES_INLINE void store_f32(float * p, F a) {
        vst1q_f32(p, a.lo);
        vst1q_f32(p + 4, a.hi);
    }

    // Four vectors of columns: element i of a[j] is float j of the row at p + i * stride.
    LANES_INLINE void transposed(const char * p, size_t stride, F * a) {
        float32x4_t b[2][4];
        LANES_UNROLL
        for (int half = 0; half < 2; half++, p += 4 * stride) {
            const float32x4_t r0 = vld1q_f32((const float *) p), r1 = vld1q_f32((const float *) (p + stride));
            const float32x4_t r2 = vld1q_f32((const float *) (p + 2 * stride)), r3 = vld1q_f32((const float *) (p + 3 * stride));
            const float64x2_t c[4] = { vreinterpretq_f64_f32(vtrn1q_f32(r0, r1)), vreinterpretq_f64_f32(vtrn2q_f32(r0, r1)),
                                       vreinterpretq_f64_f32(vtrn1q_f32(r2, r3)), vreinterpretq_f64_f32(vtrn2q_f32(r2, r3)) };
            b[half][0] = vreinterpretq_f32_f64(vtrn1q_f64(c[0], c[2]));
            b[half][1] = vreinterpretq_f32_f64(vtrn1q_f64(c[1], c[3]));
            b[half][2] = vreinterpretq_f32_f64(vtrn2q_f64(c[0], c[2]));
            b[half][3] = vreinterpretq_f32_f64(vtrn2q_f64(c[1], c[3]));
        }
        LANES_UNROLL
        for (int j = 0; j < 4; j++) {
            a[j] = { b[0][j], b[1][j] };
        }
    }

    // For states of recurrences, see lanes-delta-net.h.
    static constexpr int state_rows = 4;
    static constexpr bool sums_as_rows = false;  // whether these sums have the bits of sum()
    LANES_INLINE void row_sums(const F * a, float * sums) {
        float32x4_t b[4];
        LANES_UNROLL
        for (int i = 0; i < 4; i++) {
            b[i] = vaddq_f32(a[i].lo, a[i].hi);
        }
        vst1q_f32(sums, vpaddq_f32(vpaddq_f32(b[0], b[1]), vpaddq_f32(b[2], b[3])));
    }

    LANES_INLINE float sum(F a) { return vaddvq_f32(vaddq_f32(a.lo, a.hi)); }
};

// Four columns at a time: the sums fill the registers, one more row or column would spill.
template <class T>
void neon_float_mul_mat(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc,
                        reading how) {
    for (; nc > 4; nc -= 4, cols += 4, dst += 4) {
        float_rows<neon_floats, T, 2, 4>(n, w, stride, nr, cols, dst, how);
    }
    switch (nc) {
        case 1: return float_rows<neon_floats, T, 4, 1>(n, w, stride, nr, cols, dst, how);
        case 2: return float_rows<neon_floats, T, 4, 2>(n, w, stride, nr, cols, dst, how);
        case 3: return float_rows<neon_floats, T, 2, 3>(n, w, stride, nr, cols, dst, how);
        case 4: return float_rows<neon_floats, T, 2, 4>(n, w, stride, nr, cols, dst, how);
    }
}

}  // namespace
}  // namespace mtp
