#pragma once
// Which tokens are likely in a text, estimated from the pairs of symbols in the tokens that it has had.
//
// A token's chance is its chance in any text, which falls with its id as tokenizers are made, times the ratio of two
// chances of its symbols, each after the one before it: in the tokens of the text, and in all tokens. A pair that
// the text has not had is estimated from its second symbol.

#include "head/token_symbols.h"

#include <cstdint>
#include <vector>

namespace mtp {

class TokenLikeness {
public:
    explicit TokenLikeness(const TokenSymbols & symbols);

    // The n of these candidates that are likeliest in a text with these tokens, likeliest first.
    std::vector<int32_t> best(const std::vector<int32_t> & text, const std::vector<int32_t> & candidates, size_t n) const;

private:
    const TokenSymbols & symbols_;
    std::vector<float> log_chances_; // by id, in any text
    std::vector<double> pairs_;      // [symbol before][symbol], the chance of a symbol after the one before it in all tokens
    std::vector<double> singles_;    // the chance of a symbol
};

} // namespace mtp
