#pragma once
// CRC-32 as zlib computes it: by carry-less products where an x86 CPU has them, which is faster
// than memory, and eight bytes at a time by tables elsewhere.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#    include <immintrin.h>
#    define MTP_CRC32_PRODUCTS 1
#endif

namespace mtp {

// A step of the register over a zero bit: the register times x, modulo the polynomial. The lowest
// bit of the register is its highest power.
constexpr uint32_t crc32_times_x(uint32_t value) {
    return value >> 1 ^ (value & 1 ? 0xedb88320u : 0);
}

// The register `crc` (without the two complements of the checksum) after `size` more bytes.
inline uint32_t crc32_by_tables(const uint8_t * p, size_t size, uint32_t crc) {
    static const auto table = [] {
        std::array<std::array<uint32_t, 256>, 8> of = {};
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t x = i;
            for (int bit = 0; bit < 8; bit++) {
                x = crc32_times_x(x);
            }
            of[0][i] = x;
        }
        for (uint32_t i = 0; i < 256; i++) {
            for (size_t k = 1; k < 8; k++) {
                of[k][i] = of[k - 1][i] >> 8 ^ of[0][of[k - 1][i] & 255];
            }
        }
        return of;
    }();
    for (; size >= 8; size -= 8, p += 8) {
        uint32_t low, high;
        std::memcpy(&low, p, 4);
        std::memcpy(&high, p + 4, 4);
        low ^= crc;
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
              table[3][high & 255] ^ table[2][high >> 8 & 255] ^ table[1][high >> 16 & 255] ^ table[0][high >> 24];
    }
    for (; size > 0; size--, p++) {
        crc = crc >> 8 ^ table[0][(crc ^ *p) & 255];
    }
    return crc;
}

#ifdef MTP_CRC32_PRODUCTS
// x to the power of `bits`, modulo the polynomial, as a factor of a carry-less product. Such a
// product of reversed values is one bit too low, for which the factor is shifted.
constexpr int64_t crc32_factor(int bits) {
    uint32_t value = 0x80000000u;
    for (int i = 0; i < bits; i++) {
        value = crc32_times_x(value);
    }
    return int64_t(value) << 1;
}

// 16 bytes moved forward by BITS, modulo the polynomial: each half is multiplied by the power of x
// that it is moved by. The lower half holds the higher powers; 32 is the width of the polynomial.
template <int BITS>
__attribute__((target("pclmul,sse4.1"))) inline __m128i crc32_moved(__m128i bytes) {
    constexpr int64_t LOWER = crc32_factor(BITS + 32), UPPER = crc32_factor(BITS - 32);
    const __m128i factors = _mm_set_epi64x(UPPER, LOWER);
    return _mm_xor_si128(_mm_clmulepi64_si128(bytes, factors, 0x00), _mm_clmulepi64_si128(bytes, factors, 0x11));
}

// The same as `crc32_by_tables` for at least 64 bytes. Four sums of 16 bytes move over the data;
// what is left of them is a message of 16 bytes with the same remainder.
__attribute__((target("pclmul,sse4.1"))) inline uint32_t crc32_by_products(const uint8_t * p, size_t size, uint32_t crc) {
    const auto load = [](const uint8_t * at) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(at)); };
    __m128i sums[4] = {load(p), load(p + 16), load(p + 32), load(p + 48)};
    sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(int(crc)));
    for (p += 64, size -= 64; size >= 64; p += 64, size -= 64) {
        for (int i = 0; i < 4; i++) {
            sums[i] = _mm_xor_si128(crc32_moved<512>(sums[i]), load(p + 16 * i));
        }
    }
    __m128i sum = sums[0];
    for (int i = 1; i < 4; i++) {
        sum = _mm_xor_si128(crc32_moved<128>(sum), sums[i]);
    }
    for (; size >= 16; p += 16, size -= 16) {
        sum = _mm_xor_si128(crc32_moved<128>(sum), load(p));
    }
    uint8_t bytes[16];
    _mm_storeu_si128(reinterpret_cast<__m128i *>(bytes), sum);
    return crc32_by_tables(p, size, crc32_by_tables(bytes, sizeof(bytes), 0));
}
#endif

// The checksum of bytes, or of bytes that follow those of `crc`.
inline uint32_t crc32(const void * data, size_t size, uint32_t crc = 0) {
    const uint8_t * p = static_cast<const uint8_t *>(data);
#ifdef MTP_CRC32_PRODUCTS
    if (size >= 64 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        return ~crc32_by_products(p, size, ~crc);
    }
#endif
    return ~crc32_by_tables(p, size, ~crc);
}

} // namespace mtp
