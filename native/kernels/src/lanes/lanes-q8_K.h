// Activations for products with blocks of 256: the numbers of ggml's quantize_row_q8_K. There the largest element is always -127;
// here it has its sign, which changes no bit of a product.

#pragma once

#include "lanes-kernels.h"

namespace mtp {
namespace {

template <class V> void quantize_q8_K(const float * x, block_q8_K * y, int64_t blocks) {
    using I = typename V::I;
    constexpr int together = 4 * V::floats;  // elements that are packed in one vector of bytes
    const I one8 = V::set8(1), one16 = V::set16(1);

    for (; blocks > 0; blocks--, x += QK_K, y++) {
        auto most = V::zerof();  // without NaNs: the instruction returns its second operand then
        for (int j = 0; j < QK_K; j += V::floats) {
            __builtin_prefetch(x + 2 * QK_K + j);
            most = V::maxf(V::as_float(V::and_(V::as_int(V::load_f32(x + j)), V::set32(INT32_MAX))), most);
        }
        const float largest = V::largest(most);
        if (largest == 0.0f) {
            memset(y, 0, sizeof(*y));
            continue;
        }
        const float iscale = 127.f / largest;
        const auto scale = V::setf(iscale);
        I sums[QK_K / together];  // of four elements
        LANES_UNROLL
        for (int g = 0; g < QK_K / together; g++) {
            const auto at = [&](int i) LANES_ALWAYS { return V::to_int(V::mul(scale, V::load_f32(x + g * together + i * V::floats))); };
            const I q = V::ordered(V::packs16(V::packs32(at(0), at(1)), V::packs32(at(2), at(3))));
            V::store(y->qs + g * together, q);
            sums[g] = V::madd16(V::maddubs(one8, q), one16);
        }
        LANES_UNROLL
        for (int g = 0; g < QK_K / together; g += 4) {
            V::store_words(y->bsums + g * together / 16, V::ordered(lane_sums<V>(sums + g)));
        }
        y->d = 1 / iscale;
    }
}

}  // namespace
}  // namespace mtp
