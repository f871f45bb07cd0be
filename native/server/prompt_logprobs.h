#pragma once
// Log-probabilities as in OpenAI's completions, also of the prompt's own tokens, which evaluation harnesses ask for (`echo`).
// patches/ includes this file in tools/server.

#include "../include/mtp.h"
#include "common.h"
#include "json.h"
#include "llama.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
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

// The tokens `ids` in places where the model gave `rows` of logits to the vocabulary's tokens, and the n_top likeliest ones there.
template <typename Text>
std::vector<prompt_token> prompt_tokens_after(const std::vector<const float *> & rows, const std::vector<llama_token> & ids,
                                              int n_vocab, int n_top, int n_threads, const Text & text_of) {
    n_top = std::min(n_top, n_vocab);
    std::vector<double>      logprobs(ids.size());
    std::vector<llama_token> top_ids(ids.size() * n_top);
    std::vector<double>      top(ids.size() * n_top);
    if (mtp_token_logprobs(rows.data(), ids.data(), (int32_t) ids.size(), n_vocab, n_top, n_threads, logprobs.data(), top_ids.data(),
                           top.data()) != MTP_OK) {
        throw std::runtime_error(mtp_last_error());
    }
    std::vector<prompt_token> tokens;
    for (size_t i = 0; i < ids.size(); i++) {
        tokens.push_back({ text_of(ids[i]), true, logprobs[i], {} });
        for (size_t j = i * n_top; j < (i + 1) * n_top; j++) {
            tokens.back().top.emplace_back(text_of(top_ids[j]), top[j]);
        }
    }
    return tokens;
}

// Add the log-probabilities of the tokens of the slot's prompt that follow those in the current sub-batch: n_tokens of `batch` from
// `offset` on.
template <typename Slot, typename Batch>
void add_prompt_tokens(Slot & slot, const Batch & batch, int32_t n_tokens, int32_t offset) {
    const auto & tokens  = slot.task->tokens;
    auto &       known   = slot.prompt_tokens;
    auto *       ctx     = slot.ctx_tgt;
    const auto   text_of = [&](llama_token id) { return common_token_to_piece(ctx, id, true); };
    if (known.empty()) {
        known.push_back({ text_of(tokens[0]), false, 0, {} });
    }
    std::vector<const float *> rows;
    std::vector<llama_token>   ids;
    for (int32_t i = offset; i < offset + n_tokens && known.size() + ids.size() < tokens.size(); i++) {
        if (batch.tokens[i].id_slot == slot.id && batch.tokens[i].is_prompt) {
            rows.push_back(llama_get_logits_ith(ctx, i - offset));
            ids.push_back(tokens[known.size() + ids.size()]);
        }
    }
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    for (auto & token : prompt_tokens_after(rows, ids, n_vocab, slot.task->params.sampling.n_probs, llama_n_threads_batch(ctx), text_of)) {
        known.push_back(std::move(token));
    }
}

// Take the tokens of the slot's prompt, without those that the client did not send.
template <typename Slot> std::vector<prompt_token> take_prompt_tokens(Slot & slot) {
    auto tokens = std::move(slot.prompt_tokens);
    slot.prompt_tokens.clear();
    const size_t n_hidden = slot.task->params.n_echo_hidden;
    if (n_hidden > 0 && n_hidden < tokens.size()) {
        tokens.erase(tokens.begin(), tokens.begin() + n_hidden);
        tokens[0].has_logprob = false;
    }
    return tokens;
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

// `logprobs` of a completion: in OpenAI's form, and `content` in that of a chat. probs: completion_token_output of what was generated.
template <typename Output>
common_json logprobs_of_completion(const std::vector<prompt_token> & prompt_tokens, const std::vector<Output> & probs,
                                   bool post_sampling_probs, size_t n_characters) {
    if (prompt_tokens.empty() && probs.empty()) {
        return nullptr;
    }
    completion_logprobs all(n_characters);
    for (const auto & token : prompt_tokens) {
        all.add(token);
    }
    for (const auto & p : probs) {
        prompt_token token = { p.text_to_send, true, Output::logarithm(p.prob), {} };
        for (const auto & top : p.probs) {
            token.top.emplace_back(top.txt, Output::logarithm(top.prob));
        }
        all.add(token);
    }
    common_json res = common_json{ { "content", Output::probs_vector_to_json(probs, post_sampling_probs) } };
    all.write(res);
    return res;
}

} // namespace mtp
