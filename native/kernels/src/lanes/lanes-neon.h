// The kernels of lanes.h for NEON. Included once for each instruction set, after its target is chosen.
//
// Four rows of weights are processed together. V decides which of their bytes a vector holds: `dots` has four bytes of
// each row, so that a vector of sums has a lane for each row; `matrices` (lanes-neon-i8mm.cpp) has
// eight bytes of two rows. Bytes are unpacked in that order, because unpacking does the same to all bytes.
//
//     V::columns              columns that a product takes at once, a unit
//     V::weave(rows, codes)   16 bytes of each of four rows, in V's order, in four vectors
//     V::arrange(c, x, to)    16 bytes of column c of a unit, to where V::dot reads them
//     V::dot(acc, codes, x)   acc plus the products of 16 elements of four rows and a unit
//     V::start(p)             sums that are p[c] for column c in each row
//     V::scaled(acc, dot, s)  acc plus dot times s = V::spread(scales of four rows)
//     V::rows(acc, c)         column c's sums, of four rows
//
// Each product of a row and a column is rounded in a fixed order, so its bits do not depend on the other
// rows and columns of the call; for types with blocks of 256 they are those of AVX2 (lanes-super-blocks.h).

#pragma once

#include "lanes-kernels.h"

#include <arm_neon.h>

namespace mtp {
namespace {

// A barrier for the compiler, which otherwise hoists loads as far as it can and spills the results.
LANES_INLINE void in_order() {
    __asm__ volatile("" ::: "memory");
}

// m[i] element j to m[j] element i
LANES_INLINE void transpose(uint32x4_t * m) {
    const uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(m[0], m[1])), b = vreinterpretq_u64_u32(vtrn2q_u32(m[0], m[1]));
    const uint64x2_t c = vreinterpretq_u64_u32(vtrn1q_u32(m[2], m[3])), d = vreinterpretq_u64_u32(vtrn2q_u32(m[2], m[3]));
    m[0] = vreinterpretq_u32_u64(vzip1q_u64(a, c));
    m[1] = vreinterpretq_u32_u64(vzip1q_u64(b, d));
    m[2] = vreinterpretq_u32_u64(vzip2q_u64(a, c));
    m[3] = vreinterpretq_u32_u64(vzip2q_u64(b, d));
}

// 16 bytes at `offset` of each of four rows
LANES_INLINE void load_rows(const char * const * row, size_t offset, uint8x16_t * to) {
    LANES_UNROLL
    for (int r = 0; r < 4; r++) {
        to[r] = vld1q_u8((const uint8_t *) row[r] + offset);
    }
}

LANES_INLINE void load_words(const char * const * row, size_t offset, uint32x4_t * to) {
    LANES_UNROLL
    for (int r = 0; r < 4; r++) {
        to[r] = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *) row[r] + offset));
    }
    transpose(to);
}

template <class V> LANES_INLINE void load_codes(const char * const * row, size_t offset, uint8x16_t * codes) {
    in_order();
    uint8x16_t bytes[4];
    load_rows(row, offset, bytes);
    V::weave(bytes, codes);
}

LANES_INLINE float32x4_t halves(uint16x4_t bits) {
    return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}

// 16 bits at `offset` of each of four rows
LANES_INLINE uint16x4_t load_halves(const char * const * row, size_t offset) {
    uint16x4_t x = vdup_n_u16(0);
    x = vld1_lane_u16((const uint16_t *) (row[0] + offset), x, 0);
    x = vld1_lane_u16((const uint16_t *) (row[1] + offset), x, 1);
    x = vld1_lane_u16((const uint16_t *) (row[2] + offset), x, 2);
    return vld1_lane_u16((const uint16_t *) (row[3] + offset), x, 3);
}

// As many sums side by side as hide how long a product takes.
template <class Step> double neon_multiply(int64_t n, int products, Step step) {
    constexpr int count = 12;
    int32x4_t sum[count] = {};
    const int8x16_t w = vdupq_n_s8(1);
    for (int64_t i = 0; i < n; i++) {
        for (int32x4_t & s : sum) {
            s = step(s, w);
            __asm__ volatile("" : "+w"(s));
        }
    }
    return (double) n * count * products;
}

struct dots {
    static constexpr int columns = 1;
    using sums  = int32x4_t;
    using scale = int32x4_t;

