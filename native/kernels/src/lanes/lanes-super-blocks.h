// Quants in blocks of 256, see lanes-kernels.h: q4_K, q5_K, q6_K, iq4_xs.

#pragma once

#include "lanes-kernels.h"

namespace mtp {
namespace {

// AVX2 without VNNI has 16 registers, and needs some of them for products in words: few are left for sums.
template <class V> constexpr bool few_registers = V::count == 2 && !V::wide_dots;

// A block of each of vector_rows rows, unpacked for many columns (lanes-panels.h). Element i of a
// vector belongs to row i.
template <class V> constexpr int vector_rows = 4 * V::count;

template <class V> struct alignas(64) unpacked_rows {
    typename V::I codes[64];   // unsigned, four consecutive ones of each row
    typename V::I scales[16];  // of the sub-blocks, as V::scaled_sum takes them
    typename V::I least[8];    // word pairs, to multiply with the sums of the activations
    typename V::F d, dmin;
};

// Transposes the 4 x 4 elements of 32 bits that four vectors have in each lane.
template <class V> LANES_INLINE void transpose(const typename V::I * a, typename V::I * to) {
    const auto ab = V::unpacklo32(a[0], a[1]), cd = V::unpacklo32(a[2], a[3]);
    const auto ef = V::unpackhi32(a[0], a[1]), gh = V::unpackhi32(a[2], a[3]);
    to[0] = V::unpacklo64(ab, cd);
    to[1] = V::unpackhi64(ab, cd);
    to[2] = V::unpacklo64(ef, gh);
    to[3] = V::unpackhi64(ef, gh);
}

// to[j] = bytes 4 * j to 4 * j + 3 of the 16 bytes at p of each row. Lane l of a vector has rows 4 * l to 4 * l + 3.
template <class V> LANES_INLINE void load_rows(const char * p, size_t stride, const size_t * lane, typename V::I * to) {
    typename V::I row[4];
    LANES_UNROLL
    for (int i = 0; i < 4; i++) {
        row[i] = V::lanes(p + i * stride, lane);
    }
    transpose<V>(row, to);
}

// Eight scales of each row, words in its lane of words[i].
template <class V> LANES_INLINE void store_scales(const typename V::I * words, typename V::I * to) {
    typename V::I pairs[4];
    transpose<V>(words, pairs);
    LANES_UNROLL
    for (int j = 0; j < 4; j++) {
        to[2 * j]     = V::low_word(pairs[j]);
        to[2 * j + 1] = V::high_word(pairs[j]);
    }
}

// The 6-bit scales and minima in the first 16 bytes of a block_q4_K or block_q5_K, as words.
template <class V>
LANES_INLINE void k_scales(typename V::I head, typename V::I & scales, typename V::I & mins) {
    // dwords of a lane: d and dmin, u0, u1, u2 (the packing: get_scale_min_k4 in ggml-quants.c)
    const auto u01 = V::template shuffle32<1, 2, 1, 2>(head);
    const auto u2  = V::template shuffle32<3, 3, 3, 3>(head);
    const auto low  = V::and_(u01, V::set8(0x3f));                                          // 0..3
    const auto nibs = V::and_(V::unpacklo32(u2, V::template srl32<4>(u2)), V::set8(0x0f));
    const auto top  = V::template sll32<4>(V::and_(V::template srl32<6>(u01), V::set8(0x03)));
    const auto all  = V::unpacklo32(low, V::or_(top, nibs));
    scales = V::unpacklo8(all, V::zero());
    mins   = V::unpackhi8(all, V::zero());
}

// Blocks of a column, one in each lane, without their d.
template <class V> struct alignas(64) q8_K_blocks {
    int8_t  qs[16][V::count][16];
    int16_t bsums[2][V::count][8];  // of 16 elements
    int16_t pairs[V::count][8];     // of 32

    void set(int lane, const block_q8_K & y) {
        for (int i = 0; i < 16; i++) {
            memcpy(qs[i][lane], y.qs + 16 * i, 16);
        }
        const __m128i first = _mm_loadu_si128((const __m128i *) y.bsums);
        const __m128i last  = _mm_loadu_si128((const __m128i *) y.bsums + 1);
        _mm_storeu_si128((__m128i *) bsums[0][lane], first);
        _mm_storeu_si128((__m128i *) bsums[1][lane], last);
        _mm_storeu_si128((__m128i *) pairs[lane], _mm_hadd_epi16(first, last));
    }
};

// q4_K and q5_K: 8 sub-blocks of 32, code * scale - min.
template <class B> struct k_mins {
    using block = B;
    static constexpr bool has_min = true;
    static constexpr bool five = sizeof(block) == sizeof(block_q5_K);

    template <class V, int M>
    LANES_INLINE void sums(const char * row, const size_t * lane, const q8_K_blocks<V> * const * y,
                           typename V::I & head, typename V::I * sum, typename V::I * least) {
        typename V::I scales, mins, high[2];
        head = V::lanes(row, lane);
        k_scales<V>(head, scales, mins);
        if constexpr (five) {
            high[0] = V::lanes(row + offsetof(block_q5_K, qh), lane);
            high[1] = V::lanes(row + offsetof(block_q5_K, qh) + 16, lane);
        }
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            least[m] = V::madd16(mins, V::all(y[m]->pairs));
            sum[m] = V::zero();
        }
        quarter<V, M, 0>(row, lane, y, scales, high, sum);
        quarter<V, M, 1>(row, lane, y, scales, high, sum);
        quarter<V, M, 2>(row, lane, y, scales, high, sum);
        quarter<V, M, 3>(row, lane, y, scales, high, sum);
    }

