// Functions of this header are the same for every instruction set, so it comes before that is chosen.
#include "lanes.h"

#include <math.h>
#include <string.h>

#if defined(LANES_AVX_VNNI)

LANES_TARGET("avx2,avxvnni,fma,f16c")

#include <immintrin.h>

#include "lanes-dots.h"
#include "lanes-products.h"
#include "lanes-v256.h"

namespace mtp {
namespace {

struct vnni_256 : v256 {
    LANES_INLINE I dpbusd(I acc, I u, I s) { return _mm256_dpbusd_avx_epi32(acc, u, s); }
    LANES_INLINE I dpwssd(I acc, I a, I b) { return _mm256_dpwssd_avx_epi32(acc, a, b); }
};

}  // namespace

product_kernel avx_vnni_product(ggml_type type) { return quants_product<vnni_dots<vnni_256>>(type); }
double avx_vnni_multiply(int64_t n) { return multiply<vnni_dots<vnni_256>>(n); }

}  // namespace mtp

LANES_END_TARGET

#endif