    LANES_INLINE void weave(const uint8x16_t * row, uint8x16_t * codes) {
        uint32x4_t m[4];
        LANES_UNROLL
        for (int r = 0; r < 4; r++) {
            m[r] = vreinterpretq_u32_u8(row[r]);
        }
        transpose(m);
        LANES_UNROLL
        for (int r = 0; r < 4; r++) {
            codes[r] = vreinterpretq_u8_u32(m[r]);
        }
    }
    static void arrange(int, const int8_t * x, int8_t * to) { memcpy(to, x, 16); }
    LANES_INLINE sums dot(sums acc, const uint8x16_t * codes, const int8_t * x) {
        const int8x16_t y = vld1q_s8(x);
        acc = vdotq_laneq_s32(acc, vreinterpretq_s8_u8(codes[0]), y, 0);
        acc = vdotq_laneq_s32(acc, vreinterpretq_s8_u8(codes[1]), y, 1);
        acc = vdotq_laneq_s32(acc, vreinterpretq_s8_u8(codes[2]), y, 2);
        return vdotq_laneq_s32(acc, vreinterpretq_s8_u8(codes[3]), y, 3);
    }
    LANES_INLINE sums zero() { return vdupq_n_s32(0); }
    LANES_INLINE sums start(const int32_t * p) { return vld1q_dup_s32(p); }
    LANES_INLINE scale spread(int32x4_t of_rows) { return of_rows; }
    LANES_INLINE sums scaled(sums acc, sums dot, scale s) { return vmlaq_s32(acc, dot, s); }
    LANES_INLINE int32x4_t rows(sums acc, int) { return acc; }
};

// A block of a unit of columns.
template <class V> struct alignas(16) q8_K_unit {
    int8_t  qs[16][16 * V::columns];
    int32_t less[16][V::columns];   // -32 times the sums of 16 elements
    int16_t pairs[V::columns][8];   // sums of 32 elements
    float   d[V::columns];

    void set(int c, const block_q8_K & y) {
        for (int i = 0; i < 16; i++) {
            V::arrange(c, y.qs + 16 * i, qs[i]);
            less[i][c] = -32 * y.bsums[i];
        }
        vst1q_s16(pairs[c], vpaddq_s16(vld1q_s16(y.bsums), vld1q_s16(y.bsums + 8)));
        d[c] = y.d;
    }
};