    // 64 elements in 32 bytes: low halves first. Bits 2 * J and 2 * J + 1 of the 32 bytes of q5_K's
    // qh belong to them.
    template <class V, int M, int J>
    LANES_INLINE void quarter(const char * row, const size_t * lane, const q8_K_blocks<V> * const * y, typename V::I scales,
                              const typename V::I * high, typename V::I * sum) {
        const auto w0 = V::lanes(row + offsetof(block, qs) + 32 * J, lane);
        const auto w1 = V::lanes(row + offsetof(block, qs) + 32 * J + 16, lane);
        const auto mask = V::set8(0x0f);
        auto lo0 = V::and_(w0, mask), lo1 = V::and_(w1, mask);
        auto hi0 = V::and_(V::template srl32<4>(w0), mask), hi1 = V::and_(V::template srl32<4>(w1), mask);
        if constexpr (five) {
            lo0 = V::or_(lo0, fifth<V, 2 * J>(high[0]));
            lo1 = V::or_(lo1, fifth<V, 2 * J>(high[1]));
            hi0 = V::or_(hi0, fifth<V, 2 * J + 1>(high[0]));
            hi1 = V::or_(hi1, fifth<V, 2 * J + 1>(high[1]));
        }
        const auto scale_lo = V::scale(scales, 2 * J), scale_hi = V::scale(scales, 2 * J + 1);
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            const auto * q = y[m]->qs + 4 * J;
            sum[m] = V::scaled(sum[m], V::dot32(lo0, V::all(q[0]), lo1, V::all(q[1])), scale_lo);
            sum[m] = V::scaled(sum[m], V::dot32(hi0, V::all(q[2]), hi1, V::all(q[3])), scale_hi);
        }
    }

    template <class V, int N> LANES_INLINE typename V::I fifth(typename V::I high) {
        const auto bit = N < 4 ? V::template sll32<(N < 4 ? 4 - N : 0)>(high) : V::template srl32<(N < 4 ? 0 : N - 4)>(high);
        return V::and_(bit, V::set8(0x10));
    }

    template <class V> LANES_INLINE typename V::F d(const typename V::I * head) { return V::half_lo(lane_heads<V>(head)); }
    template <class V> LANES_INLINE typename V::F dmin(const typename V::I * head) { return V::half_hi(lane_heads<V>(head)); }

    static constexpr int sub_block = 32, max_code = five ? 31 : 15;
    template <class V> static constexpr int least = 4;

