// Functions of these headers are the same for every instruction set, so they come before it is chosen.
#include "../delta_net.h"
#include "lanes.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx2"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx2")
#endif

// gcc takes the undefined operands of its own intrinsics for uninitialized variables
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "lanes-delta-net.h"
#include "lanes-dots.h"
#include "lanes-products.h"
#include "lanes-q8_K.h"
#include "lanes-rows.h"
#include "lanes-v512.h"

namespace mtp {
namespace {

using vectors = maddubs_dots<v512>;

}  // namespace

const kernel_set avx512_kernels = {
    "AVX512", product_of<vectors>, attention_of<vectors>, quantize_q8_K<v512>, delta_net_rows<v512>, delta_net_fits<v512>,
    convolve<v512>, convolve_row,        sum_of_squares,        scale_row,     weighted_sum, last_largest, copy_block<v512>,
    multiply<vectors>,
};

}  // namespace mtp

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
