#pragma once
// Which script the text of a token is in.

#include "head/gguf_file.h"

#include <cstdint>
#include <vector>

namespace mtp {

// For each of the first `n` tokens of a file's tokenizer the number of the script of its first character beyond
// ASCII; 0 if it has none, as most words of English and of programs, or only a part of a character.
std::vector<uint8_t> token_scripts(const GgufFile & file, int64_t n);

} // namespace mtp