    template <class V> LANES_INLINE void unpack(const char * p, size_t stride, const size_t * lane, unpacked_rows<V> & to) {
        typename V::I head[4], scales[4], mins[4], high[2][4];
        LANES_UNROLL
        for (int i = 0; i < 4; i++) {
            head[i] = V::lanes(p + i * stride, lane);
            k_scales<V>(head[i], scales[i], mins[i]);
        }
        to.d = d<V>(head);
        to.dmin = dmin<V>(head);
        store_scales<V>(scales, to.scales);
        transpose<V>(mins, to.least);
        if constexpr (five) {
            load_rows<V>(p + offsetof(block_q5_K, qh), stride, lane, high[0]);
            load_rows<V>(p + offsetof(block_q5_K, qh) + 16, stride, lane, high[1]);
        }
        unpack_quarter<V, 0>(p, stride, lane, high, to.codes);
        unpack_quarter<V, 1>(p, stride, lane, high, to.codes);
        unpack_quarter<V, 2>(p, stride, lane, high, to.codes);
        unpack_quarter<V, 3>(p, stride, lane, high, to.codes);
    }

    template <class V, int J>
    LANES_INLINE void unpack_quarter(const char * p, size_t stride, const size_t * lane, const typename V::I (*high)[4],
                                     typename V::I * codes) {
        const auto mask = V::set8(0x0f);
        LANES_UNROLL
        for (int half = 0; half < 2; half++) {
            typename V::I w[4];
            load_rows<V>(p + offsetof(block, qs) + 32 * J + 16 * half, stride, lane, w);
            LANES_UNROLL
            for (int i = 0; i < 4; i++) {
                auto lo = V::and_(w[i], mask), hi = V::and_(V::template srl32<4>(w[i]), mask);
                if constexpr (five) {
                    lo = V::or_(lo, fifth<V, 2 * J>(high[half][i]));
                    hi = V::or_(hi, fifth<V, 2 * J + 1>(high[half][i]));
                }
                codes[16 * J + 4 * half + i] = lo;
                codes[16 * J + 8 + 4 * half + i] = hi;
            }
        }
    }
};

// q6_K: 16 sub-blocks of 16, scale * (code - 32).
struct q6_K {
    using block = block_q6_K;
    static constexpr bool has_min = false;

