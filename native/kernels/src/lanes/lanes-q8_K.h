// Activations for products with blocks of 256: the bytes of ggml's quantize_row_q8_K, with AVX2.

#pragma once

#include "lanes-kernels.h"

#include <math.h>

namespace mtp {
namespace {

void quantize_q8_K(const float * x, block_q8_K * y, int64_t blocks) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256i one8 = _mm256_set1_epi8(1);
    const __m256i one16 = _mm256_set1_epi16(1);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);

    for (; blocks > 0; blocks--, x += QK_K, y++) {
        __m256 most = _mm256_setzero_ps();
        for (int j = 0; j < QK_K; j += 8) {
            most = _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(x + j)), most);
        }
        __m128 half = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
        half = _mm_max_ps(half, _mm_movehl_ps(half, half));
        const float amax = _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
        if (amax == 0.0f) {
            memset(y, 0, sizeof(*y));
            continue;
        }

        // The first of the largest gives the scale its sign. Where there are NaNs, none may be equal to it.
        int first = 0;
        const __m256 found = _mm256_set1_ps(amax);
        while (first < QK_K - 8 &&
               _mm256_movemask_ps(_mm256_cmp_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(x + first)), found, _CMP_EQ_OQ)) == 0) {
            first += 8;
        }
        while (first < QK_K - 1 && fabsf(x[first]) != amax) {
            first++;
        }

        const float iscale = -127.f / x[first];
        const __m256 scale = _mm256_set1_ps(iscale);
        for (int j = 0; j < QK_K; j += 128) {
            __m256i sums[4];  // of 4 elements; of 16 in all of a half
            for (int g = 0; g < 4; g++) {
                const float * from = x + j + 32 * g;
                const __m256i i0 = _mm256_cvtps_epi32(_mm256_mul_ps(scale, _mm256_loadu_ps(from)));
                const __m256i i1 = _mm256_cvtps_epi32(_mm256_mul_ps(scale, _mm256_loadu_ps(from + 8)));
                const __m256i i2 = _mm256_cvtps_epi32(_mm256_mul_ps(scale, _mm256_loadu_ps(from + 16)));
                const __m256i i3 = _mm256_cvtps_epi32(_mm256_mul_ps(scale, _mm256_loadu_ps(from + 24)));
                const __m256i q = _mm256_permutevar8x32_epi32(
                    _mm256_packs_epi16(_mm256_packs_epi32(i0, i1), _mm256_packs_epi32(i2, i3)), order);
                _mm256_storeu_si256((__m256i *) (y->qs + j + 32 * g), q);
                sums[g] = _mm256_madd_epi16(_mm256_maddubs_epi16(one8, q), one16);
            }
            const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
            const __m128i lo = _mm256_castsi256_si128(all);
            const __m128i hi = _mm256_extracti128_si256(all, 1);
            _mm_storeu_si128((__m128i *) (y->bsums + j / 16),
                             _mm_packs_epi32(_mm_unpacklo_epi32(lo, hi), _mm_unpackhi_epi32(lo, hi)));
        }
        y->d = 1 / iscale;
    }
}

}  // namespace
}  // namespace mtp
