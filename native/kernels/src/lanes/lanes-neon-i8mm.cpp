#include "../delta_net.h"
#include "lanes.h"

#include <math.h>
#include <string.h>

#if defined(LANES_NEON)

LANES_TARGETS("arch=armv8.2-a+dotprod+i8mm", "dotprod,i8mm")

#include "lanes-neon-floats.h"
#include "lanes-neon.h"
#include "lanes-rows.h"

namespace mtp {
namespace {

// Eight bytes of two rows in a vector, times eight of two columns.
struct matrices {
    static constexpr int columns = 2;
    struct sums  { int32x4_t first, last; };  // of two rows: both columns of a row side by side
    struct scale { int32x4_t first, last; };

    LANES_INLINE void weave(const uint8x16_t * row, uint8x16_t * codes) {
        LANES_UNROLL
        for (int r = 0; r < 4; r += 2) {
            const uint64x2_t a = vreinterpretq_u64_u8(row[r]), b = vreinterpretq_u64_u8(row[r + 1]);
            codes[r]     = vreinterpretq_u8_u64(vzip1q_u64(a, b));
            codes[r + 1] = vreinterpretq_u8_u64(vzip2q_u64(a, b));
        }
    }
    static void arrange(int c, const int8_t * x, int8_t * to) {
        memcpy(to + 8 * c, x, 8);
        memcpy(to + 16 + 8 * c, x + 8, 8);
    }
    LANES_INLINE sums dot(sums acc, const uint8x16_t * codes, const int8_t * x) {
        const int8x16_t y0 = vld1q_s8(x), y1 = vld1q_s8(x + 16);
        acc.first = vmmlaq_s32(vmmlaq_s32(acc.first, vreinterpretq_s8_u8(codes[0]), y0), vreinterpretq_s8_u8(codes[1]), y1);
        acc.last  = vmmlaq_s32(vmmlaq_s32(acc.last, vreinterpretq_s8_u8(codes[2]), y0), vreinterpretq_s8_u8(codes[3]), y1);
        return acc;
    }
    LANES_INLINE sums zero() { return { vdupq_n_s32(0), vdupq_n_s32(0) }; }
    LANES_INLINE sums start(const int32_t * p) {
        const int32x2_t both = vld1_s32(p);
        const int32x4_t x = vcombine_s32(both, both);
        return { x, x };
    }
    LANES_INLINE scale spread(int32x4_t of_rows) { return { vzip1q_s32(of_rows, of_rows), vzip2q_s32(of_rows, of_rows) }; }
    LANES_INLINE sums scaled(sums acc, sums dot, scale s) {
        return { vmlaq_s32(acc.first, dot.first, s.first), vmlaq_s32(acc.last, dot.last, s.last) };
    }
    LANES_INLINE int32x4_t rows(sums acc, int c) {
        return c == 0 ? vuzp1q_s32(acc.first, acc.last) : vuzp2q_s32(acc.first, acc.last);
    }
};

// A single column uses dot products, because half of each matrix product would be unused.
template <class K>
void one_or_more(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc,
                 reading how) {
    if (nc == 1) {
        return K::template product<dots, 1>(n, w, stride, nr, cols, dst, how);
    }
    return mul_mat<matrices, K>(n, w, stride, nr, cols, dst, nc, how);
}

}  // namespace

product_kernel neon_dotprod_product(ggml_type type);

static product_kernel product_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_K:   return one_or_more<neon_blocks<neon_super_blocks<neon_k_mins<block_q4_K>>>>;
        case GGML_TYPE_Q5_K:   return one_or_more<neon_blocks<neon_super_blocks<neon_k_mins<block_q5_K>>>>;
        case GGML_TYPE_Q6_K:   return one_or_more<neon_blocks<neon_super_blocks<neon_q6_K>>>;
        case GGML_TYPE_IQ4_XS: return one_or_more<neon_blocks<neon_super_blocks<neon_iq4_xs>>>;
        case GGML_TYPE_Q8_0:   return one_or_more<neon_blocks<neon_q8_0>>;
        default:               return neon_dotprod_product(type);
    }
}

static double multiply(int64_t n) {
    return neon_multiply(n, 32, [](int32x4_t sum, int8x16_t w) { return vmmlaq_s32(sum, w, w); });
}

const kernel_set neon_i8mm_kernels = kernels_of<neon_floats>("NEON_I8MM", product_of, multiply);

}  // namespace mtp

LANES_END_TARGET

#endif
