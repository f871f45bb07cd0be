// Types with blocks of 256 whose 16 sub-blocks of 16 elements have codes of a few bits: q2_K, q3_K, tq2_0. A format says
//
//     block, max_code      its layout and its largest code
//     has_min, bias_bits   an element is d * scale * code - dmin * min, or d * scale * (code - 2^bias_bits)
//     scales(p, lane, tail, scales, mins)   words of sub-blocks 0 to 7, and of 8 to 15
//     codes(p, lane, s, w)                  elements 32 * s to 32 * s + 15 of the blocks, and the 16 behind them
//     eighths(body)                         calls body(s) for s = 0 to 7, constants (unrolled) or numbers (looped)
//     d(tails), dmin(tails)                 floats from the last 32 bits of blocks, or from the first if d_first
//
// where tail has the last 16 bytes of the blocks, or the first.

#pragma once

#include "lanes-dots.h"
#include "lanes-super-blocks.h"

namespace mtp {
namespace {

// Two bits of each element: elements 128 * h + 32 * j + i are bits 2 * j and 2 * j + 1 of byte 32 * h + i.
template <class V, int S> LANES_INLINE void two_bits(const char * p, const size_t * lane, typename V::I * w) {
    LANES_UNROLL
    for (int i = 0; i < 2; i++) {
        w[i] = V::and_(V::template srl32<2 * (S % 4)>(V::lanes(p + 32 * (S / 4) + 16 * i, lane)), V::set8(3));
    }
}

struct q2_K : unrolled {
    using block = block_q2_K;
    static constexpr int max_code = 3, bias_bits = 0;
    static constexpr bool has_min = true, d_first = false;
    template <class V> LANES_INLINE void scales(const char * p, const size_t * lane, typename V::I, typename V::I * scales, typename V::I * mins) {
        const auto bytes = V::lanes(p + offsetof(block, scales), lane), four = V::set8(0x0f);
        const auto low = V::and_(bytes, four), high = V::and_(V::template srl32<4>(bytes), four);
        scales[0] = V::unpacklo8(low, V::zero());
        scales[1] = V::unpackhi8(low, V::zero());
        mins[0] = V::unpacklo8(high, V::zero());
        mins[1] = V::unpackhi8(high, V::zero());
    }
    template <class V, class S> LANES_INLINE void codes(const char * p, const size_t * lane, S, typename V::I * w) {
        two_bits<V, S::value>(p + offsetof(block, qs), lane, w);
    }
    template <class V> LANES_INLINE typename V::F d(typename V::I tails) { return V::half_lo(tails); }
    template <class V> LANES_INLINE typename V::F dmin(typename V::I tails) { return V::half_hi(tails); }
};

struct q3_K : unrolled {
    using block = block_q3_K;
    static constexpr int max_code = 7, bias_bits = 2;
    static constexpr bool has_min = false, d_first = false;
    // 6 bits less 32: the low four of 0 to 7 and of 8 to 15 in 8 bytes, the high two of i, i + 4, i + 8 and i + 12 in a byte
    template <class V> LANES_INLINE void scales(const char *, const size_t *, typename V::I tail, typename V::I * scales, typename V::I *) {
        static const int8_t low[16] = { 2, 3, 4, 5, 6, 7, 8, 9, -1, -1, -1, -1, -1, -1, -1, -1 };
        static const int8_t high[16] = { -1, -1, -1, -1, -1, -1, -1, -1, 2, 3, 4, 5, 6, 7, 8, 9 };
        static const int8_t top[16] = { 10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13, 10, 11, 12, 13 };
        static const uint8_t fifth[16] = { 1, 1, 1, 1, 4, 4, 4, 4, 16, 16, 16, 16, 64, 64, 64, 64 };
        static const uint8_t sixth[16] = { 2, 2, 2, 2, 8, 8, 8, 8, 32, 32, 32, 32, 128, 128, 128, 128 };
        const auto tops = V::shuffle8(tail, V::same(top)), four = V::set8(0x0f);
        auto six = V::or_(V::and_(V::shuffle8(tail, V::same(low)), four),
                          V::and_(V::template srl32<4>(V::shuffle8(tail, V::same(high))), four));
        six = V::or_(six, V::where8(tops, V::same(fifth), V::set8(0x10)));
        six = V::or_(six, V::where8(tops, V::same(sixth), V::set8(0x20)));
        scales[0] = V::sub16(V::unpacklo8(six, V::zero()), V::set16(32));
        scales[1] = V::sub16(V::unpackhi8(six, V::zero()), V::set16(32));
    }
    template <class V, class S> LANES_INLINE void codes(const char * p, const size_t * lane, S, typename V::I * w) {
        two_bits<V, S::value>(p + offsetof(block, qs), lane, w);
        LANES_UNROLL
        for (int i = 0; i < 2; i++) {
            const auto mask = V::lanes(p + offsetof(block, hmask) + 16 * i, lane);
            w[i] = V::or_(w[i], V::where8(mask, V::set8(1 << S::value), V::set8(4)));
        }
    }
    template <class V> LANES_INLINE typename V::F d(typename V::I tails) { return V::half_hi(tails); }
};

// One scale for all.
struct tq2_0 : unrolled {
    using block = block_tq2_0;
    static constexpr int max_code = 3, bias_bits = 0;
    static constexpr bool has_min = false, d_first = false;
    template <class V> LANES_INLINE void scales(const char *, const size_t *, typename V::I, typename V::I * scales, typename V::I *) {
        scales[0] = scales[1] = V::set16(1);
    }
    template <class V, class S> LANES_INLINE void codes(const char * p, const size_t * lane, S, typename V::I * w) {
        two_bits<V, S::value>(p + offsetof(block, qs), lane, w);
    }
    template <class V> LANES_INLINE typename V::F d(typename V::I tails) { return V::half_hi(tails); }
};

// What super_blocks and super_panels want to know of format F.
template <class F> struct sixteens {
    using block = typename F::block;
    static constexpr bool has_min = F::has_min;
    static constexpr int sub_block = 16, max_code = F::max_code, bias = 1 << F::bias_bits;
    template <class V> static constexpr int least = 8;

    // Scales, and what is multiplied with the sums of the activations: the minima, or what the bias adds to each code.
    template <class V> LANES_INLINE void load(const char * p, const size_t * lane, typename V::I & tail, typename V::I * scales, typename V::I * less) {
        tail = V::lanes(F::d_first ? p : p + sizeof(block) - 16, lane);
        F::template scales<V>(p, lane, tail, scales, less);
        if constexpr (!has_min) {
            LANES_UNROLL
            for (int h = 0; h < 2; h++) {
                less[h] = V::template sll16<F::bias_bits>(V::sub16(V::zero(), scales[h]));
            }
        }
    }

    template <class V, int M>
    LANES_INLINE void sums(const char * p, const size_t * lane, const q8_K_blocks<V> * const * y, typename V::I & tail,
                           typename V::I * sum, typename V::I * low) {
        typename V::I scales[2], less[2];
        load<V>(p, lane, tail, scales, less);
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            const auto x = V::add32(V::madd16(less[0], V::all(y[m]->bsums[0])), V::madd16(less[1], V::all(y[m]->bsums[1])));
            low[m] = x;
            sum[m] = has_min ? V::zero() : x;
        }
        F::eighths([&](auto at) LANES_ALWAYS {
            typename V::I w[2];
            F::template codes<V>(p, lane, at, w);
            // where dots of four codes may not fit into words, those of two do
            using D = std::conditional_t<(max_code > V::most_code), maddubs_dots<V>, V>;
            const auto s0 = D::scale(scales[at / 4], at % 4 * 2), s1 = D::scale(scales[at / 4], at % 4 * 2 + 1);
            LANES_UNROLL
            for (int m = 0; m < M; m++) {
                sum[m] = V::scaled(sum[m], D::dot16(w[0], V::all(y[m]->qs[2 * at])), s0);
                sum[m] = V::scaled(sum[m], D::dot16(w[1], V::all(y[m]->qs[2 * at + 1])), s1);
            }
        });
    }