    template <class V, int M>
    LANES_INLINE void sums(const char * row, const size_t * lane, const q8_K_blocks<V> * const * y,
                           typename V::I & head, typename V::I * sum, typename V::I *) {
        head = V::lanes(row + sizeof(block) - 16, lane);  // d is its end
        const auto bytes = V::lanes(row + offsetof(block, scales), lane);
        const auto scales0 = V::template sra16<8>(V::unpacklo8(V::zero(), bytes));
        const auto scales1 = V::template sra16<8>(V::unpackhi8(V::zero(), bytes));
        // codes are 32 too large
        const auto less0 = V::template sll16<5>(V::sub16(V::zero(), scales0));
        const auto less1 = V::template sll16<5>(V::sub16(V::zero(), scales1));
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            sum[m] = V::add32(V::madd16(less0, V::all(y[m]->bsums[0])), V::madd16(less1, V::all(y[m]->bsums[1])));
        }
        quarter<V, M, 0, 0>(row, lane, y, scales0, sum);
        quarter<V, M, 0, 1>(row, lane, y, scales0, sum);
        quarter<V, M, 1, 0>(row, lane, y, scales1, sum);
        quarter<V, M, 1, 1>(row, lane, y, scales1, sum);
    }

    // 4 x 16 elements of half H, 32 apart.
    template <class V, int M, int H, int C>
    LANES_INLINE void quarter(const char * row, const size_t * lane, const q8_K_blocks<V> * const * y, typename V::I scales,
                              typename V::I * sum) {
        const auto l0 = V::lanes(row + 64 * H + 16 * C, lane);
        const auto l1 = V::lanes(row + 64 * H + 32 + 16 * C, lane);
        const auto h = V::lanes(row + offsetof(block, qh) + 32 * H + 16 * C, lane);
        const auto four = V::set8(0x0f), two = V::set8(0x30);
        const auto add = [&](typename V::I w, int n) LANES_ALWAYS {
            add_sixteen<V, M>(sum, w, y, 8 * H + 2 * n + C, V::scale(scales, 2 * n + C));
        };
        add(V::or_(V::and_(l0, four), V::and_(V::template sll32<4>(h), two)), 0);
        add(V::or_(V::and_(l1, four), V::and_(V::template sll32<2>(h), two)), 1);
        add(V::or_(V::and_(V::template srl32<4>(l0), four), V::and_(h, two)), 2);
        add(V::or_(V::and_(V::template srl32<4>(l1), four), V::and_(V::template srl32<2>(h), two)), 3);
    }

    // sum[m] += scale * (w . y[m]->qs[at]). With few registers, the products of all columns come first: fewer sums are spilled.
    template <class V, int M>
    LANES_INLINE void add_sixteen(typename V::I * sum, typename V::I w, const q8_K_blocks<V> * const * y, int at, typename V::I scale) {
        typename V::I dots[M];
        LANES_UNROLL
        for (int m = 0; few_registers<V> && m < M; m++) {
            dots[m] = in_order(V::dot16(w, V::all(y[m]->qs[at])));
        }
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            sum[m] = V::scaled(sum[m], few_registers<V> ? dots[m] : V::dot16(w, V::all(y[m]->qs[at])), scale);
        }
    }

    template <class V> LANES_INLINE typename V::F d(const typename V::I * head) { return V::half_hi(lane_tails<V>(head)); }
    template <class V> LANES_INLINE typename V::F dmin(const typename V::I *) { return V::zerof(); }

    static constexpr int sub_block = 16, max_code = 63, bias = 32;
    template <class V> static constexpr int least = 8;

    template <class V> LANES_INLINE void unpack(const char * p, size_t stride, const size_t * lane, unpacked_rows<V> & to) {
        typename V::I head[4], scales[2][4], less[2][4];
        LANES_UNROLL
        for (int i = 0; i < 4; i++) {
            head[i] = V::lanes(p + i * stride + sizeof(block) - 16, lane);
            const auto bytes = V::lanes(p + i * stride + offsetof(block, scales), lane);
            scales[0][i] = V::template sra16<8>(V::unpacklo8(V::zero(), bytes));
            scales[1][i] = V::template sra16<8>(V::unpackhi8(V::zero(), bytes));
            less[0][i] = V::template sll16<5>(V::sub16(V::zero(), scales[0][i]));
            less[1][i] = V::template sll16<5>(V::sub16(V::zero(), scales[1][i]));
        }
        to.d = d<V>(head);
        LANES_UNROLL
        for (int h = 0; h < 2; h++) {
            store_scales<V>(scales[h], to.scales + 8 * h);
            transpose<V>(less[h], to.least + 4 * h);
        }
        const auto four = V::set8(0x0f), two = V::set8(0x30);
        LANES_UNROLL
        for (int q = 0; q < 4; q++) {  // as in quarter
            const int half = q / 2, c = q % 2;
            typename V::I l0[4], l1[4], h[4];
            load_rows<V>(p + 64 * half + 16 * c, stride, lane, l0);
            load_rows<V>(p + 64 * half + 32 + 16 * c, stride, lane, l1);
            load_rows<V>(p + offsetof(block, qh) + 32 * half + 16 * c, stride, lane, h);
            auto * codes = to.codes + 32 * half + 4 * c;
            LANES_UNROLL
            for (int i = 0; i < 4; i++) {
                codes[i]      = V::or_(V::and_(l0[i], four), V::and_(V::template sll32<4>(h[i]), two));
                codes[8 + i]  = V::or_(V::and_(l1[i], four), V::and_(V::template sll32<2>(h[i]), two));
                codes[16 + i] = V::or_(V::and_(V::template srl32<4>(l0[i]), four), V::and_(h[i], two));
                codes[24 + i] = V::or_(V::and_(V::template srl32<4>(l1[i]), four), V::and_(V::template srl32<2>(h[i]), two));
            }
        }
    }
};

// iq4_xs: 8 sub-blocks of 32, scale * value of a table. A sub-block is 16 bytes, low halves first.
struct iq4_xs {
    using block = block_iq4_xs;
    static constexpr bool has_min = false;

