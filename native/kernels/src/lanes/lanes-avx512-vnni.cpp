// Functions of this header are the same for every instruction set, so it comes before that is chosen.
#include "lanes.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c,avx2"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c,avx2")
#endif

// gcc takes the undefined operands of its own intrinsics for uninitialized variables
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "lanes-dots.h"
#include "lanes-products.h"
#include "lanes-v512-vnni.h"

namespace mtp {

product_kernel avx512_vnni_product(ggml_type type) { return quants_product<vnni_dots<vnni_512>>(type); }
double avx512_vnni_multiply(int64_t n) { return multiply<vnni_dots<vnni_512>>(n); }

}  // namespace mtp

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
