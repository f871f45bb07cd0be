#include "head/token_symbols.h"

namespace mtp {

namespace {

// Takes a character of valid UTF-8 from `at`; 0 at the end and for anything else.
uint32_t take_character(const char *& at) {
    const uint8_t first = uint8_t(*at);
    const int more = first < 0x80 ? 0 : first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : first >= 0xc2 ? 1 : -1;
    if (first == 0 || more < 0 || first > 0xf4) {
        return 0;
    }
    uint32_t out = more == 0 ? first : first & (0x3f >> more);
    for (int i = 1; i <= more; ++i) {
        const uint8_t next = uint8_t(at[i]);
        if ((next & 0xc0) != 0x80) { // also the end
            return 0;
        }
        out = out << 6 | (next & 0x3f);
    }
    at += more + 1;
    return out;
}

// The byte that a character stands for in a byte-level vocabulary: printable ones of Latin-1 are themselves, and the
// others are counted from 256 on. -1 if it is none of these.
int to_byte(uint32_t character) {
    static const std::vector<int> bytes = [] {
        std::vector<int> out(512, -1);
        size_t next = 256;
        for (int byte = 0; byte < 256; ++byte) {
            const bool itself = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
            out[itself ? size_t(byte) : next++] = byte;
        }
        return out;
    }();
    return character < bytes.size() ? bytes[character] : -1;
}

uint8_t symbol_of(uint32_t character) {
    enum : uint8_t { ASCII = 0, LETTERS = 96, LATIN = 160, HAN, KANA, HANGUL, OTHER, BLOCKS };
    if (character < 0x80) {
        return uint8_t(ASCII + (character < 0x20 ? 0 : character - 0x20));
    }
    if (character >= 0xc0 && character < 0x100) {
        return uint8_t(LETTERS + character - 0xc0);
    }
    if (character < 0x250) {
        return LATIN;
    }
    if (character < 0x2000) { // Greek, Cyrillic, …: blocks of 128 characters
        return uint8_t(BLOCKS + (character >> 7));
    }
    return character >= 0x4e00 && character < 0xa000   ? HAN
           : character >= 0x3040 && character < 0x3100 ? KANA
           : character >= 0xac00 && character < 0xd7b0 ? HANGUL
                                                       : OTHER;
}

} // namespace

TokenSymbols TokenSymbols::read(const GgufFile & file, int64_t n) {
    const std::vector<const char *> texts = file.texts("tokenizer.ggml.tokens");
    const bool byte_level = file.has_key("tokenizer.ggml.model") && file.text("tokenizer.ggml.model") == "gpt2";
    TokenSymbols out;
    out.starts.push_back(0);
    std::string bytes;
    for (size_t id = 0; id < size_t(n); ++id) {
        const char * text = id < texts.size() ? texts[id] : "";
        if (byte_level) {
            bytes.clear();
            int byte = -1;
            while ((byte = to_byte(take_character(text))) >= 0) {
                bytes.push_back(char(byte));
            }
            text = bytes.c_str();
        }
        while (const uint32_t character = take_character(text)) {
            out.symbols.push_back(symbol_of(character));
        }
        out.starts.push_back(uint32_t(out.symbols.size()));
    }
    return out;
}

} // namespace mtp
