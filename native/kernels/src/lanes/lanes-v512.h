// Vectors of 512 bits for the kernels of this folder, without products of bytes, which lanes-dots.h adds. Included after the
// instruction set is chosen.

#pragma once

#include "lanes-kernels.h"

#include <immintrin.h>

namespace mtp {
namespace {

struct v512 {
    static constexpr int count = 4;
    using I = __m512i;
    using F = __m512;

    LANES_INLINE __m128i load(const char * p) { return _mm_loadu_si128((const __m128i *) p); }
    LANES_INLINE I lanes(const char * p, const size_t * offset) {
        const __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(load(p)), load(p + offset[1]), 1);
        const __m256i b = _mm256_inserti128_si256(_mm256_castsi128_si256(load(p + offset[2])), load(p + offset[3]), 1);
        return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    }
    LANES_INLINE I from_lanes(const __m128i * a) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(a[1], a[0])), _mm256_set_m128i(a[3], a[2]), 1);
    }
    LANES_INLINE I all(const void * p) { return _mm512_loadu_si512(p); }
    LANES_INLINE I same(const void * p) { return _mm512_broadcast_i32x4(load((const char *) p)); }
    LANES_INLINE I zero() { return _mm512_setzero_si512(); }
    LANES_INLINE I set8(int x) { return _mm512_set1_epi8((char) x); }
    LANES_INLINE I set16(int x) { return _mm512_set1_epi16((short) x); }
    LANES_INLINE I set32(int x) { return _mm512_set1_epi32(x); }
    LANES_INLINE I and_(I a, I b) { return _mm512_and_si512(a, b); }
    LANES_INLINE I or_(I a, I b) { return _mm512_or_si512(a, b); }
    LANES_INLINE I xor_(I a, I b) { return _mm512_xor_si512(a, b); }
    // bytes of x where those of a and b have a bit in common, for b with one bit in each
    LANES_INLINE I where8(I a, I b, I x) { return _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(a, b), x); }
    // -x there, and x elsewhere
    LANES_INLINE I negated8(I x, I a, I b) { return _mm512_mask_sub_epi8(x, _mm512_test_epi8_mask(a, b), zero(), x); }
    LANES_INLINE I add8(I a, I b) { return _mm512_add_epi8(a, b); }
    LANES_INLINE I add16(I a, I b) { return _mm512_add_epi16(a, b); }
    LANES_INLINE I add32(I a, I b) { return _mm512_add_epi32(a, b); }
    LANES_INLINE I sub16(I a, I b) { return _mm512_sub_epi16(a, b); }
    template <int N> LANES_INLINE I srl32(I a) { return _mm512_srli_epi32(a, N); }
    LANES_INLINE I srlv32(I a, I n) { return _mm512_srlv_epi32(a, n); }
    template <int N> LANES_INLINE I sll32(I a) { return _mm512_slli_epi32(a, N); }
    template <int N> LANES_INLINE I sra16(I a) { return _mm512_srai_epi16(a, N); }
    template <int N> LANES_INLINE I sll16(I a) { return _mm512_slli_epi16(a, N); }
    template <int A, int B, int C, int D> LANES_INLINE I shuffle32(I a) {
        return _mm512_shuffle_epi32(a, (_MM_PERM_ENUM) (A | B << 2 | C << 4 | D << 6));
    }
    LANES_INLINE I unpacklo8(I a, I b) { return _mm512_unpacklo_epi8(a, b); }
    LANES_INLINE I unpackhi8(I a, I b) { return _mm512_unpackhi_epi8(a, b); }
    LANES_INLINE I unpacklo32(I a, I b) { return _mm512_unpacklo_epi32(a, b); }
    LANES_INLINE I unpackhi32(I a, I b) { return _mm512_unpackhi_epi32(a, b); }
    LANES_INLINE I unpacklo64(I a, I b) { return _mm512_unpacklo_epi64(a, b); }
    LANES_INLINE I unpackhi64(I a, I b) { return _mm512_unpackhi_epi64(a, b); }
    LANES_INLINE I madd16(I a, I b) { return _mm512_madd_epi16(a, b); }
    template <int N> LANES_INLINE I srl16(I a) { return _mm512_srli_epi16(a, N); }
    LANES_INLINE I mullo16(I a, I b) { return _mm512_mullo_epi16(a, b); }
    LANES_INLINE I mullo32(I a, I b) { return _mm512_mullo_epi32(a, b); }
    template <int N> LANES_INLINE I sra32(I a) { return _mm512_srai_epi32(a, N); }
    LANES_INLINE I shuffle8(I a, I pick) { return _mm512_shuffle_epi8(a, pick); }
    LANES_INLINE I packs32(I a, I b) { return _mm512_packs_epi32(a, b); }
    LANES_INLINE I packs16(I a, I b) { return _mm512_packs_epi16(a, b); }
    LANES_INLINE I maddubs(I u, I s) { return _mm512_maddubs_epi16(u, s); }
    LANES_INLINE I abs8(I a) { return _mm512_abs_epi8(a); }
    LANES_INLINE I negative8(I a) { return _mm512_movm_epi8(_mm512_movepi8_mask(a)); }
    LANES_INLINE I sign8(I a, I sign) {
        return _mm512_mask_sub_epi8(_mm512_maskz_mov_epi8(_mm512_test_epi8_mask(sign, sign), a), _mm512_movepi8_mask(sign), zero(), a);
    }
    LANES_INLINE I broadcast(const void * p) {
        int32_t x;
        memcpy(&x, p, sizeof(x));
        return _mm512_set1_epi32(x);
    }

    // For panels of rows, see lanes-panels.h: vectors of rows, and the columns that share them
    static constexpr int panel_vectors = 2, panel_columns = 6;

    LANES_INLINE F zerof() { return _mm512_setzero_ps(); }
    LANES_INLINE F setf(float x) { return _mm512_set1_ps(x); }
    LANES_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
    LANES_INLINE F as_float(I a) { return _mm512_castsi512_ps(a); }
    LANES_INLINE I as_int(F a) { return _mm512_castps_si512(a); }
    LANES_INLINE F addf(F a, F b) { return _mm512_add_ps(a, b); }
    LANES_INLINE F subf(F a, F b) { return _mm512_sub_ps(a, b); }
    LANES_INLINE F maxf(F a, F b) { return _mm512_max_ps(a, b); }
    LANES_INLINE float largest(F a) { return _mm512_reduce_max_ps(a); }
    LANES_INLINE I to_int(F a) { return _mm512_cvtps_epi32(a); }
    LANES_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    LANES_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    LANES_INLINE F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
    LANES_INLINE F half_lo(I a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
    // the first half float of each lane, converted and repeated in the four elements of the lane
    LANES_INLINE F half_first(I a) { return half_lo(_mm512_shuffle_epi32(a, _MM_PERM_AAAA)); }
    LANES_INLINE F half_hi(I a) { return half_lo(_mm512_srli_epi32(a, 16)); }

    static constexpr int floats = 16, float_rows = 4, mix_block = 32;
    LANES_INLINE F load_f32(const void * p) { return _mm512_loadu_ps(p); }
    LANES_INLINE void store_f32(float * p, F a) { _mm512_storeu_ps(p, a); }
    LANES_INLINE F load_f16(const void * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
    LANES_INLINE F load_bf16(const void * p) {
        return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) p)), 16));
    }
    LANES_INLINE I load_i8(const void * p) { return _mm512_cvtepi8_epi32(load((const char *) p)); }
    LANES_INLINE I load_u8(const void * p) { return _mm512_cvtepu8_epi32(load((const char *) p)); }
    LANES_INLINE F set_half(uint16_t x) { return setf(_cvtsh_ss(x)); }
    LANES_INLINE float sum(F a) { return _mm512_reduce_add_ps(a); }

    // 2^n for whole numbers n <= 0; 0 where that is less than the smallest number
    LANES_INLINE F times_power(F a, F n) { return _mm512_scalef_ps(a, n); }
    LANES_INLINE F nearest(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

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
    static constexpr int state_rows = 8;
    static constexpr bool sums_as_rows = true;  // whether these sums have the bits of sum()
    LANES_INLINE void row_sums(const F * a, float * sums) {
        F b[4];
        LANES_UNROLL
        for (int i = 0; i < 4; i++) {
            b[i] = addf(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x44), _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xee));
        }
        const F c0 = addf(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
        const F c1 = addf(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
        const F d  = addf(_mm512_unpacklo_ps(c0, c1), _mm512_unpackhi_ps(c0, c1));
        const F e  = addf(d, _mm512_permute_ps(d, 0x4e));
        // lane i has the sums of a[i] and a[i + 4]
        const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
        _mm256_storeu_ps(sums, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, e)));
    }

    // element i of each lane, lane by lane
    LANES_INLINE I ordered(I a) {
        return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), a);
    }
    LANES_INLINE void store(void * p, I a) { _mm512_storeu_si512(p, a); }
    LANES_INLINE void store_words(int16_t * p, I a) { _mm256_storeu_si256((__m256i *) p, _mm512_cvtepi32_epi16(a)); }

    template <int L> LANES_INLINE __m128 lane(F a) { return _mm512_extractf32x4_ps(a, L); }
    LANES_INLINE __m128 add_lanes(F a) {
        return _mm_add_ps(_mm_add_ps(lane<0>(a), lane<2>(a)), _mm_add_ps(lane<1>(a), lane<3>(a)));
    }
};

}  // namespace
}  // namespace mtp
