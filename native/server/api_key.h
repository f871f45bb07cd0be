#pragma once
// Whose conversation a list of tokens is, where llama-server has several API keys: what one key's requests have computed is
// offered to no other key, whose time to the first token would reveal it. patches/ includes this file in tools/server.

#include "common.h"

#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace mtp {

// The first 64 bits of the SHA-256 of `text`.
inline uint64_t sha256_prefix(std::string text) {
    static constexpr uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
        0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
        0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
        0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
        0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
        0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
    };
    std::array<uint32_t, 8> hash = { 0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19 };
    const uint64_t n_bits = 8 * (uint64_t) text.size();
    text += '\x80';
    text.resize((text.size() + 8 + 63) / 64 * 64, '\0');
    for (size_t i = 0; i < 8; i++) {
        text[text.size() - 1 - i] = (char) (n_bits >> 8 * i);
    }
    const auto rotated = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
    for (size_t block = 0; block < text.size(); block += 64) {
        uint32_t w[64];
        for (size_t i = 0; i < 64; i++) {
            if (i < 16) {
                const auto byte = [&](size_t j) { return (uint32_t) (uint8_t) text[block + 4 * i + j]; };
                w[i] = byte(0) << 24 | byte(1) << 16 | byte(2) << 8 | byte(3);
            } else {
                const uint32_t before = w[i - 15], last = w[i - 2];
                w[i] = w[i - 16] + (rotated(before, 7) ^ rotated(before, 18) ^ before >> 3) + w[i - 7] +
                       (rotated(last, 17) ^ rotated(last, 19) ^ last >> 10);
            }
        }
        auto [a, b, c, d, e, f, g, h] = hash;
        for (size_t i = 0; i < 64; i++) {
            const uint32_t t1 = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + k[i] + w[i];
            const uint32_t t2 = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
        const uint32_t sums[8] = { a, b, c, d, e, f, g, h };
        for (size_t i = 0; i < 8; i++) {
            hash[i] += sums[i];
        }
    }
    return (uint64_t) hash[0] << 32 | hash[1];
}

// Whose the conversation of a request with these headers is: a number that does not reveal the key. 0, which is everybody, if
// there are not several keys, or with --share-sessions. A server behind a router has no keys: the router has checked them.
inline uint64_t owner_of(const std::string & authorization, const std::string & x_api_key, const common_params & params) {
    if (params.share_sessions || (params.api_keys.size() < 2 && !std::getenv("LLAMA_SERVER_ROUTER_PORT"))) {
        return 0;
    }
    std::string key = authorization.empty() ? x_api_key : authorization;
    const std::string scheme = "Bearer ";
    if (key.compare(0, scheme.size(), scheme) == 0) {
        key.erase(0, scheme.size());
    }
    return sha256_prefix("mtp-gguf session\n" + key);
}

} // namespace mtp
