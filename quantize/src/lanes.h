// Conversion between rows in memory and lanes: one super-block per lane, value i of each in vector i.
#pragma once

#include "job.h"
#include "simd.h"

namespace MTP_TARGET {

// LANES vectors as the rows of a square matrix, transposed. Interleaving the first half of the rows
// with the second, log2(LANES) times, moves bit k of the row index to bit k of the lane index.
template <typename Vector> inline void transpose(Vector * rows) {
    Vector mixed[LANES];
    for (int stage = 1; stage < LANES; stage *= 2) {
        for (int i = 0; i < LANES / 2; ++i) {
            const Vector a = rows[i], b = rows[i + LANES / 2];
#if defined(__AVX512F__)
            mixed[2 * i]     = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            mixed[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
            mixed[2 * i]     = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
            mixed[2 * i + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
            mixed[2 * i]     = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            mixed[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
        }
        memcpy(rows, mixed, sizeof mixed);
    }
}

// LANES consecutive values from `source`, as F32.
inline Float load(const float * source) {
    Float values;
    memcpy(&values, source, sizeof values);
    return values;
}
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
inline Int load_halves(const void * source) {
    Halves halves;
    memcpy(&halves, source, sizeof halves);
    return __builtin_convertvector(halves, Int);
}
inline Float load(const F16 * source) { return from_f16(load_halves(source)); }
inline Float load(const BF16 * source) { return from_bf16(load_halves(source)); }

// values[i]: value i of the block that starts at blocks[lane], for each lane. N: a multiple of
// LANES.
template <int N, typename Source>
inline void load_lanes(const Source * const * blocks, Float * values) {
    for (int start = 0; start < N; start += LANES) {
        for (int lane = 0; lane < LANES; ++lane) values[start + lane] = load(blocks[lane] + start);
        transpose(values + start);
    }
}

// The lanes whose N values are not all finite: only NaN and infinity do not yield zero when subtracted
// from themselves.
template <int N> inline Mask not_finite(const Float * values) {
    Int seen = {};
    for (int i = 0; i < N; ++i) seen |= bits(values[i] - values[i]);
    return seen != 0;
}

// Four bytes, one in each vector, as a little-endian word.
inline Int word_of(const Int * bytes) {
    return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24;
}

// Write a block of `Bytes` bytes for each of the first `count` lanes, one after another. The bytes
// of a block are those of words[0], words[1], ... in its lane.
template <int Bytes> inline void store_lanes(const Int * words, uint8_t * out, int count) {
    constexpr int N = (Bytes + 3) / 4;
    alignas(sizeof(Int)) int32_t values[N][LANES];
    memcpy(values, words, sizeof values);
    for (int lane = 0; lane < count; ++lane, out += Bytes) {
        for (int i = 0; i < Bytes / 4; ++i) memcpy(out + 4 * i, &values[i][lane], 4);
        if (Bytes % 4) memcpy(out + Bytes / 4 * 4, &values[N - 1][lane], Bytes % 4);
    }
}

}  // namespace MTP_TARGET