// q4_K and q5_K: 8 sub-blocks of 32, code * scale - min.
template <class B> struct neon_k_mins {
    using block = B;
    static constexpr bool has_min = true;
    static constexpr bool five = sizeof(block) == sizeof(block_q5_K);

    // d, dmin, and the 6-bit scales and minima behind them, a vector of four rows for each word
    struct head {
        uint32x4_t word[4];
        LANES_INLINE void load(head & h, const char * const * row) { load_words(row, 0, h.word); }
        LANES_INLINE float32x4_t d(const head & h) { return halves(vmovn_u32(h.word[0])); }
        LANES_INLINE float32x4_t dmin(const head & h) { return halves(vshrn_n_u32(h.word[0], 16)); }
        // bytes of sub-blocks 0..3 and 4..7 (the packing: get_scale_min_k4 in ggml-quants.c)
        LANES_INLINE uint8x16_t byte(const head & h, int i) { return vreinterpretq_u8_u32(h.word[i]); }
        LANES_INLINE uint8x16_t low(const head & h, int i) { return vandq_u8(byte(h, i), vdupq_n_u8(0x3f)); }
        LANES_INLINE uint8x16_t scales_high(const head & h) {
            return vsliq_n_u8(byte(h, 3), vshrq_n_u8(byte(h, 1), 6), 4);
        }
        LANES_INLINE uint8x16_t mins_high(const head & h) {
            return vsliq_n_u8(vshrq_n_u8(byte(h, 3), 4), vshrq_n_u8(byte(h, 2), 6), 4);
        }
    };

    template <class V, int U>
    LANES_INLINE void sums(const char * const * row, const q8_K_unit<V> * y, typename V::sums * sum, int32x4_t (*least)[V::columns],
                           float32x4_t & d, float32x4_t & dmin) {
        head h;
        head::load(h, row);
        d = head::d(h);
        dmin = head::dmin(h);
        minima<V, U>(head::low(h, 2), head::mins_high(h), y, least);
        uint8x16_t high[2][4];
        if constexpr (five) {
            load_codes<V>(row, offsetof(block_q5_K, qh), high[0]);
            load_codes<V>(row, offsetof(block_q5_K, qh) + 16, high[1]);
        }
        LANES_UNROLL
        for (int u = 0; u < U; u++) {
            sum[u] = V::zero();
        }
        const uint32x4_t scales[2] = { vreinterpretq_u32_u8(head::low(h, 1)), vreinterpretq_u32_u8(head::scales_high(h)) };
        quarter<V, U, 0>(row, y, scales, high, sum);
        quarter<V, U, 1>(row, y, scales, high, sum);
        quarter<V, U, 2>(row, y, scales, high, sum);
        quarter<V, U, 3>(row, y, scales, high, sum);
    }

    // min times sum of activations, over the sub-blocks
    template <class V, int U>
    LANES_INLINE void minima(uint8x16_t first, uint8x16_t last, const q8_K_unit<V> * y, int32x4_t (*least)[V::columns]) {
        static const uint8_t pick[2][16] = { { 0, 255, 4, 255,  8, 255, 12, 255, 1, 255, 5, 255,  9, 255, 13, 255 },
                                             { 2, 255, 6, 255, 10, 255, 14, 255, 3, 255, 7, 255, 11, 255, 15, 255 } };
        const uint8x16_t even = vld1q_u8(pick[0]), odd = vld1q_u8(pick[1]);
        const int16x8_t m01 = vreinterpretq_s16_u8(vqtbl1q_u8(first, even)), m23 = vreinterpretq_s16_u8(vqtbl1q_u8(first, odd));
        const int16x8_t m45 = vreinterpretq_s16_u8(vqtbl1q_u8(last, even)), m67 = vreinterpretq_s16_u8(vqtbl1q_u8(last, odd));
        LANES_UNROLL
        for (int u = 0; u < U; u++) {
            LANES_UNROLL
            for (int c = 0; c < V::columns; c++) {
                const int16x8_t p = vld1q_s16(y[u].pairs[c]);
                int32x4_t x = vmull_laneq_s16(vget_low_s16(m01), p, 0);
                x = vmlal_high_laneq_s16(x, m01, p, 1);
                x = vmlal_laneq_s16(x, vget_low_s16(m23), p, 2);
                x = vmlal_high_laneq_s16(x, m23, p, 3);
                x = vmlal_laneq_s16(x, vget_low_s16(m45), p, 4);
                x = vmlal_high_laneq_s16(x, m45, p, 5);
                x = vmlal_laneq_s16(x, vget_low_s16(m67), p, 6);
                least[u][c] = vmlal_high_laneq_s16(x, m67, p, 7);
            }
        }
    }

    // 64 elements in 32 bytes: low halves first. Bits 2 * J and 2 * J + 1 of the 32 bytes of q5_K's
    // qh belong to them.
    template <class V, int U, int J>
    LANES_INLINE void quarter(const char * const * row, const q8_K_unit<V> * y, const uint32x4_t * scales,
                              const uint8x16_t (*high)[4], typename V::sums * sum) {
        uint8x16_t w[2][4], lo[2][4], hi[2][4];
        LANES_UNROLL
        for (int k = 0; k < 2; k++) {
            load_codes<V>(row, offsetof(block, qs) + 32 * J + 16 * k, w[k]);
            LANES_UNROLL
            for (int i = 0; i < 4; i++) {
                if constexpr (five) {
                    const uint8x16_t five_bits = vdupq_n_u8(0x1f);
                    const uint8x16_t even = bits<2 * J, 0>(high[k][i]), odd = bits<2 * J + 1, 4>(high[k][i]);
                    lo[k][i] = vandq_u8(vsliq_n_u8(w[k][i], even, 4), five_bits);
                    hi[k][i] = vandq_u8(vsriq_n_u8(odd, w[k][i], 4), five_bits);
                } else {
                    lo[k][i] = vandq_u8(w[k][i], vdupq_n_u8(0x0f));
                    hi[k][i] = vshrq_n_u8(w[k][i], 4);
                }
            }
        }
        const auto scale_lo = V::spread(scale<2 * J % 4>(scales[J / 2])), scale_hi = V::spread(scale<2 * J % 4 + 1>(scales[J / 2]));
        LANES_UNROLL
        for (int u = 0; u < U; u++) {
            in_order();
            const auto * q = y[u].qs + 4 * J;
            sum[u] = V::scaled(sum[u], V::dot(V::dot(V::zero(), lo[0], q[0]), lo[1], q[1]), scale_lo);
            sum[u] = V::scaled(sum[u], V::dot(V::dot(V::zero(), hi[0], q[2]), hi[1], q[3]), scale_hi);
        }
    }

    // bit From at bit To, others beside it
    template <int From, int To> LANES_INLINE uint8x16_t bits(uint8x16_t x) {
        if constexpr (From > To) {
            return vshrq_n_u8(x, From - To);
        } else if constexpr (From < To) {
            return vshlq_n_u8(x, To - From);
        } else {
            return x;
        }
    }

    // byte J of each word
    template <int J> LANES_INLINE int32x4_t scale(uint32x4_t words) {
        return vreinterpretq_s32_u32(vshrq_n_u32(J < 3 ? vshlq_n_u32(words, 24 - 8 * J) : words, 24));
    }
};

