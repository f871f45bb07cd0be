// Functions of these headers are the same for every instruction set, so they come before it is chosen.
#include "../delta_net.h"
#include "lanes.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

LANES_TARGET("avx2,fma,f16c")

#include <immintrin.h>

#include "lanes-dots.h"
#include "lanes-products.h"
#include "lanes-q8_K.h"
#include "lanes-rows.h"
#include "lanes-v256.h"

namespace mtp {

using vectors = maddubs_dots<v256>;

const kernel_set avx2_kernels =
    kernels_of<v256>("AVX2", product_of<vectors>, multiply<vectors>, attention_of<vectors>, quantize_q8_K<v256>);

}  // namespace mtp

LANES_END_TARGET

#endif