    template <class V> LANES_INLINE typename V::F d(const typename V::I * tail) {
        return F::template d<V>(F::d_first ? lane_heads<V>(tail) : lane_tails<V>(tail));
    }
    template <class V> LANES_INLINE typename V::F dmin(const typename V::I * tail) {
        if constexpr (has_min) {
            return F::template dmin<V>(lane_tails<V>(tail));
        } else {
            return V::zerof();
        }
    }

    template <class V> LANES_INLINE void unpack(const char * p, size_t stride, const size_t * lane, unpacked_rows<V> & to) {
        typename V::I tail[4], scales[2][4], less[2][4];
        LANES_UNROLL
        for (int i = 0; i < 4; i++) {
            typename V::I s[2], l[2];
            load<V>(p + i * stride, lane, tail[i], s, l);
            LANES_UNROLL
            for (int h = 0; h < 2; h++) {
                scales[h][i] = s[h];
                less[h][i] = l[h];
            }
        }
        to.d = d<V>(tail);
        to.dmin = dmin<V>(tail);
        LANES_UNROLL
        for (int h = 0; h < 2; h++) {
            store_scales<V>(scales[h], to.scales + 8 * h);
            transpose<V>(less[h], to.least + 4 * h);
        }
        F::eighths([&](auto at) LANES_ALWAYS {
            typename V::I w[2][4];
            LANES_UNROLL
            for (int i = 0; i < 4; i++) {
                typename V::I both[2];
                F::template codes<V>(p + i * stride, lane, at, both);
                w[0][i] = both[0];
                w[1][i] = both[1];
            }
            transpose<V>(w[0], to.codes + 8 * at);
            transpose<V>(w[1], to.codes + 8 * at + 4);
        });
    }
};

}  // namespace
}  // namespace mtp
