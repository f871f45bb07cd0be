// Types with blocks of 32 or 64 elements, as all instruction sets unpack them. 32 of them, which are multiplied with a
// block of activations, are a piece. A format says
//
//     block              its layout
//     pieces             of a block
//     sub_block          elements with a scale of their own: 32, a piece, or 16, half of one
//     max_code, bias     its codes are from 0 to max_code and `bias` too large; or is_signed: from -max_code - 1 to max_code
//     has_min            an element is code * d + m
//     codes(p, lane, head, piece, w)   a piece of the block at p + lane[l] in lane l: the first 16 elements and the last;
//                                      where sub_block is 16, the first eight elements of both halves and the last eight
//     d(heads, piece, to), m(heads)    the scale of a piece, or those of its halves, and its minimum: floats from the first
//                                      32 bits of blocks
//
// where head has the first 16 bytes of the blocks. V has the operations on bytes of lanes-kernels.h.

#pragma once

#include "lanes-kernels.h"

namespace mtp {
namespace {

// Bytes of low halves, and of high ones.
template <class V> LANES_INLINE void nibbles(typename V::I packed, typename V::I * w) {
    w[0] = V::and_(packed, V::set8(0x0f));
    w[1] = V::and_(V::template srl32<4>(packed), V::set8(0x0f));
}

struct block_format {
    static constexpr int pieces = 1, sub_block = 32;
    static constexpr int bias = 0;
    static constexpr bool has_min = false, is_signed = false;
    template <class V> LANES_INLINE void d(typename V::I heads, int, typename V::F * to) { to[0] = V::half_lo(heads); }
};

struct q4_0 : block_format {
    using block = block_q4_0;
    static constexpr int max_code = 15, bias = 8;
    template <class V> LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I, int, typename V::I * w) {
        nibbles<V>(V::lanes(p + offsetof(block, qs), lane), w);
    }
};

struct q4_1 : block_format {
    using block = block_q4_1;
    static constexpr int max_code = 15;
    static constexpr bool has_min = true;
    template <class V> LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I, int, typename V::I * w) {
        nibbles<V>(V::lanes(p + offsetof(block, qs), lane), w);
    }
    template <class V> LANES_INLINE typename V::F m(typename V::I heads) { return V::half_hi(heads); }
};

// The fifth bits of a block are in the 4 bytes qh.
template <class B> struct five_bits : block_format {
    using block = B;
    static constexpr int max_code = 31;
    template <class V> LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I head, int, typename V::I * w) {
        constexpr int8_t q = offsetof(block, qh);
        static const int8_t pick[2][16] = { { q, q, q, q, q, q, q, q, q + 1, q + 1, q + 1, q + 1, q + 1, q + 1, q + 1, q + 1 },
                                            { q + 2, q + 2, q + 2, q + 2, q + 2, q + 2, q + 2, q + 2,
                                              q + 3, q + 3, q + 3, q + 3, q + 3, q + 3, q + 3, q + 3 } };
        static const uint8_t bits[16] = { 1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128 };
        nibbles<V>(V::lanes(p + offsetof(block, qs), lane), w);
        LANES_UNROLL
        for (int i = 0; i < 2; i++) {
            w[i] = V::or_(w[i], V::where8(V::shuffle8(head, V::same(pick[i])), V::same(bits), V::set8(0x10)));
        }
    }
};

struct q5_0 : five_bits<block_q5_0> {
    static constexpr int bias = 16;
};

struct q5_1 : five_bits<block_q5_1> {
    static constexpr bool has_min = true;
    template <class V> LANES_INLINE typename V::F m(typename V::I heads) { return V::half_hi(heads); }
};

struct iq4_nl : block_format {
    using block = block_q4_0;  // the same layout
    static constexpr int max_code = 127;
    static constexpr bool is_signed = true;
    template <class V> LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I, int, typename V::I * w) {
        const auto table = V::signed_code(V::same(iq4_values));
        nibbles<V>(V::lanes(p + offsetof(block, qs), lane), w);
        w[0] = V::shuffle8(table, w[0]);
        w[1] = V::shuffle8(table, w[1]);
    }
};

