// How blocks of 256 lie in vectors V while they are multiplied, for super_blocks and the `sums` of its formats:
//
//     count, W             16 bytes of each of so many blocks
//     lanes(p, lane)       of the blocks at p + lane[b], as they are multiplied
//     heads(p, lane)       the same, with the bytes of a block side by side; `halves` brings them to the order of `lanes`
//     separate(heads, to)  one vector V for each V::count blocks
//     all(p), store(to, x) the same of a column, and how that is made of 16 bytes of each block
//     madd16, scale        as those of V, of words in W
//     add_32<M>(sum, v, w, y, at, scale)   sum[m] += scale * (v . y[m]->qs[at] + w . y[m]->qs[at + 1]) for M columns;
//     add_16<M>(sum, w, y, at, scale)      of w alone (whole_lanes)
//     lane_sums(sum)       the sums of the blocks of a step, in the order of lanes-kernels.h

#pragma once

#include "lanes-kernels.h"

#include <type_traits>

namespace mtp {
namespace {

// Blocks of a column in layout L, without their d.
template <class L> struct alignas(64) q8_K_blocks {
    int8_t  qs[16][L::count][16];
    int16_t bsums[2][L::count][8];  // of 16 elements
    int16_t pairs[L::count][8];     // of 32

    void set(const block_q8_K * const * from) {
        __m128i x[L::count], first[L::count], last[L::count];
        for (int i = 0; i < 16; i++) {
            LANES_UNROLL
            for (int b = 0; b < L::count; b++) {
                x[b] = _mm_loadu_si128((const __m128i *) (from[b]->qs + 16 * i));
            }
            L::store(qs[i], x);
        }
        LANES_UNROLL
        for (int b = 0; b < L::count; b++) {
            first[b] = _mm_loadu_si128((const __m128i *) from[b]->bsums);
            last[b] = _mm_loadu_si128((const __m128i *) from[b]->bsums + 1);
            x[b] = _mm_hadd_epi16(first[b], last[b]);
        }
        L::store(bsums[0], first);
        L::store(bsums[1], last);
        L::store(pairs, x);
    }
};

// Of AVX2 alone: 16, which hold few sums. So instructions are given in an order in which few wait for others and few sums go to
// memory: a vector of codes times those of all columns, then the next vector. Measured on Zen 3.
template <class V> constexpr bool few_registers = V::count == 2 && !V::wide_dots;

// sum[m] += scale * (dot(m, 0) + … + dot(m, N - 1)) for M columns, in that order
template <class V, int M, int N, class Dot> LANES_INLINE void add_in_order(typename V::I * sum, typename V::I scale, Dot && dot) {
    typename V::I dots[M];
    LANES_UNROLL
    for (int i = 0; i < N; i++) {
        LANES_UNROLL
        for (int m = 0; m < M; m++) {
            dots[m] = in_order(i == 0 ? dot(m, i) : V::add16(dots[m], dot(m, i)));
        }
    }
    LANES_UNROLL
    for (int m = 0; m < M; m++) {
        sum[m] = V::scaled(sum[m], dots[m], scale);
    }
}

// A block in each lane of a vector.
template <class V> struct whole_lanes : V {
    using typename V::I;
    using W = I;
    using Y = const q8_K_blocks<whole_lanes> * const *;
    LANES_INLINE W heads(const char * p, const size_t * lane) { return V::lanes(p, lane); }
    LANES_INLINE W halves(W x) { return x; }
    LANES_INLINE void separate(W x, I * to) { *to = x; }
    LANES_INLINE void store(void * to, const __m128i * x) { memcpy(to, x, sizeof(W)); }
    template <int M> LANES_INLINE void add_16(I * sum, W w, Y y, int at, I scale) {
        if constexpr (few_registers<V>) {
            add_in_order<V, M, 1>(sum, scale, [&](int m, int) LANES_ALWAYS { return V::dot16(w, V::all(y[m]->qs[at])); });
        } else {
            LANES_UNROLL
            for (int m = 0; m < M; m++) {
                sum[m] = V::scaled(sum[m], V::dot16(w, V::all(y[m]->qs[at])), scale);
            }
        }
    }
    template <int M> LANES_INLINE void add_32(I * sum, W v, W w, Y y, int at, I scale) {
        if constexpr (few_registers<V>) {
            const auto dot = [&](int m, int i) LANES_ALWAYS { return V::dot16(i == 0 ? v : w, V::all(y[m]->qs[at + i])); };
            add_in_order<V, M, 2>(sum, scale, dot);
        } else {
            LANES_UNROLL
            for (int m = 0; m < M; m++) {
                sum[m] = V::scaled(sum[m], V::dot32(v, V::all(y[m]->qs[at]), w, V::all(y[m]->qs[at + 1])), scale);
            }
        }
    }
    LANES_INLINE I lane_sums(const I * sum) { return mtp::lane_sums<V>(sum); }
};

// Half a lane for each of twice as many blocks: the first 8 of 16 bytes in one vector, and the last 8 in another. The products of
// both are added as words before the scale multiplies them, so three and more columns take fewer instructions with maddubs_dots;
// with vnni_dots the sums would not fit. Each of the first V::count blocks has a lane's first half, and each of the others a second.
template <class V> struct half_lanes {
    using I = typename V::I;
    struct W { I first, last; };
    using Y = const q8_K_blocks<half_lanes> * const *;
    static constexpr int count = 2 * V::count;

    LANES_INLINE W heads(const char * p, const size_t * lane) {
        return { V::lanes(p, lane), V::lanes(p + lane[V::count], lane) };
    }
    LANES_INLINE W halves(W x) { return { V::unpacklo64(x.first, x.last), V::unpackhi64(x.first, x.last) }; }
    LANES_INLINE W lanes(const char * p, const size_t * lane) { return halves(heads(p, lane)); }
    LANES_INLINE void separate(W x, I * to) {
        to[0] = x.first;
        to[1] = x.last;
    }
    LANES_INLINE W all(const void * p) { return { V::all(p), V::all((const char *) p + sizeof(I)) }; }
    LANES_INLINE void store(void * to, const __m128i * x) {
        LANES_UNROLL
        for (int l = 0; l < V::count; l++) {
            _mm_storeu_si128((__m128i *) to + l, _mm_unpacklo_epi64(x[l], x[V::count + l]));
            _mm_storeu_si128((__m128i *) to + V::count + l, _mm_unpackhi_epi64(x[l], x[V::count + l]));
        }
    }

    // As V's, of both vectors
    LANES_INLINE I zero() { return V::zero(); }
    LANES_INLINE I set8(int x) { return V::set8(x); }
    LANES_INLINE I add32(I a, I b) { return V::add32(a, b); }
    LANES_INLINE W and_(W a, I b) { return { V::and_(a.first, b), V::and_(a.last, b) }; }
    LANES_INLINE W or_(W a, W b) { return { V::or_(a.first, b.first), V::or_(a.last, b.last) }; }
    template <int N> LANES_INLINE W srl32(W a) { return { V::template srl32<N>(a.first), V::template srl32<N>(a.last) }; }
    template <int N> LANES_INLINE W sll32(W a) { return { V::template sll32<N>(a.first), V::template sll32<N>(a.last) }; }
    template <int A, int B, int C, int D> LANES_INLINE W shuffle32(W a) {
        return { V::template shuffle32<A, B, C, D>(a.first), V::template shuffle32<A, B, C, D>(a.last) };
    }
    LANES_INLINE W unpacklo8(W a, I b) { return { V::unpacklo8(a.first, b), V::unpacklo8(a.last, b) }; }
    LANES_INLINE W unpackhi8(W a, I b) { return { V::unpackhi8(a.first, b), V::unpackhi8(a.last, b) }; }
    LANES_INLINE W unpacklo32(W a, W b) { return { V::unpacklo32(a.first, b.first), V::unpacklo32(a.last, b.last) }; }

    LANES_INLINE I madd16(W a, W b) { return V::add32(V::madd16(a.first, b.first), V::madd16(a.last, b.last)); }
    LANES_INLINE I scale(W words, int n) {
        const int word = n % 4 * 0x0202 + 0x0100, pick = word | word << 16;
        return V::shuffle8(n < 4 ? words.first : words.last, V::set_halves(pick, pick + 0x08080808));
    }

    template <int M> LANES_INLINE void add_32(I * sum, W v, W w, Y y, int at, I scale) {
        const I codes[4] = { v.first, v.last, w.first, w.last };
        const auto dot = [&](int m, int i) LANES_ALWAYS {
            return V::dot16(codes[i], V::all((const char *) y[m]->qs[at] + i * sizeof(I)));
        };
        add_in_order<V, M, 4>(sum, scale, dot);
    }
    LANES_INLINE I lane_sums(const I * sum) { return V::add32(V::even32(sum[0], sum[1]), V::odd32(sum[0], sum[1])); }
};

}  // namespace
}  // namespace mtp
