// Functions of these headers are the same for every instruction set, so they come before it is chosen.
#include "../delta_net.h"
#include "lanes.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <immintrin.h>

#include "lanes-delta-net.h"
#include "lanes-dots.h"
#include "lanes-products.h"
#include "lanes-q8_K.h"
#include "lanes-rows.h"
#include "lanes-v256.h"

namespace mtp {
namespace {

using vectors = maddubs_dots<v256>;

}  // namespace

const kernel_set avx2_kernels = {
    "AVX2",   product_of<vectors>, attention_of<vectors>, quantize_q8_K<v256>, delta_net_rows<v256>, delta_net_fits<v256>,
    convolve<v256>, convolve_row,        sum_of_squares,        scale_row,     weighted_sum, last_largest, copy_block<v256>,
    multiply<vectors>,
};

}  // namespace mtp

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