    template <class V, int M>
    LANES_INLINE void sums(const char * row, const size_t * lane, const q8_K_blocks<V> * const * y,
                           typename V::I & head, typename V::I * sum, typename V::I *) {
        head = V::lanes(row, lane);
        const auto scales = sub_scales<V>(head);
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            sum[m] = V::signed_start(scales, V::all(y[m]->pairs));
        }
        unrolled::eighths([&](auto s) LANES_ALWAYS { eighth<V, M, decltype(s)::value>(row, lane, y, scales, sum); });
    }

    // The 8 scales, 6 bits less 32, as words. Of the head: 2 bytes d, 2 bytes of the high pairs of
    // bits, 4 bytes of the low four bits.
    template <class V> LANES_INLINE typename V::I sub_scales(typename V::I head) {
        static const int8_t low_bytes[16] = { 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7, -1 };
        static const int8_t high_bytes[16] = { 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3 };
        static const int16_t low_up[8] = { 16, 1, 16, 1, 16, 1, 16, 1 };                          // to bits 4..7
        static const int16_t high_up[8] = { 1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6, 1 << 4, 1 << 2, 1 };  // to 14, 15
        const auto low = V::and_(V::template srl16<4>(V::mullo16(V::shuffle8(head, V::same(low_bytes)), V::same(low_up))),
                                 V::set8(0x0f));
        const auto high = V::template srl16<14>(V::mullo16(V::shuffle8(head, V::same(high_bytes)), V::same(high_up)));
        static const int16_t bias[8] = { 32, 32, 32, 32, 32, 32, 32, 32 };
        return V::sub16(V::or_(low, V::template sll16<4>(high)), V::same(bias));
    }

    template <class V, int M, int S>
    LANES_INLINE void eighth(const char * row, const size_t * lane, const q8_K_blocks<V> * const * y, typename V::I scales,
                             typename V::I * sum) {
        const auto table = V::signed_code(V::same(iq4_values)), mask = V::set8(0x0f);
        const auto w = V::lanes(row + offsetof(block, qs) + 16 * S, lane);
        const auto w0 = V::shuffle8(table, V::and_(w, mask));
        const auto w1 = V::shuffle8(table, V::and_(V::template srl32<4>(w), mask));
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            const auto * q = y[m]->qs + 2 * S;
            sum[m] = V::template signed32<S>(sum[m], w0, V::all(q[0]), w1, V::all(q[1]), scales);
        }
    }

    template <class V> LANES_INLINE typename V::F d(const typename V::I * head) { return V::half_lo(lane_heads<V>(head)); }
    template <class V> LANES_INLINE typename V::F dmin(const typename V::I *) { return V::zerof(); }

    static constexpr int sub_block = 32, max_code = 127, bias = 128;
    template <class V> static constexpr int least = V::offset_codes ? 4 : 0;

    template <class V> LANES_INLINE void unpack(const char * p, size_t stride, const size_t * lane, unpacked_rows<V> & to) {
        typename V::I head[4], scales[4], less[4];
        LANES_UNROLL
        for (int i = 0; i < 4; i++) {
            head[i] = V::lanes(p + i * stride, lane);
            scales[i] = sub_scales<V>(head[i]);
            less[i] = V::template sll16<7>(V::sub16(V::zero(), scales[i]));
        }
        to.d = d<V>(head);
        store_scales<V>(scales, to.scales);
        if constexpr (least<V> > 0) {
            transpose<V>(less, to.least);
        }
        const auto table = V::signed_code(V::same(iq4_values)), mask = V::set8(0x0f);
        for (int s = 0; s < 8; s++) {
            typename V::I w[4];
            load_rows<V>(p + offsetof(block, qs) + 16 * s, stride, lane, w);
            LANES_UNROLL
            for (int i = 0; i < 4; i++) {
                to.codes[8 * s + i]     = V::shuffle8(table, V::and_(w[i], mask));
                to.codes[8 * s + 4 + i] = V::shuffle8(table, V::and_(V::template srl32<4>(w[i]), mask));
            }
        }
    }
};

