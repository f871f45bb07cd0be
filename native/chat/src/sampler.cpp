// The sampler of an answer: what common_sampler does with the grammar of tool calls and the budget for thinking, as a
// link of a sampler chain.

#include "common.h"
#include "guard.h"
#include "json.h"
#include "llama.h"
#include "mtp_chat.h"
#include "reasoning-budget.h"

#include <algorithm>
#include <climits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

using json = common_json;

namespace {

struct free_sampler {
    void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
};
using sampler_ptr = std::unique_ptr<llama_sampler, free_sampler>;

struct answer_sampler {
    sampler_ptr grammar, budget; // either may be missing
    bool        lazy = false;

    // A lazy grammar waits for a call, which thinking has none of.
    bool constrains() const {
        if (!grammar || !budget || !lazy) {
            return grammar != nullptr;
        }
        const auto state = common_reasoning_budget_get_state(budget.get());
        return state == REASONING_BUDGET_IDLE || state == REASONING_BUDGET_DONE;
    }

    void accept_in_grammar(llama_token token) {
        try {
            llama_sampler_accept(grammar.get(), token);
        } catch (const std::exception &) { // a token after a trigger that no call begins with
            grammar.reset();
        }
    }

    void accept(llama_token token) {
        const bool constrained = constrains();
        if (budget) {
            llama_sampler_accept(budget.get(), token);
            const llama_tokens * end = common_reasoning_budget_get_end_match(budget.get());
            if (grammar && !constrained && end != nullptr &&
                common_reasoning_budget_get_state(budget.get()) == REASONING_BUDGET_DONE) {
                for (size_t i = 0; grammar && i < end->size(); i++) { // it may be what a call begins with
                    accept_in_grammar((*end)[i]);
                }
            }
        }
        if (constrained) {
            accept_in_grammar(token);
        }
    }

