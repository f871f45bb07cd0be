// Products of bytes for the vectors B of an instruction set, which make the vectors V of lanes-kernels.h: `maddubs_dots`
// with what every AVX2 has, in words, and `vnni_dots`, in 32 bits. `scaled` takes dots of codes up to `most_code`.

#pragma once

#include "lanes-kernels.h"

namespace mtp {
namespace {

template <class B> struct maddubs_dots : B {
    using typename B::I;

    LANES_INLINE I dot16(I u, I s) { return B::maddubs(u, s); }
    LANES_INLINE I dot32(I u0, I s0, I u1, I s1) { return B::add16(dot16(u0, s0), dot16(u1, s1)); }
    LANES_INLINE I scaled(I acc, I dot, I scale) { return at_once(B::add32(acc, B::madd16(dot, scale))); }
    LANES_INLINE I scale(I words, int n) { return B::shuffle8(words, B::set16(2 * n | (2 * n + 1) << 8)); }
    static constexpr int most_code = INT16_MAX / (2 * 127);

    // The sign of signed codes is moved to the activations.
    static constexpr bool offset_codes = false;
    LANES_INLINE I dot16_signed(I w, I s) { return dot16(B::abs8(w), B::sign8(s, w)); }
    LANES_INLINE I signed_code(I w) { return w; }
    LANES_INLINE I signed_start(I, I) { return B::zero(); }
    template <int N> LANES_INLINE I signed32(I acc, I w0, I s0, I w1, I s1, I scales) {
        const I each = scale(scales, N);
        return scaled(scaled(acc, dot16_signed(w0, s0), each), dot16_signed(w1, s1), each);
    }
    template <bool Signed> LANES_INLINE I sums(I w0, I s0, I w1, I s1) {
        if constexpr (Signed) {
            return widened(widened(B::zero(), dot16_signed(w0, s0)), dot16_signed(w1, s1));
        } else {
            return widened(B::zero(), dot32(w0, s0, w1, s1));
        }
    }

    // For panels: two products are accumulated in each word, while they fit; with AVX-512, at most four steps.
    static constexpr bool wide_dots = false;
    template <class T>
    static constexpr int steps = T::max_code < 16 && B::count == 2 ? T::sub_block / 4
                                 : T::max_code < 31                ? 4
                                                                   : INT16_MAX / (2 * 127 * T::max_code);
    template <class T> LANES_INLINE I dot4(I acc, I w, I s) {
        return B::add16(acc, T::max_code == 127 ? dot16_signed(w, s) : dot16(w, s));
    }
    // The same for signed codes, as their magnitudes and as -1 where they are negative, both computed once for all columns.
    // Since s ^ -1 = -s - 1, the magnitudes of negative codes have to be added. The exclusive or runs in any vector unit, and
    // sign8 in those that multiply, which have the most to do. Words do not overflow: -128 * -128 does not occur.
    template <class T> static constexpr bool has_magnitudes = T::is_signed;
    LANES_INLINE I signed_dot4(I negative, I magnitudes, I s) { return dot16(magnitudes, B::xor_(s, negative)); }
    LANES_INLINE I widened(I acc, I dot) { return B::add32(acc, B::madd16(dot, B::set16(1))); }
    LANES_INLINE I scaled_sum(I acc, I dot, I scale) { return scaled(acc, dot, scale); }
    LANES_INLINE I add_madd16(I acc, I a, I b) { return at_once(B::add32(acc, B::madd16(a, b))); }
    LANES_INLINE I low_word(I a) { return B::or_(B::template sll32<16>(a), B::and_(a, B::set32(0xffff))); }
    LANES_INLINE I high_word(I a) { return low_word(B::template srl32<16>(a)); }
};

template <class B> struct vnni_dots : B {
    using typename B::I;

    LANES_INLINE I dot16(I u, I s) { return B::dpbusd(B::zero(), u, s); }
    LANES_INLINE I dot32(I u0, I s0, I u1, I s1) { return B::dpbusd(dot16(u0, s0), u1, s1); }
    LANES_INLINE I scaled(I acc, I dot, I scale) { return B::dpwssd(acc, dot, scale); }
    LANES_INLINE I scale(I words, int n) {
        return B::shuffle8(words, B::set32(2 * n | (2 * n + 1) << 8 | (int) 0x80800000));  // the high word is the dot's sign
    }
    static constexpr int most_code = INT16_MAX / (4 * 127);

    // 128 is added to signed codes before the product, and 128 times the sum of the activations is subtracted.
    static constexpr bool offset_codes = true;
    LANES_INLINE I signed_code(I w) { return B::xor_(w, B::set8(0x80)); }
    LANES_INLINE I signed_start(I scales, I pairs) {
        return B::madd16(B::sub16(B::zero(), B::template sll16<7>(scales)), pairs);
    }
    template <int N> LANES_INLINE I signed32(I acc, I w0, I s0, I w1, I s1, I scales) {
        constexpr int pick = 0x8080 | 2 * N << 16 | (2 * N + 1) << 24;
        const I wide = B::template sra32<16>(B::shuffle8(scales, B::set32(pick)));
        return at_once(B::add32(acc, B::mullo32(dot32(w0, s0, w1, s1), wide)));
    }
    template <bool Signed> LANES_INLINE I sums(I w0, I s0, I w1, I s1) { return dot32(w0, s0, w1, s1); }

    // For panels: four products are accumulated in each element, in 32 bits.
    static constexpr bool wide_dots = true;
    template <class T> static constexpr int steps = T::sub_block / 4;
    template <class T> LANES_INLINE I dot4(I acc, I w, I s) { return B::dpbusd(acc, w, s); }
    template <class T> static constexpr bool has_magnitudes = false;
    LANES_INLINE I widened(I acc, I dot) { return B::add32(acc, dot); }
    LANES_INLINE I scaled_sum(I acc, I dot, I scale) { return B::add32(acc, B::mullo32(dot, scale)); }
    LANES_INLINE I add_madd16(I acc, I a, I b) { return B::dpwssd(acc, a, b); }
    LANES_INLINE I low_word(I a) { return B::template sra32<16>(B::template sll32<16>(a)); }
    LANES_INLINE I high_word(I a) { return B::template sra32<16>(a); }
};

}  // namespace
}  // namespace mtp
