#include "../delta_net.h"
#include "lanes.h"

#include <math.h>
#include <string.h>

#if defined(LANES_NEON)

LANES_TARGETS("arch=armv8.2-a+dotprod", "dotprod")

#include "lanes-neon-floats.h"
#include "lanes-neon.h"
#include "lanes-rows.h"

namespace mtp {

product_kernel neon_dotprod_product(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_K:   return mul_mat<dots, neon_blocks<neon_super_blocks<neon_k_mins<block_q4_K>>>>;
        case GGML_TYPE_Q5_K:   return mul_mat<dots, neon_blocks<neon_super_blocks<neon_k_mins<block_q5_K>>>>;
        case GGML_TYPE_Q6_K:   return mul_mat<dots, neon_blocks<neon_super_blocks<neon_q6_K>>>;
        case GGML_TYPE_IQ4_XS: return mul_mat<dots, neon_blocks<neon_super_blocks<neon_iq4_xs>>>;
        case GGML_TYPE_Q8_0:   return mul_mat<dots, neon_blocks<neon_q8_0>>;
        case GGML_TYPE_F32:    return neon_float_mul_mat<float>;
        case GGML_TYPE_F16:    return neon_float_mul_mat<f16>;
        case GGML_TYPE_BF16:   return neon_float_mul_mat<bf16>;
        default:               return nullptr;
    }
}

static double multiply(int64_t n) {
    return neon_multiply(n, 16, [](int32x4_t sum, int8x16_t w) { return vdotq_s32(sum, w, w); });
}

const kernel_set neon_dotprod_kernels = kernels_of<neon_floats>("NEON_DOTPROD", neon_dotprod_product, multiply);

}  // namespace mtp

LANES_END_TARGET

#endif