    void apply(llama_token_data_array * candidates) {
        if (budget) {
            llama_sampler_apply(budget.get(), candidates);
        }
        if (constrains()) {
            llama_sampler_apply(grammar.get(), candidates);
        }
    }
};

answer_sampler & self(const llama_sampler * sampler) {
    return *static_cast<answer_sampler *>(sampler->ctx);
}

llama_sampler * make(std::unique_ptr<answer_sampler> made);

llama_sampler * clone(const llama_sampler * sampler) {
    const auto & from = self(sampler);
    auto         copy = std::make_unique<answer_sampler>();
    copy->grammar.reset(from.grammar ? llama_sampler_clone(from.grammar.get()) : nullptr);
    copy->budget.reset(from.budget ? llama_sampler_clone(from.budget.get()) : nullptr);
    copy->lazy = from.lazy;
    return make(std::move(copy));
}

llama_sampler * make(std::unique_ptr<answer_sampler> made) {
    static struct {
        llama_sampler_i functions;
        void *          none[16]; // of those that a later llama.cpp may have
    } interface = {};
    interface.functions.name   = [](const llama_sampler *) { return "answer"; };
    interface.functions.accept = [](llama_sampler * sampler, llama_token token) { self(sampler).accept(token); };
    interface.functions.apply  = [](llama_sampler * sampler, llama_token_data_array * candidates) { self(sampler).apply(candidates); };
    interface.functions.clone  = clone;
    interface.functions.free   = [](llama_sampler * sampler) { delete &self(sampler); };
    llama_sampler * sampler    = llama_sampler_init(&interface.functions, made.get());
    made.release();
    return sampler;
}

llama_tokens tokens_of(const llama_vocab * vocab, const std::string & text) {
    return text.empty() ? llama_tokens() : common_tokenize(vocab, text, false, true);
}

// As the first of llama_sampler_init's samplers sees the prompt's end. A tokenizer may begin with a space.
llama_tokens generation_prompt(const llama_vocab * vocab, const json & rendered) {
    const std::string text   = rendered.at("generation_prompt").get<std::string>();
    llama_tokens      tokens = tokens_of(vocab, text);
    if (!tokens.empty()) {
        const std::string piece = common_token_to_piece(vocab, tokens[0], true);
        if (!piece.empty() && std::isspace((unsigned char) piece[0]) && !std::isspace((unsigned char) text[0])) {
            tokens.erase(tokens.begin());
        }
    }
    return tokens;
}

sampler_ptr grammar_sampler(const llama_vocab * vocab, const json & rendered) {
    const std::string grammar = rendered.at("grammar").get<std::string>();
    if (grammar.empty()) {
        return nullptr;
    }
    if (!rendered.at("grammar_lazy").get<bool>()) {
        return sampler_ptr(llama_sampler_init_grammar(vocab, grammar.c_str(), "root"));
    }
    std::vector<std::string> patterns;
    llama_tokens             tokens;
    const json               triggers = rendered.at("grammar_triggers");
    for (size_t i = 0; i < triggers.size(); i++) {
        const std::string value = triggers.at(i).at("value").get<std::string>();
        switch (triggers.at(i).at("type").get<int>()) {
            case COMMON_GRAMMAR_TRIGGER_TYPE_WORD: {
                const auto ids = tokens_of(vocab, value);
                if (ids.size() == 1) {
                    tokens.push_back(ids[0]);
                } else {
                    patterns.push_back(regex_escape(value));
                }
                break;
            }
            case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL:
                patterns.push_back((value.empty() || value.front() != '^' ? "^" : "") + value +
                                   (value.empty() || value.back() != '$' ? "$" : ""));
                break;
            default:
                patterns.push_back(value);
        }
    }
    std::vector<const char *> texts;
    for (const auto & pattern : patterns) {
        texts.push_back(pattern.c_str());
    }
    return sampler_ptr(llama_sampler_init_grammar_lazy_patterns(vocab, grammar.c_str(), "root", texts.data(), texts.size(),
                                                                tokens.data(), tokens.size()));
}

sampler_ptr budget_sampler(const llama_vocab * vocab, const json & rendered, int32_t most, const std::string & end) {
    const auto                start = tokens_of(vocab, rendered.at("thinking_start_tag").get<std::string>());
    std::vector<llama_tokens> ends;
    const json                tags = rendered.at("thinking_end_tags");
    for (size_t i = 0; i < tags.size(); i++) {
        if (const auto tag = tokens_of(vocab, tags.at(i).get<std::string>()); !tag.empty()) {
            ends.push_back(tag);
        }
    }
    if (start.empty() || ends.empty() || (most < 0 && !rendered.at("grammar_lazy").get<bool>())) {
        return nullptr;
    }
    llama_tokens forced = tokens_of(vocab, end);
    forced.insert(forced.end(), ends[0].begin(), ends[0].end());
    return sampler_ptr(common_reasoning_budget_init(vocab, { start }, ends, forced, most < 0 ? INT_MAX : most));
}

} // namespace

mtp_chat_status mtp_chat_sampler(const llama_model * model, const char * text, int32_t thinking_tokens, const char * end,
                                 llama_sampler ** out) {
    return mtp_chat_layer::guard(MTP_CHAT_ERROR_REQUEST, [&] {
        const llama_vocab * vocab    = llama_model_get_vocab(model);
        const json          rendered = json::parse(text);
        auto                made     = std::make_unique<answer_sampler>();
        made->lazy                   = rendered.at("grammar_lazy").get<bool>();
        made->grammar                = grammar_sampler(vocab, rendered);
        made->budget                 = budget_sampler(vocab, rendered, thinking_tokens, end);
        if (!made->grammar && !rendered.at("grammar").get<std::string>().empty()) {
            throw std::invalid_argument("tools: expected schemas that a grammar can express, found others; llama.cpp cannot read it");
        }
        for (const llama_token token : generation_prompt(vocab, rendered)) {
            if (made->grammar && !made->lazy) {
                llama_sampler_accept(made->grammar.get(), token);
            }
            if (made->budget) {
                llama_sampler_accept(made->budget.get(), token);
            }
        }
        *out = made->grammar || made->budget ? make(std::move(made)) : nullptr;
    });
}
