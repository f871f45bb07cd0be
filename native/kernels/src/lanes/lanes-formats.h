// Types with blocks of 32 elements and a scale each, as all instruction sets unpack them. A format says
//
//     block              its layout
//     max_code, bias     its codes are from 0 to max_code and `bias` too large; or is_signed: from -max_code - 1 to max_code
//     has_min            an element is code * d + m
//     codes(p, lane, head, w)   the elements of the block at p + lane[l] in lane l, the first 16 and the last
//     d(heads), m(heads)        floats from the first 32 bits of blocks
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

// kvalues_iq4nl of ggml-common.h
constexpr int8_t iq4_values[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

struct block_format {
    static constexpr int sub_block = 32;
    static constexpr int bias = 0;
    static constexpr bool has_min = false, is_signed = false;
    template <class V> LANES_INLINE typename V::F d(typename V::I heads) { return V::half_lo(heads); }
};

struct q4_0 : block_format {
    using block = block_q4_0;
    static constexpr int max_code = 15, bias = 8;
    template <class V> LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I, typename V::I * w) {
        nibbles<V>(V::lanes(p + offsetof(block, qs), lane), w);
    }
};

struct q4_1 : block_format {
    using block = block_q4_1;
    static constexpr int max_code = 15;
    static constexpr bool has_min = true;
    template <class V> LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I, typename V::I * w) {
        nibbles<V>(V::lanes(p + offsetof(block, qs), lane), w);
    }
    template <class V> LANES_INLINE typename V::F m(typename V::I heads) { return V::half_hi(heads); }
};

// The fifth bits of a block are in the 4 bytes qh.
template <class B> struct five_bits : block_format {
    using block = B;
    static constexpr int max_code = 31;
    template <class V> LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I head, typename V::I * w) {
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
    template <class V> LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I, typename V::I * w) {
        const auto table = V::signed_code(V::same(iq4_values));
        nibbles<V>(V::lanes(p + offsetof(block, qs), lane), w);
        w[0] = V::shuffle8(table, w[0]);
        w[1] = V::shuffle8(table, w[1]);
    }
};

// Codes of half a unit in 4 bits, and a power of two.
struct mxfp4 : block_format {
    using block = block_mxfp4;
    static constexpr int max_code = 24, bias = 12;
    template <class V> LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I, typename V::I * w) {
        static const int8_t values[16] = { 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0 };
        nibbles<V>(V::lanes(p + offsetof(block, qs), lane), w);
        w[0] = V::shuffle8(V::same(values), w[0]);
        w[1] = V::shuffle8(V::same(values), w[1]);
    }
    template <class V> LANES_INLINE typename V::F d(typename V::I heads) {
        const auto exponents = V::template sll32<23>(V::and_(heads, V::set32(0xff)));
        return V::mul(V::as_float(exponents), V::setf(0.5f));
    }
};

struct q8_0 : block_format {
    using block = block_q8_0;
    static constexpr int max_code = 127;
    static constexpr bool is_signed = true;
    template <class V> LANES_INLINE void codes(const char * p, const size_t * lane, typename V::I, typename V::I * w) {
        w[0] = V::signed_code(V::lanes(p + offsetof(block, qs), lane));
        w[1] = V::signed_code(V::lanes(p + offsetof(block, qs) + 16, lane));
    }
};

}  // namespace
}  // namespace mtp
