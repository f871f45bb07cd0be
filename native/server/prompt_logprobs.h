#pragma once
// Log-probabilities as in OpenAI's completions, also of the prompt's own tokens, which evaluation harnesses ask for (`echo`).
// patches/ includes this file in tools/server.

#include "json.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace mtp {

// Tokens of prompts with log-probabilities that are computed at once. Each has a row of logits, a MB with a large vocabulary, for
// which a context has memory from its beginning, also if nobody asks for them.
constexpr int32_t max_logprob_rows = 64;

// A token of a prompt. The first one follows nothing: it has no log-probability.
struct prompt_token {
    std::string                                text;
    bool                                       has_logprob = false;
    double                                     logprob     = 0;
    std::vector<std::pair<std::string, double>> top; // the likeliest tokens in its place, the likeliest first
};

// The logarithm of the sum of exp(logits[i]). The exponentials are computed to the last bits of a float, in blocks, since a call of
// exp for each token of a large vocabulary would take as long as reading the prompt.
inline double log_sum_exp(const float * logits, size_t n) {
    constexpr size_t block = 256;
    const float      best  = *std::max_element(logits, logits + n);
    double           sum   = 0;
    for (size_t first = 0; first < n; first += block) {
        const size_t size = std::min(block, n - first);
        float        terms[block] = {};
        for (size_t i = 0; i < size; i++) {
            // exp(x) = 2^whole * exp(rest) with |rest| <= ln(2) / 2, by a polynomial
            const float   x     = std::max(-87.0f, logits[first + i] - best); // also of a NaN
            const int32_t whole = (int32_t) (x * 1.44269504f - 0.5f);
            const float   rest  = (x - (float) whole * 0.693359375f) + (float) whole * 2.12194440e-4f;
            float         value = 1 / 5040.0f;
            for (const float factor : { 1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f, 1.0f, 1.0f }) {
                value = value * rest + factor;
            }
            const int32_t bits = (whole + 127) << 23;
            float         power;
            std::memcpy(&power, &bits, sizeof(power));
            terms[i] = value * power;
        }
        for (size_t half = block / 2; half > 0; half /= 2) {
            for (size_t i = 0; i < half; i++) {
                terms[i] += terms[i + half];
            }
        }
        sum += terms[0];
    }
    return best + std::log(sum);
}

// The token `id` in a place where the model gave `logits` to the vocabulary's tokens, and the `n_top` likeliest ones there.
template <typename Text>
prompt_token prompt_token_after(const float * logits, size_t n_vocab, llama_token id, size_t n_top, const Text & text_of) {
    const double norm = log_sum_exp(logits, n_vocab);
    prompt_token token = { text_of(id), true, logits[id] - norm, {} };
    const auto   add   = [&](llama_token top) { token.top.emplace_back(text_of(top), logits[top] - norm); };
    n_top = std::min(n_top, n_vocab);
    if (n_top == 1) {
        add((llama_token) (std::max_element(logits, logits + n_vocab) - logits));
    } else if (n_top > 1) {
        std::vector<llama_token> ids(n_vocab);
        std::iota(ids.begin(), ids.end(), 0);
        std::partial_sort(ids.begin(), ids.begin() + n_top, ids.end(), [&](llama_token a, llama_token b) { return logits[a] > logits[b]; });
        std::for_each(ids.begin(), ids.begin() + n_top, add);
    }
    return token;
}

// Take the whole characters from the beginning of `bytes`, which keeps the beginning of another one. Other bytes are dropped.
inline std::string take_characters(std::string & bytes) {
    std::string whole;
    size_t      i = 0;
    while (i < bytes.size()) {
        const unsigned char first = bytes[i];
        const size_t        size  = first < 0x80 ? 1 : first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
        size_t              n     = 1;
        while (n < size && i + n < bytes.size() && ((unsigned char) bytes[i + n] & 0xC0) == 0x80) {
            n++;
        }
        if (n < size && i + n == bytes.size()) {
            break;
        }
        if (n == size) {
            whole.append(bytes, i, n);
        }
        i += n;
    }
    bytes.erase(0, i);
    return whole;
}

inline size_t count_characters(const std::string & text) {
    return std::count_if(text.begin(), text.end(), [](char c) { return ((unsigned char) c & 0xC0) != 0x80; });
}

// `logprobs` of a choice of a completion. A token that is a part of a character has no text.
class completion_logprobs {
  public:
    // `n_characters`: of the text before the first token
    explicit completion_logprobs(size_t n_characters) : n_characters(n_characters) {}

    void add(const prompt_token & token) {
        const std::string name = text_of(token.text);
        common_json       top  = nullptr;
        if (token.has_logprob) {
            top = common_json::object();
            for (const auto & [text, logprob] : token.top) {
                const std::string key = text_of(text);
                if (!top.contains(key)) { // of two tokens with the same text the likelier one
                    top[key] = logprob;
                }
            }
            top[name] = token.logprob; // always among them
        }
        tokens.push_back(name);
        text_offset.push_back(n_characters);
        token_logprobs.push_back(token.has_logprob ? common_json(token.logprob) : common_json(nullptr));
        top_logprobs.push_back(top);
        waiting += token.text;
        n_characters += count_characters(take_characters(waiting));
    }

    void write(common_json & out) const {
        out["tokens"]         = tokens;
        out["token_logprobs"] = token_logprobs;
        out["top_logprobs"]   = top_logprobs;
        out["text_offset"]    = text_offset;
    }

  private:
    static std::string text_of(std::string token) { return take_characters(token); }

    common_json tokens         = common_json::array();
    common_json token_logprobs = common_json::array();
    common_json top_logprobs   = common_json::array();
    common_json text_offset    = common_json::array();
    size_t      n_characters;       // of the text before the next token
    std::string waiting;            // the beginning of a character
};

} // namespace mtp
