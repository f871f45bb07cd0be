// Functions of these headers are the same for every instruction set, so they come before it is chosen.
#include "../delta_net.h"
#include "lanes.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

LANES_TARGET("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx2")

#include <immintrin.h>

#include "lanes-dots.h"
#include "lanes-products.h"
#include "lanes-q8_K.h"
#include "lanes-rows.h"
#include "lanes-v512.h"

namespace mtp {

using vectors = maddubs_dots<v512>;

const kernel_set avx512_kernels =
    kernels_of<v512>("AVX512", product_of<vectors>, multiply<vectors>, attention_of<vectors>, quantize_q8_K<v512>);

}  // namespace mtp

LANES_END_TARGET

#endif
