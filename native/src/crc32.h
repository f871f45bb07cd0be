#pragma once
// CRC-32 as zlib computes it, eight bytes at a time.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mtp {

// The checksum of bytes, or of bytes that follow those of `crc`.
inline uint32_t crc32(const void * data, size_t size, uint32_t crc = 0) {
    static const auto table = [] {
        std::array<std::array<uint32_t, 256>, 8> of = {};
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t x = i;
            for (int bit = 0; bit < 8; bit++) {
                x = x >> 1 ^ (x & 1 ? 0xedb88320u : 0);
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
    const uint8_t * p = static_cast<const uint8_t *>(data);
    crc = ~crc;
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
    return ~crc;
}

} // namespace mtp