// q6_K: 16 sub-blocks of 16, scale * (code - 32).
struct neon_q6_K {
    using block = block_q6_K;
    static constexpr bool has_min = false;

    template <class V, int U>
    LANES_INLINE void sums(const char * const * row, const q8_K_unit<V> * y, typename V::sums * sum, int32x4_t (*)[V::columns],
                           float32x4_t & d, float32x4_t &) {
        d = halves(load_halves(row, offsetof(block, d)));
        uint32x4_t scales[4];
        load_words(row, offsetof(block, scales), scales);
        LANES_UNROLL
        for (int u = 0; u < U; u++) {
            sum[u] = V::zero();
        }
        quarter<V, U, 0, 0>(row, y, scales, sum);
        quarter<V, U, 0, 1>(row, y, scales, sum);
        quarter<V, U, 1, 0>(row, y, scales, sum);
        quarter<V, U, 1, 1>(row, y, scales, sum);
    }

    // 4 x 16 elements of half H, 32 apart.
    template <class V, int U, int H, int C>
    LANES_INLINE void quarter(const char * const * row, const q8_K_unit<V> * y, const uint32x4_t * scales, typename V::sums * sum) {
        uint8x16_t l0[4], l1[4], h[4], w[4][4];
        load_codes<V>(row, offsetof(block, ql) + 64 * H + 16 * C, l0);
        load_codes<V>(row, offsetof(block, ql) + 64 * H + 32 + 16 * C, l1);
        load_codes<V>(row, offsetof(block, qh) + 32 * H + 16 * C, h);
        LANES_UNROLL
        for (int i = 0; i < 4; i++) {
            // pairs of bits 0 and 2, and 1 and 3, each at the low end of four bits
            const uint8x16_t even = vandq_u8(h[i], vdupq_n_u8(0x33)), odd = vandq_u8(vshrq_n_u8(h[i], 2), vdupq_n_u8(0x33));
            w[0][i] = vsliq_n_u8(l0[i], even, 4);
            w[1][i] = vsliq_n_u8(l1[i], odd, 4);
            w[2][i] = vsriq_n_u8(even, l0[i], 4);
            w[3][i] = vsriq_n_u8(odd, l1[i], 4);
        }
        sixteen<V, U, 8 * H + C>(w[0], y, scales, sum);
        sixteen<V, U, 8 * H + C + 2>(w[1], y, scales, sum);
        sixteen<V, U, 8 * H + C + 4>(w[2], y, scales, sum);
        sixteen<V, U, 8 * H + C + 6>(w[3], y, scales, sum);
    }

    template <class V, int U, int S>
    LANES_INLINE void sixteen(const uint8x16_t * w, const q8_K_unit<V> * y, const uint32x4_t * scales, typename V::sums * sum) {
        const int32x4_t words = vreinterpretq_s32_u32(scales[S / 4]);
        const auto scale = V::spread(vshrq_n_s32(S % 4 < 3 ? vshlq_n_s32(words, S % 4 < 3 ? 24 - 8 * (S % 4) : 0) : words, 24));
        LANES_UNROLL
        for (int u = 0; u < U; u++) {
            in_order();
            // codes are 32 too large
            sum[u] = V::scaled(sum[u], V::dot(V::start(y[u].less[S]), w, y[u].qs[S]), scale);
        }
    }
};

