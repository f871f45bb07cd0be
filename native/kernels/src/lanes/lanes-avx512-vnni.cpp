// Functions of this header are the same for every instruction set, so it comes before that is chosen.
#include "lanes.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

LANES_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c,avx2")

#include <immintrin.h>

#include "lanes-dots.h"
#include "lanes-products.h"
#include "lanes-v512-vnni.h"

namespace mtp {

product_kernel avx512_vnni_product(ggml_type type) { return quants_product<vnni_dots<vnni_512>>(type); }
double avx512_vnni_multiply(int64_t n) { return multiply<vnni_dots<vnni_512>>(n); }

}  // namespace mtp

LANES_END_TARGET

#endif
