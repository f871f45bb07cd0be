// Vectors of 256 bits for the kernels of this folder, without products of bytes, which lanes-dots.h adds. Included after the
// instruction set is chosen.

#pragma once

#include "lanes-kernels.h"

#include <immintrin.h>

namespace mtp {
namespace {

struct v256 {
    static constexpr int count = 2;
    using I = __m256i;
    using F = __m256;

    LANES_INLINE __m128i load(const char * p) { return _mm_loadu_si128((const __m128i *) p); }
    LANES_INLINE I lanes(const char * p, const size_t * offset) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(load(p)), load(p + offset[1]), 1);
    }
    LANES_INLINE I from_lanes(const __m128i * a) { return _mm256_set_m128i(a[1], a[0]); }
    LANES_INLINE I all(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }
    LANES_INLINE I same(const void * p) { return _mm256_broadcastsi128_si256(load((const char *) p)); }
    LANES_INLINE I zero() { return _mm256_setzero_si256(); }
    LANES_INLINE I set8(int x) { return _mm256_set1_epi8((char) x); }
    LANES_INLINE I set16(int x) { return _mm256_set1_epi16((short) x); }
    LANES_INLINE I set32(int x) { return _mm256_set1_epi32(x); }
    LANES_INLINE I and_(I a, I b) { return _mm256_and_si256(a, b); }
    LANES_INLINE I or_(I a, I b) { return _mm256_or_si256(a, b); }
    LANES_INLINE I xor_(I a, I b) { return _mm256_xor_si256(a, b); }
    // bytes of x where those of a and b have a bit in common, for b with one bit in each
    LANES_INLINE I where8(I a, I b, I x) { return and_(_mm256_cmpeq_epi8(and_(a, b), b), x); }
    // -x there, and x elsewhere
    LANES_INLINE I negated8(I x, I a, I b) {
        const I there = _mm256_cmpeq_epi8(and_(a, b), b);
        return _mm256_sub_epi8(xor_(x, there), there);
    }
    LANES_INLINE I add8(I a, I b) { return _mm256_add_epi8(a, b); }
    LANES_INLINE I add16(I a, I b) { return _mm256_add_epi16(a, b); }
    LANES_INLINE I add32(I a, I b) { return _mm256_add_epi32(a, b); }
    LANES_INLINE I sub16(I a, I b) { return _mm256_sub_epi16(a, b); }
    template <int N> LANES_INLINE I srl32(I a) { return _mm256_srli_epi32(a, N); }
    LANES_INLINE I srlv32(I a, I n) { return _mm256_srlv_epi32(a, n); }
    template <int N> LANES_INLINE I sll32(I a) { return _mm256_slli_epi32(a, N); }
    template <int N> LANES_INLINE I sra16(I a) { return _mm256_srai_epi16(a, N); }
    template <int N> LANES_INLINE I sll16(I a) { return _mm256_slli_epi16(a, N); }
    template <int A, int B, int C, int D> LANES_INLINE I shuffle32(I a) {
        return _mm256_shuffle_epi32(a, A | B << 2 | C << 4 | D << 6);
    }
    LANES_INLINE I unpacklo8(I a, I b) { return _mm256_unpacklo_epi8(a, b); }
    LANES_INLINE I unpackhi8(I a, I b) { return _mm256_unpackhi_epi8(a, b); }
    LANES_INLINE I unpacklo32(I a, I b) { return _mm256_unpacklo_epi32(a, b); }
    LANES_INLINE I unpackhi32(I a, I b) { return _mm256_unpackhi_epi32(a, b); }
    LANES_INLINE I unpacklo64(I a, I b) { return _mm256_unpacklo_epi64(a, b); }
    LANES_INLINE I unpackhi64(I a, I b) { return _mm256_unpackhi_epi64(a, b); }
    LANES_INLINE I madd16(I a, I b) { return _mm256_madd_epi16(a, b); }
    template <int N> LANES_INLINE I srl16(I a) { return _mm256_srli_epi16(a, N); }
    LANES_INLINE I mullo16(I a, I b) { return _mm256_mullo_epi16(a, b); }
    LANES_INLINE I mullo32(I a, I b) { return _mm256_mullo_epi32(a, b); }
    template <int N> LANES_INLINE I sra32(I a) { return _mm256_srai_epi32(a, N); }
    LANES_INLINE I shuffle8(I a, I pick) { return _mm256_shuffle_epi8(a, pick); }
    LANES_INLINE I packs32(I a, I b) { return _mm256_packs_epi32(a, b); }
    LANES_INLINE I packs16(I a, I b) { return _mm256_packs_epi16(a, b); }
    LANES_INLINE I maddubs(I u, I s) { return _mm256_maddubs_epi16(u, s); }
    LANES_INLINE I abs8(I a) { return _mm256_abs_epi8(a); }
    LANES_INLINE I negative8(I a) { return _mm256_cmpgt_epi8(zero(), a); }  // -1 where a is, and 0
    LANES_INLINE I sign8(I a, I sign) { return _mm256_sign_epi8(a, sign); }
    LANES_INLINE I broadcast(const void * p) {
        int32_t x;
        memcpy(&x, p, sizeof(x));
        return _mm256_set1_epi32(x);
    }