// iq4_xs: 8 sub-blocks of 32, scale * value of a table. A sub-block is 16 bytes, low halves first.
struct neon_iq4_xs {
    using block = block_iq4_xs;
    static constexpr bool has_min = false;

    template <class V, int U>
    LANES_INLINE void sums(const char * const * row, const q8_K_unit<V> * y, typename V::sums * sum, int32x4_t (*)[V::columns],
                           float32x4_t & d, float32x4_t &) {
        // of four rows: d and the high pairs of bits of the scales; their low four bits
        uint8x8_t head[4];
        LANES_UNROLL
        for (int r = 0; r < 4; r++) {
            head[r] = vld1_u8((const uint8_t *) row[r]);
        }
        const uint32x4_t h01 = vreinterpretq_u32_u8(vcombine_u8(head[0], head[1])), h23 = vreinterpretq_u32_u8(vcombine_u8(head[2], head[3]));
        const uint32x4_t first = vuzp1q_u32(h01, h23), low = vuzp2q_u32(h01, h23);
        const uint32x4_t high = vshrq_n_u32(first, 16);
        d = halves(vmovn_u32(first));
        LANES_UNROLL
        for (int u = 0; u < U; u++) {
            sum[u] = V::zero();
        }
        unrolled::eighths([&](auto s) LANES_ALWAYS { eighth<V, U, decltype(s)::value>(row, y, low, high, sum); });
    }

    template <int N> LANES_INLINE uint32x4_t right(uint32x4_t x) {
        return N ? vshrq_n_u32(x, N ? N : 1) : x;
    }

    template <class V, int U, int S>
    LANES_INLINE void eighth(const char * const * row, const q8_K_unit<V> * y, uint32x4_t low, uint32x4_t high, typename V::sums * sum) {
        const uint8x16_t table = vreinterpretq_u8_s8(vld1q_s8(iq4_values));
        uint8x16_t w[4], lo[4], hi[4];
        load_codes<V>(row, offsetof(block, qs) + 16 * S, w);
        LANES_UNROLL
        for (int i = 0; i < 4; i++) {
            lo[i] = vqtbl1q_u8(table, vandq_u8(w[i], vdupq_n_u8(0x0f)));
            hi[i] = vqtbl1q_u8(table, vshrq_n_u8(w[i], 4));
        }
        const uint32x4_t six = vandq_u32(vsliq_n_u32(right<4 * S>(low), right<2 * S>(high), 4), vdupq_n_u32(0x3f));
        const auto scale = V::spread(vsubq_s32(vreinterpretq_s32_u32(six), vdupq_n_s32(32)));
        LANES_UNROLL
        for (int u = 0; u < U; u++) {
            in_order();
            sum[u] = V::scaled(sum[u], V::dot(V::dot(V::zero(), lo, y[u].qs[2 * S]), hi, y[u].qs[2 * S + 1]), scale);
        }
    }
};

// The product of weights in K's layout with columns of K::column, block by block in the order of a row.
//
//     K::unit<V>                  a block of a unit of columns, with set(c, block of column c)
//     K::products<V, U>(row, y)   adds those of four blocks of weights and U units
template <class K> struct neon_blocks {
    template <class V, int M>
    static void product(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst,
                        reading how) {
        using unit = typename K::template unit<V>;
        constexpr int U = (M + V::columns - 1) / V::columns;
        const int64_t blocks = n / K::length;
        unit * y = (unit *) scratch(blocks * U * sizeof(unit));
        for (int64_t b = 0; !how.again && b < blocks; b++) {
            for (int c = 0; c < U * V::columns; c++) {
                y[b * U + c / V::columns].set(c % V::columns, ((const typename K::column *) cols[c < M ? c : M - 1])[b]);
            }
        }
        for (int64_t r0 = 0; r0 < nr; r0 += 4) {
            // rows beyond the last repeat it
            const char * row[4];
            for (int r = 0; r < 4; r++) {
                row[r] = w + (r0 + r < nr ? r0 + r : nr - 1) * stride;
            }
            float32x4_t acc[U][V::columns];
            LANES_UNROLL
            for (int m = 0; m < U * V::columns; m++) {
                acc[m / V::columns][m % V::columns] = vdupq_n_f32(0);
            }
            for (int64_t b = 0; b < blocks; b++) {
                K::template products<V, U>(row, y + b * U, acc);
                LANES_UNROLL
                for (int r = 0; r < 4; r++) {
                    row[r] += sizeof(typename K::block);
                }
            }
            LANES_UNROLL
            for (int m = 0; m < M; m++) {
                float each[4];
                vst1q_f32(each, acc[m / V::columns][m % V::columns]);
                memcpy(dst[m] + r0, each, (nr - r0 < 4 ? nr - r0 : 4) * sizeof(float));
            }
        }
    }
};

