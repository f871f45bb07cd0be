// Types with blocks of 256 whose elements are magnitudes from a table (grids.h), four or eight at a time, with signs:
// iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s. They are formats of lanes-k-formats.h, whose codes are made from
//
//     look(p, s, magnitudes)     of elements 32 * s to 32 * s + 31 of the block at p
//     signs(p, lane, s, signs)   for each of these elements of the blocks a byte with the signs of eight, in order

#pragma once

#include "../grids.h"
#include "lanes-k-formats.h"

namespace mtp {
namespace {

// Four elements for each of eight numbers, and eight for each of four.
LANES_INLINE void look_up(const uint32_t * grid, const uint32_t * at, __m128i * to) {
    to[0] = _mm_setr_epi32((int) grid[at[0]], (int) grid[at[1]], (int) grid[at[2]], (int) grid[at[3]]);
    to[1] = _mm_setr_epi32((int) grid[at[4]], (int) grid[at[5]], (int) grid[at[6]], (int) grid[at[7]]);
}
LANES_INLINE void look_up(const uint64_t * grid, const uint32_t * at, __m128i * to) {
    to[0] = _mm_set_epi64x((long long) grid[at[1]], (long long) grid[at[0]]);
    to[1] = _mm_set_epi64x((long long) grid[at[3]], (long long) grid[at[2]]);
}

// A word of 32 or 64 bits at p + lane[l], at the beginning of each lane.
template <class V, class Word> LANES_INLINE typename V::I words(const char * p, const size_t * lane) {
    __m128i x[V::count];
    LANES_UNROLL
    for (int l = 0; l < V::count; l++) {
        Word word;
        memcpy(&word, p + lane[l], sizeof(word));
        x[l] = sizeof(word) == 4 ? _mm_cvtsi32_si128((int) word) : _mm_cvtsi64_si128((long long) word);
    }
    return V::from_lanes(x);
}

// The low bytes of four elements of `Bytes` bytes each: of the first and second eight times each, and of the others.
template <class V, int Bytes> LANES_INLINE void eight_times(typename V::I from, typename V::I * to) {
    static const int8_t pick[2][16] = { { 0, 0, 0, 0, 0, 0, 0, 0, Bytes, Bytes, Bytes, Bytes, Bytes, Bytes, Bytes, Bytes },
                                        { 2 * Bytes, 2 * Bytes, 2 * Bytes, 2 * Bytes, 2 * Bytes, 2 * Bytes, 2 * Bytes, 2 * Bytes,
                                          3 * Bytes, 3 * Bytes, 3 * Bytes, 3 * Bytes, 3 * Bytes, 3 * Bytes, 3 * Bytes, 3 * Bytes } };
    LANES_UNROLL
    for (int i = 0; i < 2; i++) {
        to[i] = V::shuffle8(from, V::same(pick[i]));
    }
}

// In the low bytes of elements of 32 or 16 bits: the signs of seven elements, and of an eighth, which makes their number even.
template <class V> LANES_INLINE typename V::I even_signs(typename V::I sevens) {
    static const int8_t eighth[16] = { 0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0 };
    const auto halves = V::and_(V::xor_(sevens, V::template srl16<4>(sevens)), V::set8(0x0f));
    return V::xor_(sevens, V::shuffle8(V::same(eighth), halves));
}

// Signs from four times 7 bits of the word at p + lane[l].
template <class V> LANES_INLINE void signs_of_words(const char * p, const size_t * lane, typename V::I * to) {
    static const int32_t sevens[4] = { 0, 7, 14, 21 };
    const auto word = V::template shuffle32<0, 0, 0, 0>(words<V, uint32_t>(p, lane));
    eight_times<V, 4>(even_signs<V>(V::and_(V::srlv32(word, V::same(sevens)), V::set32(0x7f))), to);
}

// F's codes: -magnitude or magnitude, and the bias.
template <class F, int Bias> struct signed_grid {
    static constexpr int bias_bits = Bias;
    static constexpr bool has_min = false, d_first = true;

    template <class Body> LANES_INLINE void eighths(Body && body) {
        for (int s = 0; s < 8; s++) {
            body(s);
        }
    }

    template <class V> LANES_INLINE void codes(const char * p, const size_t * lane, int s, typename V::I * w) {
        static const uint8_t bits[16] = { 1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128 };
        __m128i magnitudes[2][V::count];
        LANES_UNROLL
        for (int l = 0; l < V::count; l++) {
            __m128i both[2];
            F::look((const uint8_t *) p + lane[l], s, both);
            magnitudes[0][l] = both[0];
            magnitudes[1][l] = both[1];
        }
        typename V::I signs[2];
        F::template signs<V>(p, lane, s, signs);
        LANES_UNROLL
        for (int i = 0; i < 2; i++) {
            w[i] = V::add8(V::negated8(V::from_lanes(magnitudes[i]), signs[i], V::same(bits)), V::set8(1 << Bias));
        }
    }

    // Words from the low halves, and from the high halves, of the bytes that `pick` names.
    template <class V> LANES_INLINE typename V::I low_halves(typename V::I bytes, const int8_t * pick) {
        return V::and_(V::shuffle8(bytes, V::same(pick)), V::set8(0x0f));
    }
    template <class V> LANES_INLINE typename V::I high_halves(typename V::I bytes, const int8_t * pick) {
        return V::and_(V::template srl32<4>(V::shuffle8(bytes, V::same(pick))), V::set8(0x0f));
    }
    template <class V> LANES_INLINE typename V::I odd(typename V::I n) { return V::or_(V::template sll16<1>(n), V::set16(1)); }

    // d times a power of two, from the first 32 bits of blocks
    template <class V> LANES_INLINE typename V::F d(typename V::I heads) { return V::mul(V::half_lo(heads), V::setf(F::unit)); }
};

struct iq3_xxs : signed_grid<iq3_xxs, 6> {
    using block = block_iq3_xxs;
    static constexpr int max_code = 64 + 62;
    static constexpr float unit = 0.25f;
    template <class V> LANES_INLINE void scales(const char * p, const size_t * lane, typename V::I, typename V::I * scales, typename V::I *) {
        static const int8_t high[16] = { 3, -1, 3, -1, 7, -1, 7, -1, 11, -1, 11, -1, 15, -1, 15, -1 };
        LANES_UNROLL
        for (int h = 0; h < 2; h++) {
            scales[h] = odd<V>(high_halves<V>(V::lanes(p + offsetof(block, signs) + 16 * h, lane), high));
        }
    }
    LANES_INLINE void look(const uint8_t * p, int s, __m128i * to) {
        uint32_t at[8];
        LANES_UNROLL
        for (int i = 0; i < 8; i++) {
            at[i] = p[offsetof(block, qs) + 8 * s + i];
        }
        look_up(grids.iq3_xxs, at, to);
    }
    template <class V> LANES_INLINE void signs(const char * p, const size_t * lane, int s, typename V::I * to) {
        signs_of_words<V>(p + offsetof(block, signs) + 4 * s, lane, to);
    }
};

struct iq3_s : signed_grid<iq3_s, 4> {
    using block = block_iq3_s;
    static constexpr int max_code = 16 + 15;
    static constexpr float unit = 1.0f;
    template <class V> LANES_INLINE void scales(const char * p, const size_t * lane, typename V::I, typename V::I * scales, typename V::I *) {
        static const int8_t low[2][16] = { { 12, -1, 12, -1, -1, -1, -1, -1, 13, -1, 13, -1, -1, -1, -1, -1 },
                                           { 14, -1, 14, -1, -1, -1, -1, -1, 15, -1, 15, -1, -1, -1, -1, -1 } };
        static const int8_t high[2][16] = { { -1, -1, -1, -1, 12, -1, 12, -1, -1, -1, -1, -1, 13, -1, 13, -1 },
                                            { -1, -1, -1, -1, 14, -1, 14, -1, -1, -1, -1, -1, 15, -1, 15, -1 } };
        const auto tail = V::lanes(p + sizeof(block) - 16, lane);
        LANES_UNROLL
        for (int h = 0; h < 2; h++) {
            scales[h] = odd<V>(V::or_(low_halves<V>(tail, low[h]), high_halves<V>(tail, high[h])));
        }
    }
    LANES_INLINE void look(const uint8_t * p, int s, __m128i * to) {
        const uint32_t ninth = p[offsetof(block, qh) + s];
        uint32_t at[8];
        LANES_UNROLL
        for (int i = 0; i < 8; i++) {
            at[i] = p[offsetof(block, qs) + 8 * s + i] | (ninth << (8 - i) & 0x100);
        }
        look_up(grids.iq3_s, at, to);
    }
    template <class V> LANES_INLINE void signs(const char * p, const size_t * lane, int s, typename V::I * to) {
        eight_times<V, 1>(words<V, uint32_t>(p + offsetof(block, signs) + 4 * s, lane), to);
    }
};

struct iq2_xxs : signed_grid<iq2_xxs, 6> {
    using block = block_iq2_xxs;
    static constexpr int max_code = 64 + 43;
    static constexpr float unit = 0.125f;
    template <class V> LANES_INLINE void scales(const char * p, const size_t * lane, typename V::I, typename V::I * scales, typename V::I *) {
        static const int8_t first[16] = { 7, -1, 7, -1, 15, -1, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1 };
        static const int8_t second[16] = { -1, -1, -1, -1, -1, -1, -1, -1, 7, -1, 7, -1, 15, -1, 15, -1 };
        LANES_UNROLL
        for (int h = 0; h < 2; h++) {
            const char * at = p + offsetof(block, qs) + 32 * h;
            scales[h] = odd<V>(V::or_(high_halves<V>(V::lanes(at, lane), first), high_halves<V>(V::lanes(at + 16, lane), second)));
        }
    }
    LANES_INLINE void look(const uint8_t * p, int s, __m128i * to) {
        const uint8_t * q = p + offsetof(block, qs) + 8 * s;
        const uint32_t at[4] = { q[0], q[1], q[2], q[3] };
        look_up(grids.iq2_xxs, at, to);
    }
    template <class V> LANES_INLINE void signs(const char * p, const size_t * lane, int s, typename V::I * to) {
        signs_of_words<V>(p + offsetof(block, qs) + 8 * s + 4, lane, to);
    }
};

// Two scales of 16 elements in each of the last 8 bytes.
template <class F> struct grid_of_sixteens : signed_grid<F, 6> {
    static constexpr int max_code = 64 + 43;
    static constexpr float unit = 0.125f;
    template <class V> LANES_INLINE void scales(const char * p, const size_t * lane, typename V::I, typename V::I * scales, typename V::I *) {
        using base = signed_grid<F, 6>;
        static const int8_t low[2][16] = { { 8, -1, -1, -1, 9, -1, -1, -1, 10, -1, -1, -1, 11, -1, -1, -1 },
                                           { 12, -1, -1, -1, 13, -1, -1, -1, 14, -1, -1, -1, 15, -1, -1, -1 } };
        static const int8_t high[2][16] = { { -1, -1, 8, -1, -1, -1, 9, -1, -1, -1, 10, -1, -1, -1, 11, -1 },
                                            { -1, -1, 12, -1, -1, -1, 13, -1, -1, -1, 14, -1, -1, -1, 15, -1 } };
        const auto tail = V::lanes(p + sizeof(typename F::block) - 16, lane);
        LANES_UNROLL
        for (int h = 0; h < 2; h++) {
            scales[h] = base::template odd<V>(
                V::or_(base::template low_halves<V>(tail, low[h]), base::template high_halves<V>(tail, high[h])));
        }
    }
};

struct iq2_xs : grid_of_sixteens<iq2_xs> {
    using block = block_iq2_xs;
    LANES_INLINE void look(const uint8_t * p, int s, __m128i * to) {
        uint32_t at[4];
        LANES_UNROLL
        for (int i = 0; i < 4; i++) {
            const uint8_t * q = p + offsetof(block, qs) + 8 * s + 2 * i;
            at[i] = (q[0] | (uint32_t) q[1] << 8) & 511;
        }
        look_up(grids.iq2_xs, at, to);
    }
    template <class V> LANES_INLINE void signs(const char * p, const size_t * lane, int s, typename V::I * to) {
        const auto numbers = words<V, uint64_t>(p + offsetof(block, qs) + 8 * s, lane);
        eight_times<V, 2>(even_signs<V>(V::template srl16<9>(numbers)), to);
    }
};

struct iq2_s : grid_of_sixteens<iq2_s> {
    using block = block_iq2_s;
    LANES_INLINE void look(const uint8_t * p, int s, __m128i * to) {
        const uint32_t more = p[offsetof(block, qh) + s];
        uint32_t at[4];
        LANES_UNROLL
        for (int i = 0; i < 4; i++) {
            at[i] = p[offsetof(block, qs) + 4 * s + i] | (more << (8 - 2 * i) & 0x300);
        }
        look_up(grids.iq2_s, at, to);
    }
    template <class V> LANES_INLINE void signs(const char * p, const size_t * lane, int s, typename V::I * to) {
        eight_times<V, 1>(words<V, uint32_t>(p + offsetof(block, signs) + 4 * s, lane), to);
    }
};

}  // namespace
}  // namespace mtp
