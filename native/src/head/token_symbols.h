#pragma once
// The texts of tokens as symbols, by which texts in one language can be told from those in another.

#include "head/gguf_file.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mtp {

// A character of ASCII or a letter of Latin-1 is a symbol of its own; others stand for their script.
struct TokenSymbols {
    static constexpr uint8_t START = 255; // before the first character, in no text
    static constexpr size_t N = 256;

    std::vector<uint8_t> symbols;
    std::vector<uint32_t> starts; // of each token's, and the end

    // Of the first `n` tokens of a file's tokenizer. A token that is only a part of a character has none.
    static TokenSymbols read(const GgufFile & file, int64_t n);

    // Calls f(before, symbol) for each symbol of a token.
    template <typename F> void each(size_t token, F f) const {
        uint8_t before = START;
        for (uint32_t i = starts[token]; i < starts[token + 1]; ++i) {
            f(before, symbols[i]);
            before = symbols[i];
        }
    }
};

} // namespace mtp
