// Code shared by the block formats.
//
// A format defines its ggml type, the values and bytes of a block, whether it uses importance, and
// quantize(), which takes the values of one block per lane (and their importance, if Weighted) and
// stores the block's bytes in `words`, four to a word. quantize() returns the lanes that ggml must
// quantize instead.
#pragma once

#include "lanes.h"

namespace MTP_TARGET {

enum class Importance { USED, IGNORED, LEFT_TO_GGML };

template <int N> inline Float sum_of_squares(const Float * x) {
    Float sum = {};
    for (int i = 0; i < N; ++i) sum += x[i] * x[i];
    return sum;
}

// Weights w of N values from their importance; returns the sum of the weights.
template <int N>
inline Float weigh(const Float * x, const Float * importance, Float variance, Float * w) {
    Float sum = {};
    for (int i = 0; i < N; ++i) {
        w[i] = importance[i] * sqrt(variance + x[i] * x[i]);
        sum += w[i];
    }
    return sum;
}

// The two low bits of 256 levels, from four words each 32 values apart: 64 bytes.
inline void pack_pairs_of_bits(const Int * levels, Int * words) {
    for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 8; ++i) {
            Int packed = {};
            for (int k = 0; k < 4; ++k) {
                const Int four = word_of(levels + 128 * half + 32 * k + 4 * i);
                packed |= (four & 0x03030303) << 2 * k;
            }
            words[8 * half + i] = packed;
        }
    }
}

// A block that begins with a half, which shifts the N words after it by two bytes.
template <int N> inline void store_half_and(Int half, const Int * body, Int * words) {
    words[0] = half | body[0] << 16;
    for (int i = 1; i < N; ++i) words[i] = (body[i - 1] >> 16 & 0xffff) | body[i] << 16;
    words[N] = body[N - 1] >> 16 & 0xffff;
}

// The same with 32 levels of four bits, i and i + 16 in a byte.
inline void store_half_and_nibbles(Int half, const Int * levels, Int * words) {
    Int body[4];
    for (int i = 0; i < 4; ++i) {
        body[i] = word_of(levels + 4 * i) | word_of(levels + 16 + 4 * i) << 4;
    }
    store_half_and<4>(half, body, words);
}

}  // namespace MTP_TARGET