// Blocks of 256 in T's layout against block_q8_K, with the roundings of lanes-super-blocks.h.
template <class T> struct neon_super_blocks {
    using block  = typename T::block;
    using column = block_q8_K;
    static constexpr int length = QK_K;
    template <class V> using unit = q8_K_unit<V>;

    template <class V, int U>
    LANES_INLINE void products(const char * const * row, const unit<V> * y, float32x4_t (*acc)[V::columns]) {
        typename V::sums sum[U];
        int32x4_t least[U][V::columns];
        float32x4_t d, dmin;
        T::template sums<V, U>(row, y, sum, least, d, dmin);
        LANES_UNROLL
        for (int u = 0; u < U; u++) {
            LANES_UNROLL
            for (int c = 0; c < V::columns; c++) {
                float32x4_t x = vmulq_f32(vcvtq_f32_s32(V::rows(sum[u], c)), d);
                if constexpr (T::has_min) {
                    x = vfmsq_f32(x, dmin, vcvtq_f32_s32(least[u][c]));
                }
                acc[u][c] = vfmaq_n_f32(acc[u][c], x, y[u].d[c]);
            }
        }
    }
};

// Products of q8_0 and block_q8_0.
struct neon_q8_0 {
    using block  = block_q8_0;
    using column = block_q8_0;
    static constexpr int length = QK8_0;

    template <class V> struct alignas(16) unit {
        int8_t qs[2][16 * V::columns];
        float  d[V::columns];

        void set(int c, const block_q8_0 & y) {
            V::arrange(c, y.qs, qs[0]);
            V::arrange(c, y.qs + 16, qs[1]);
            d[c] = vgetq_lane_f32(halves(vdup_n_u16(y.d)), 0);
        }
    };

    template <class V, int U>
    LANES_INLINE void products(const char * const * row, const unit<V> * y, float32x4_t (*acc)[V::columns]) {
        const float32x4_t d = halves(load_halves(row, offsetof(block, d)));
        uint8x16_t w[2][4];
        if constexpr (V::columns == 1 && U <= 2) {
            // adding up each row at the end takes less work than interleaving the rows
            load_rows(row, offsetof(block, qs), w[0]);
            load_rows(row, offsetof(block, qs) + 16, w[1]);
            LANES_UNROLL
            for (int u = 0; u < U; u++) {
                acc[u][0] = vfmaq_f32(acc[u][0], vcvtq_f32_s32(row_sums(w, y[u].qs)), vmulq_n_f32(d, y[u].d[0]));
            }
        } else {
            load_codes<V>(row, offsetof(block, qs), w[0]);
            load_codes<V>(row, offsetof(block, qs) + 16, w[1]);
            LANES_UNROLL
            for (int u = 0; u < U; u++) {
                in_order();
                const auto sum = V::dot(V::dot(V::zero(), w[0], y[u].qs[0]), w[1], y[u].qs[1]);
                LANES_UNROLL
                for (int c = 0; c < V::columns; c++) {
                    acc[u][c] = vfmaq_f32(acc[u][c], vcvtq_f32_s32(V::rows(sum, c)), vmulq_n_f32(d, y[u].d[c]));
                }
            }
        }
    }

    // Of four rows and a column, both in the order of elements.
    LANES_INLINE int32x4_t row_sums(const uint8x16_t (*w)[4], const int8_t (*y)[16]) {
        const int8x16_t y0 = vld1q_s8(y[0]), y1 = vld1q_s8(y[1]);
        int32x4_t sum[4];
        LANES_UNROLL
        for (int r = 0; r < 4; r++) {
            sum[r] = vdotq_s32(vdotq_s32(vdupq_n_s32(0), vreinterpretq_s8_u8(w[0][r]), y0), vreinterpretq_s8_u8(w[1][r]), y1);
        }
        return vpaddq_s32(vpaddq_s32(sum[0], sum[1]), vpaddq_s32(sum[2], sum[3]));
    }
};

}  // namespace
}  // namespace mtp
