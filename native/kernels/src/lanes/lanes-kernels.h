// The kernels of lanes.h for any vector type V with V::count lanes of 128 bits. Included once for
// each instruction set; V is one of lanes-dots.h:
//
//     V::lanes(p, offset)          16 bytes at p + offset[l] in lane l: a piece of one block in each
//     V::all(p)                    a whole vector
//     V::same(p)                   the same 16 bytes in each lane
//     V::dot16(u, s)               unsigned u times signed s over 16 elements of each lane, and over
//     V::dot32(u0, s0, u1, s1)     32: still unscaled. Sums of 4 products (8) must fit int16
//     V::scaled(acc, dot, scale)   acc + dot * scale, 32 bits
//     V::scale(words, i)           word i of each lane, as scaled takes it
//
//     V::sums<Signed>(w0, y0, w1, y1)   as dot32, in 32 bits; for signed codes where that is said
//     V::signed32(…)               scaled products of signed codes, see iq4_xs
//
// Each product of a row and a column is rounded in a fixed order, so its bits do not depend on the other
// rows and columns of the call.

#pragma once

#include "lanes.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#define LANES_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LANES_UNROLL _Pragma("GCC unroll 16")
#endif
#define LANES_ALWAYS __attribute__((always_inline))
#define LANES_INLINE static inline LANES_ALWAYS

namespace mtp {
namespace {

// Forces an addition to be executed here: gcc defers the additions of long sums, and spills their operands.
template <class I> LANES_INLINE I at_once(I sum) {
    __asm__("" : "+v"(sum));
    return sum;
}

// The same, and not before what is in_order above it: gcc moves multiplications ahead of additions, and spills their results.
template <class I> LANES_INLINE I in_order(I x) {
    __asm__ volatile("" : "+v"(x));
    return x;
}

// Adds up the four 32-bit elements of each lane of a[0..3]: element 4*l + i is the sum of lane l of a[i]. If
// each a[i] belongs to one row, a lane of the result has the sums of four rows for one block.
template <class V> LANES_INLINE typename V::I lane_sums(const typename V::I * a) {
    const auto ab = V::add32(V::unpacklo32(a[0], a[1]), V::unpackhi32(a[0], a[1]));
    const auto cd = V::add32(V::unpacklo32(a[2], a[3]), V::unpackhi32(a[2], a[3]));
    return V::add32(V::unpacklo64(ab, cd), V::unpackhi64(ab, cd));
}

// The first (lane_heads) and last (lane_tails) 32 bits of each lane of a[0..3], in the order of lane_sums.
template <class V> LANES_INLINE typename V::I lane_heads(const typename V::I * a) {
    return V::unpacklo64(V::unpacklo32(a[0], a[1]), V::unpacklo32(a[2], a[3]));
}

template <class V> LANES_INLINE typename V::I lane_tails(const typename V::I * a) {
    return V::unpackhi64(V::unpackhi32(a[0], a[1]), V::unpackhi32(a[2], a[3]));
}

template <class V> LANES_INLINE typename V::F lane_sums_f(const typename V::F * a) {
    using I = typename V::I;
    const I x[4] = { V::as_int(a[0]), V::as_int(a[1]), V::as_int(a[2]), V::as_int(a[3]) };
    const auto ab = V::addf(V::as_float(V::unpacklo32(x[0], x[1])), V::as_float(V::unpackhi32(x[0], x[1])));
    const auto cd = V::addf(V::as_float(V::unpacklo32(x[2], x[3])), V::as_float(V::unpackhi32(x[2], x[3])));
    return V::addf(V::as_float(V::unpacklo64(V::as_int(ab), V::as_int(cd))),
                   V::as_float(V::unpackhi64(V::as_int(ab), V::as_int(cd))));
}

// kvalues_iq4nl of ggml-common.h
constexpr int8_t iq4_values[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

// Calls body(s) for s = 0 to 7, each a constant.
struct unrolled {
    template <class Body> LANES_INLINE void eighths(Body && body) {
        body(std::integral_constant<int, 0>());
        body(std::integral_constant<int, 1>());
        body(std::integral_constant<int, 2>());
        body(std::integral_constant<int, 3>());
        body(std::integral_constant<int, 4>());
        body(std::integral_constant<int, 5>());
        body(std::integral_constant<int, 6>());
        body(std::integral_constant<int, 7>());
    }
};

// The offsets of `here` consecutive blocks, one for each lane; the remaining lanes repeat the first one.
template <class V, class B> LANES_INLINE void block_lanes(int here, size_t * lane) {
    LANES_UNROLL
    for (int l = 0; l < V::count; l++) {
        lane[l] = l < here ? l * sizeof(B) : 0;
    }
}

// Prefetches weights: the hardware prefetcher does not follow the many small loads,
// although they are nearly in address order. Prefetching beyond the end of a matrix is harmless.
// Cache: the level of the cache to prefetch into.
template <size_t Bytes, int Cache = 1> LANES_INLINE void fetch(const char * p) {
    LANES_UNROLL
    for (size_t at = 0; at < Bytes; at += 64) {
        __builtin_prefetch(p + at, 0, 4 - Cache);
    }
}

// The same into the L1 cache, for data that is read once; the other caches keep what they have.
template <size_t Bytes> LANES_INLINE void fetch_once(const char * p) {
    LANES_UNROLL
    for (size_t at = 0; at < Bytes; at += 64) {
        __builtin_prefetch(p + at, 0, 0);
    }
}

// Rows that are read four (rows) at a time are prefetched in address order, at least as far ahead as that, so that
// the next ones are there when they are begun. The distance in bytes, and whether to use the hint: only where so much fits
// beside the columns in an L1 cache.
struct rows_ahead {
    size_t bytes;
    bool   once;
    rows_ahead(size_t rows, size_t stride, reading how) :
        bytes(rows * stride > 8192 ? rows * stride : 8192), once(how.once && bytes <= 16384) {}
};

template <size_t Bytes> LANES_INLINE void fetch(const char * p, const rows_ahead & ahead) {
    if (ahead.once) {
        fetch_once<Bytes>(p + ahead.bytes);
    } else {
        fetch<Bytes, 2>(p + ahead.bytes);
    }
}

// K's product with any number of columns.
template <class V, class K>
void mul_mat(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc,
             reading how) {
    how.again = how.again && nc <= LANES_COLS;  // several calls of the kernel share its memory
    for (; nc > LANES_COLS; nc -= LANES_COLS, cols += LANES_COLS, dst += LANES_COLS) {
        K::template product<V, LANES_COLS>(n, w, stride, nr, cols, dst, how);
    }
    switch (nc) {
        case 1: return K::template product<V, 1>(n, w, stride, nr, cols, dst, how);
        case 2: return K::template product<V, 2>(n, w, stride, nr, cols, dst, how);
        case 3: return K::template product<V, 3>(n, w, stride, nr, cols, dst, how);
        case 4: return K::template product<V, 4>(n, w, stride, nr, cols, dst, how);
        case 5: return K::template product<V, 5>(n, w, stride, nr, cols, dst, how);
        case 6: return K::template product<V, 6>(n, w, stride, nr, cols, dst, how);
        case 7: return K::template product<V, 7>(n, w, stride, nr, cols, dst, how);
        case 8: return K::template product<V, 8>(n, w, stride, nr, cols, dst, how);
    }
}

}  // namespace
}  // namespace mtp