// Floats of 4 bits, as codes of half a unit.
template <class B, int Pieces> struct fp4 : block_format {
    using block = B;
    static constexpr int pieces = Pieces, max_code = 24, bias = 12;
    template <class V>
    LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I, int piece, typename V::I * w) {
        static const int8_t values[16] = { 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0 };
        nibbles<V>(V::lanes(p + offsetof(block, qs) + 16 * piece, lane), w);
        w[0] = V::shuffle8(V::same(values), w[0]);
        w[1] = V::shuffle8(V::same(values), w[1]);
    }
};

// With a power of two for 32.
struct mxfp4 : fp4<block_mxfp4, 1> {
    template <class V> LANES_INLINE void d(typename V::I heads, int, typename V::F * to) {
        const auto exponents = V::template sll32<23>(V::and_(heads, V::set32(0xff)));
        to[0] = V::mul(V::as_float(exponents), V::setf(0.5f));
    }
};

// With a float of 8 bits for 16, which has 4 bits of exponent and 3 of mantissa: the upper bits of a half float / 2^8.
struct nvfp4 : fp4<block_nvfp4, 2> {
    static constexpr int sub_block = 16;
    template <class V> LANES_INLINE void d(typename V::I heads, int piece, typename V::F * to) {
        static const int8_t pick[2][16] = { { -1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13 },
                                            { -1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15 } };
        // As ggml has it, the highest bit says nothing, but 0x7f is 0 and 0xff is not.
        const auto top = V::set8(0x80), low = V::set8(0x7f);
        const auto is_nan = V::and_(V::add8(heads, V::set8(1)), V::xor_(heads, top));  // its highest bit
        const auto scales = V::xor_(V::and_(heads, low), V::where8(is_nan, top, low));
        const auto pair = V::template srl16<1>(V::shuffle8(scales, V::same(pick[piece])));
        to[0] = V::mul(V::half_lo(pair), V::setf(128.0f));
        to[1] = V::mul(V::half_hi(pair), V::setf(128.0f));
    }
};

// Four elements in a byte.
struct q2_0 : block_format {
    using block = block_q2_0;
    static constexpr int pieces = 2, max_code = 3, bias = 1;
    template <class V>
    LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I, int piece, typename V::I * w) {
        // For each element a copy of its byte in which it has the lowest or the next two bits; all others are masked.
        static const int8_t pick[2][16] = { { 0, 0, 8, 8, 1, 1, 9, 9, 2, 2, 10, 10, 3, 3, 11, 11 },
                                            { 4, 4, 12, 12, 5, 5, 13, 13, 6, 6, 14, 14, 7, 7, 15, 15 } };
        static const int8_t values[16] = { 0, 1, 2, 3, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0 };
        const auto packed = V::lanes(p + offsetof(block, qs), lane), upper = V::template srl32<4>(packed);
        const auto both = piece == 0 ? V::unpacklo64(packed, upper) : V::unpackhi64(packed, upper);
        LANES_UNROLL
        for (int i = 0; i < 2; i++) {
            const auto masked = V::and_(V::shuffle8(both, V::same(pick[i])), V::set16(0x0c03));
            w[i] = V::shuffle8(V::same(values), masked);
        }
    }
};

struct q8_0 : block_format {
    using block = block_q8_0;
    static constexpr int max_code = 127;
    static constexpr bool is_signed = true;
    template <class V> LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I, int, typename V::I * w) {
        w[0] = V::signed_code(V::lanes(p + offsetof(block, qs), lane));
        w[1] = V::signed_code(V::lanes(p + offsetof(block, qs) + 16, lane));
    }
};

}  // namespace
}  // namespace mtp