// Products of blocks of 256 in T's layout and block_q8_K. The product of a block is d * (exact sum of scale * code *
// activation) - dmin * (exact sum of min * activation), times the d of the activations; blocks are added
// in the order of the tiled product.
//
// The blocks of all rows form one stream in address order: a vector takes the next V::count blocks, and a
// step the next four vectors, regardless of where a row ends. So no lane is idle for any length of a
// row, and one prefetch distance suits all. The columns repeat along the stream.
//
// Some CPUs, such as Zen 3, read two such streams at a time faster than one: for one column, the first and the second half of
// the rows, a step of one after a step of the other. With four columns, which need the L1 cache, two streams are slower.
template <class T> struct super_blocks {
    using block = typename T::block;
    template <int M> static constexpr int most_streams = M == 1 ? 2 : 1;

    // A pass of a stream, and where the products of its blocks with each column go. Prefetches that would reach beyond `end`
    // go `beyond` bytes further, to the rows that the stream reads next.
    template <int M> struct stream {
        const char * pass;
        float * part[M];
        const char * end;
        size_t beyond;
    };

    template <class V, int M>
    static void product(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst,
                        reading how) {
        const int64_t blocks = n / QK_K;
        const size_t row_size = blocks * sizeof(block);
        int64_t common = V::count;  // a divisor, too, of blocks
        while (blocks % common) {
            common /= 2;
        }
        // After a round of vectors, a column starts in the first lane again. A pass is a whole number of rounds.
        const int64_t round = blocks / common;
        constexpr int64_t rows = vector_rows<V>;

        const size_t column_size = round * sizeof(q8_K_blocks<V>);
        constexpr int streams = most_streams<M>;
        const size_t part_size = streams * M * rows * blocks * sizeof(float) + 16;
        char * memory = (char *) scratch(M * (column_size + blocks * sizeof(float)) + part_size + rows * row_size);
        const q8_K_blocks<V> * y[M];
        float * d[M];
        stream<M> from[streams];
        for (int m = 0; m < M; m++) {
            const block_q8_K * column = (const block_q8_K *) cols[m];
            auto * arranged = (q8_K_blocks<V> *) (memory + m * column_size);
            for (int64_t i = 0; !how.again && i < round * V::count; i++) {
                arranged[i / V::count].set(i % V::count, column[i % blocks]);
            }
            y[m]    = arranged;
            d[m]    = (float *) (memory + M * column_size) + m * blocks;
            for (int s = 0; s < streams; s++) {
                from[s].part[m] = (float *) (memory + M * column_size) + M * blocks + (s * M + m) * rows * blocks;
            }
            for (int64_t b = 0; !how.again && b < blocks; b++) {
                d[m][b] = column[b].d;
            }
        }
        char * apart = (char *) from[0].part[0] + part_size;

        // Rows of each of two streams; those that are left follow in one.
        const bool two = streams == 2 && how.two && stride == row_size;
        const int64_t half = two ? nr / (2 * rows) * rows : 0;
        for (int64_t r0 = 0; r0 < half; r0 += rows) {
            for (int s = 0; s < streams; s++) {
                from[s].pass = w + (r0 + s * half) * stride;
                from[s].end = w + half * stride;
                from[s].beyond = s == 0 ? nr * stride : 0;  // to the second half of the next piece
            }
            block_products<V, M, streams>(blocks, round, from, y, how.once);
            for (int s = 0; s < streams; s++) {
                add_blocks<V, M>(nr - r0 - s * half, blocks, from[s].part, d, dst, r0 + s * half);
            }
        }
        for (int64_t r0 = 2 * half; r0 < nr; r0 += rows) {
            const int64_t take = nr - r0 < rows ? nr - r0 : rows;
            from[0].pass = w + r0 * stride;
            if (take < rows || stride != row_size) {
                memset(apart, 0, rows * row_size);
                for (int64_t r = 0; r < take; r++) {
                    memcpy(apart + r * row_size, from[0].pass + r * stride, row_size);
                }
                from[0].pass = apart;
            }
            block_products<V, M, 1>(blocks, round, from, y, how.once);
            add_blocks<V, M>(nr - r0, blocks, from[0].part, d, dst, r0);
        }
    }

    // from[s].part[m][i] = block i of a pass times its block of column m, without the factor d of the column, for S streams
    template <class V, int M, int S>
    LANES_INLINE void block_products(int64_t steps, int64_t round, const stream<M> * from, const q8_K_blocks<V> * const * cols,
                                     bool once) {
        constexpr size_t vector_size = V::count * sizeof(block);
        // Prefetch distances in bytes. Without the hint, late a second time, because the columns need the L1 cache, too.
        constexpr size_t far = 10240, near = 2048;
        size_t lane[V::count];
        block_lanes<V, block>(V::count, lane);
        size_t begin = 0, at = 0;  // bytes, in a round
        for (int64_t step = 0; step < steps; step++, begin = at) {
            for (int stream = 0; stream < S; stream++) {
                const char * step_begin = from[stream].pass + 4 * step * vector_size;
                size_t ahead = far;
                if (S == 2 && step_begin + 4 * vector_size + far > from[stream].end) {
                    ahead += from[stream].beyond;
                }
                typename V::I head[4], sum[M][4], least[M][4];
                at = begin;
                LANES_UNROLL
                for (int i = 0; i < 4; i++) {
                    const char * p = step_begin + i * vector_size;
                    if (once) {
                        fetch_once<vector_size>(p + ahead);
                    } else {
                        fetch<vector_size, 2>(p + ahead);
                        fetch<vector_size, 1>(p + near);
                    }
                    const q8_K_blocks<V> * y[M];
                    typename V::I s[M], l[M];
                    LANES_UNROLL
                    for (int m = 0; m < M; m++) {
                        y[m] = (const q8_K_blocks<V> *) ((const char *) cols[m] + at);
                    }
                    T::template sums<V, M>(p, lane, y, head[i], s, l);
                    LANES_UNROLL
                    for (int m = 0; m < M; m++) {
                        sum[m][i] = s[m];
                        if constexpr (T::has_min) {
                            least[m][i] = l[m];
                        }
                    }
                    at += sizeof(q8_K_blocks<V>);
                    at = at == round * sizeof(q8_K_blocks<V>) ? 0 : at;
                }
                const auto d = T::template d<V>(head), dmin = T::template dmin<V>(head);
                LANES_UNROLL
                for (int m = 0; m < M; m++) {
                    auto x = V::mul(V::to_float(lane_sums<V>(sum[m])), d);
                    if constexpr (T::has_min) {
                        x = V::fnma(dmin, V::to_float(lane_sums<V>(least[m])), x);
                    }
                    V::store(from[stream].part[m] + step * 4 * V::count, V::ordered(V::as_int(x)));
                }
            }
        }
    }

    // dst[m][r0 + r] = sum of part[m][r][b] * d[m][b], b in order, for all rows of a pass, or as many as are left. They
    // are added up side by side: part has room for them, and for 16 bytes more.
    template <class V, int M>
    LANES_INLINE void add_blocks(int64_t left, int64_t blocks, const float * const * part, const float * const * d,
                                 float * const * dst, int64_t r0) {
        const size_t row = blocks * sizeof(float);
        size_t lane[V::count];
        LANES_UNROLL
        for (int l = 0; l < V::count; l++) {
            lane[l] = 4 * l * row;
        }
        for (int m = 0; m < M; m++) {
            if (left > vector_rows<V>) {
                __builtin_prefetch(dst[m] + r0 + vector_rows<V>, 1);  // for the next pass
            }
            auto acc = V::zerof();
            for (int64_t b = 0; b < blocks; b += 4) {
                typename V::I x[4];
                load_rows<V>((const char *) (part[m] + b), row, lane, x);
                const int64_t here = blocks - b < 4 ? blocks - b : 4;
                for (int64_t i = 0; i < here; i++) {
                    acc = V::fma(V::as_float(x[i]), V::setf(d[m][b + i]), acc);
                }
            }
            if (left >= vector_rows<V>) {
                V::store_f32(dst[m] + r0, acc);
            } else {
                float sums[vector_rows<V>];
                V::store_f32(sums, acc);
                memcpy(dst[m] + r0, sums, left * sizeof(float));
            }
        }
    }
};

}  // namespace
}  // namespace mtp