    // For panels of rows, see lanes-panels.h: vectors of rows, and the columns that share them
    static constexpr int panel_vectors = 2, panel_columns = 3;

    LANES_INLINE F zerof() { return _mm256_setzero_ps(); }
    LANES_INLINE F setf(float x) { return _mm256_set1_ps(x); }
    LANES_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
    LANES_INLINE F as_float(I a) { return _mm256_castsi256_ps(a); }
    LANES_INLINE I as_int(F a) { return _mm256_castps_si256(a); }
    LANES_INLINE F addf(F a, F b) { return _mm256_add_ps(a, b); }
    LANES_INLINE F subf(F a, F b) { return _mm256_sub_ps(a, b); }
    LANES_INLINE F maxf(F a, F b) { return _mm256_max_ps(a, b); }
    LANES_INLINE float largest(F a) {
        const __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        const __m128 y = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
    }
    LANES_INLINE I to_int(F a) { return _mm256_cvtps_epi32(a); }
    LANES_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    LANES_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    LANES_INLINE F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
    LANES_INLINE F half_hi(I a) {
        const I high = _mm256_srli_epi32(a, 16);
        return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
    }
    // the first half float of each lane, converted and repeated in the four elements of the lane
    LANES_INLINE F half_first(I a) { return half_lo(_mm256_shuffle_epi32(a, 0)); }
    LANES_INLINE F half_lo(I a) { return half_hi(_mm256_slli_epi32(a, 16)); }

    static constexpr int floats = 8, float_rows = 2, mix_block = 16;
    LANES_INLINE F load_f32(const void * p) { return _mm256_loadu_ps((const float *) p); }
    LANES_INLINE void store_f32(float * p, F a) { _mm256_storeu_ps(p, a); }
    LANES_INLINE F load_f16(const void * p) { return _mm256_cvtph_ps(load((const char *) p)); }
    LANES_INLINE F load_bf16(const void * p) {
        return as_float(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load((const char *) p)), 16));
    }
    LANES_INLINE I load_i8(const void * p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p)); }
    LANES_INLINE I load_u8(const void * p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p)); }
    LANES_INLINE F set_half(uint16_t x) { return setf(_cvtsh_ss(x)); }
    LANES_INLINE float sum(F a) {
        const __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        const __m128 y = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
    }

    // a times 2^n for whole numbers n <= 0; 0 where 2^n has no normal number
    LANES_INLINE F times_power(F a, F n) {
        const I exponent = _mm256_max_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), zero());
        return mul(a, as_float(_mm256_slli_epi32(exponent, 23)));
    }
    LANES_INLINE F nearest(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

    // Four vectors of columns: element i of a[j] is float j of the row at p + i * stride.
    LANES_INLINE void transposed(const char * p, size_t stride, F * a) {
        size_t offset[count];
        LANES_UNROLL
        for (int l = 0; l < count; l++) {
            offset[l] = 4 * l * stride;
        }
        const I b[4] = { lanes(p, offset), lanes(p + stride, offset), lanes(p + 2 * stride, offset), lanes(p + 3 * stride, offset) };
        const I c[4] = { unpacklo32(b[0], b[1]), unpackhi32(b[0], b[1]), unpacklo32(b[2], b[3]), unpackhi32(b[2], b[3]) };
        a[0] = as_float(unpacklo64(c[0], c[2]));
        a[1] = as_float(unpackhi64(c[0], c[2]));
        a[2] = as_float(unpacklo64(c[1], c[3]));
        a[3] = as_float(unpackhi64(c[1], c[3]));
    }

    // For states of recurrences, see lanes-delta-net.h: rows that are computed together, and the sum of each of their vectors.
    static constexpr int state_rows = 4;
    static constexpr bool sums_as_rows = false;  // whether these sums have the bits of sum()
    LANES_INLINE void row_sums(const F * a, float * sums) {
        const F b = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
        _mm_storeu_ps(sums, add_lanes(b));
    }

    // element i of each lane, lane by lane
    LANES_INLINE I ordered(I a) { return _mm256_permutevar8x32_epi32(a, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }
    LANES_INLINE void store(void * p, I a) { _mm256_storeu_si256((__m256i *) p, a); }
    LANES_INLINE void store_words(int16_t * p, I a) {
        _mm_storeu_si128((__m128i *) p, _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
    }

    template <int L> LANES_INLINE __m128 lane(F a) { return _mm256_extractf128_ps(a, L); }
    LANES_INLINE __m128 add_lanes(F a) { return _mm_add_ps(lane<0>(a), lane<1>(a)); }
};

}  // namespace
}  // namespace mtp
