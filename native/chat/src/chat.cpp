// The C surface over common_chat_*: a request in, a rendered conversation out; text in, a message out.

#include "../../server/chat_request.h"
#include "../../server/old_turns.h"
#include "chat.h"
#include "common.h"
#include "guard.h"
#include "jinja/limits.h"
#include "json.h"
#include "llama.h"
#include "mtp_chat.h"

#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

using json = common_json;
using mtp_chat_layer::guard;
using mtp_chat_layer::last_error;

struct mtp_chat {
    common_chat_templates_ptr templates;
    std::string               result;
};

struct mtp_chat_answer {
    common_chat_parser_params parser;
    std::string               text;
    common_chat_msg           message; // of this text
    std::vector<std::string>  ids;     // of its calls
    std::string               result;
};

namespace {

constexpr size_t most_bytes = 1 << 20; // of a template; those of models have less than 40 KB

void check_template(const std::string & source) {
    if (source.empty() || source.size() > most_bytes) {
        throw std::invalid_argument("chat template: expected a text of 1 to " + std::to_string(most_bytes) + " bytes, found " +
                                    std::to_string(source.size()));
    }
}

// Only text: pictures are evaluated by others.
void check_parts(const json & messages) {
    for (size_t i = 0; i < messages.size(); i++) {
        const json content = mtp::member(messages.at(i), "content");
        for (size_t j = 0; content.is_array() && j < content.size(); j++) {
            const json type = mtp::member(content.at(j), "type");
            if (type.get<std::string>() != "text") {
                mtp::refuse(mtp::element(mtp::element("messages", i) + ".content", j), "a part of type text",
                            type.dump_safe() + "; pictures need the model's mmproj file");
            }
        }
    }
}

void read_template_arguments(const json & request, common_chat_templates_inputs & inputs) {
    const json arguments = mtp::member(request, "chat_template_kwargs");
    if (arguments.is_object()) {
        for (const auto & item : arguments.items()) {
            inputs.chat_template_kwargs[item.key()] = item.value().dump();
        }
    }
    const json thinking = mtp::member(arguments, "enable_thinking");
    if (!thinking.is_null()) {
        if (!thinking.is_boolean()) {
            mtp::refuse("chat_template_kwargs.enable_thinking", "true or false", thinking);
        }
        inputs.enable_thinking = thinking.get<bool>();
    }
    const json effort = mtp::member(request, "reasoning_effort");
    if (effort.is_null()) {
        return;
    }
    if (effort.get<std::string>() == "none") {
        inputs.enable_thinking = false;
        inputs.chat_template_kwargs.erase("reasoning_effort");
    } else {
        inputs.chat_template_kwargs["reasoning_effort"] = effort.dump();
    }
}

void read_continuation(const json & request, common_chat_templates_inputs & inputs) {
    const json given = mtp::member(request, "add_generation_prompt");
    if (given.is_boolean()) {
        inputs.add_generation_prompt = given.get<bool>();
    }
    if (request.contains("continue_final_message")) {
        inputs.continue_final_message = common_chat_continuation_parse(request.at("continue_final_message"));
    }
    const auto & messages = inputs.messages;
    const size_t n        = messages.size();
    if (inputs.continue_final_message == COMMON_CHAT_CONTINUATION_NONE && messages.back().role == "assistant") {
        if (n >= 2 && messages[n - 2].role == "assistant") {
            mtp::refuse(mtp::element("messages", n - 1), "no second message of the assistant at the end", json("assistant"));
        }
        inputs.continue_final_message = COMMON_CHAT_CONTINUATION_AUTO;
        inputs.add_generation_prompt  = false;
    }
    if (inputs.continue_final_message == COMMON_CHAT_CONTINUATION_NONE) {
        return;
    }
    if (inputs.add_generation_prompt) {
        mtp::refuse("continue_final_message", "add_generation_prompt of false beside it", json(true));
    }
    if (messages.back().role == "assistant" && !messages.back().tool_calls.empty()) {
        mtp::refuse(mtp::element("messages", n - 1), "an answer without tool calls, to be continued", json("tool_calls"));
    }
}

// continues: whether a stream leaves out the message that is continued.
json to_json(const common_chat_params & params, const common_chat_templates_inputs & inputs, bool continues) {
    json triggers = json::array();
    for (const auto & trigger : params.grammar_triggers) {
        triggers.push_back(json{ { "type", (int) trigger.type }, { "value", trigger.value } });
    }
    const bool calls = !inputs.tools.empty() && inputs.tool_choice != COMMON_CHAT_TOOL_CHOICE_NONE;
    return json{
        { "prompt", params.prompt },
        { "grammar", params.grammar },
        { "grammar_lazy", params.grammar_lazy },
        { "grammar_triggers", triggers },
        { "stops", params.additional_stops },
        { "preserved_tokens", params.preserved_tokens },
        { "generation_prompt", params.generation_prompt },
        { "thinking_start_tag", params.thinking_start_tag },
        { "thinking_end_tags", params.thinking_end_tags },
        { "format", (int) params.format },
        { "parser", params.parser },
        { "reasoning_format", (int) inputs.reasoning_format },
        { "parse_tool_calls", calls },
        { "is_continuation", continues },
    };
}

json render(mtp_chat * chat, json & request) {
    mtp::check_chat_request(request);
    check_parts(request.at("messages"));

    common_chat_templates_inputs inputs;
    inputs.messages         = common_chat_msgs_parse_oaicompat(request.at("messages"));
    inputs.tools            = common_chat_tools_parse_oaicompat(request.at("tools"));
    const json choice       = mtp::member(request, "tool_choice");
    inputs.tool_choice      = common_chat_tool_choice_parse_oaicompat(choice.is_string() ? choice.get<std::string>() : "auto");
    const json schema       = mtp::member(request, "json_schema");
    inputs.json_schema      = schema.is_null() ? "" : schema.dump();
    const json parallel     = mtp::member(request, "parallel_tool_calls");
    inputs.parallel_tool_calls = parallel.is_boolean()
                                     ? parallel.get<bool>()
                                     : common_chat_templates_get_caps(chat->templates.get())["supports_parallel_tool_calls"];
    const json format       = mtp::member(request, "reasoning_format");
    inputs.reasoning_format = common_reasoning_format_from_name(format.is_string() ? format.get<std::string>() : "deepseek");
    read_template_arguments(request, inputs);
    read_continuation(request, inputs);
    const auto params = mtp::render_chat(
        inputs, [&](const auto & given) { return common_chat_templates_apply(chat->templates.get(), given); });
    // As in llama-server, whose streams have a message that is continued because it is the last one.
    const bool continues = request.contains("continue_final_message") && inputs.continue_final_message != COMMON_CHAT_CONTINUATION_NONE;
    json rendered                = to_json(params, inputs, continues);
    rendered["dropped_messages"] = request.at("dropped_messages");
    return rendered;
}

// The tokens of a rendered conversation. Each of its pictures is a marker there; `media` says which one, and how many tokens each
// picture of the whole conversation has, of which the last ones remain.
size_t count_tokens(const llama_model * model, const std::string & prompt, const json & media) {
    size_t n = common_tokenize(llama_model_get_vocab(model), prompt, false, true).size();
    if (media.is_object()) {
        const std::string marker = media.at("marker").get<std::string>();
        size_t            end    = prompt.size();
        for (size_t i = media.at("tokens").size(); i > 0 && end > 0 && (end = prompt.rfind(marker, end - 1)) != std::string::npos; i--) {
            n += media.at("tokens").at(i - 1).get<size_t>();
        }
    }
    return n;
}

std::string random_id() {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    std::random_device random;
    std::string        id = "call_";
    for (int i = 0; i < 24; i++) {
        id += letters[random() % (sizeof(letters) - 1)];
    }
    return id;
}

json to_json(const common_chat_msg_diff & diff) {
    json delta = json::object();
    if (!diff.reasoning_content_delta.empty()) {
        delta["reasoning_content"] = diff.reasoning_content_delta;
    }
    if (!diff.content_delta.empty()) {
        delta["content"] = diff.content_delta;
    }
    if (diff.tool_call_index != std::string::npos) {
        json call{ { "index", diff.tool_call_index } };
        if (!diff.tool_call_delta.id.empty()) {
            call["id"]   = diff.tool_call_delta.id;
            call["type"] = "function";
        }
        json function{ { "arguments", diff.tool_call_delta.arguments } };
        if (!diff.tool_call_delta.name.empty()) {
            function["name"] = diff.tool_call_delta.name;
        }
        call["function"]    = function;
        delta["tool_calls"] = json::array({ call });
    }
    return delta;
}

// Names are streamed when the arguments begin, because until then more of a name may follow.
common_chat_msg without_unfinished_call(common_chat_msg message, bool is_last) {
    if (!is_last && !message.tool_calls.empty() && message.tool_calls.back().arguments.empty()) {
        message.tool_calls.pop_back();
    }
    return message;
}

void copy(const std::string & result, char * out, size_t capacity) {
    if (capacity <= result.size()) {
        throw std::invalid_argument("capacity: expected more than " + std::to_string(result.size()) + " bytes, found " +
                                    std::to_string(capacity));
    }
    std::memcpy(out, result.c_str(), result.size() + 1);
}

} // namespace

int32_t mtp_chat_api_version() {
    return MTP_CHAT_API_VERSION;
}

const char * mtp_chat_last_error() {
    return last_error().c_str();
}

mtp_chat_status mtp_chat_open(const char * source, const char * bos, const char * eos, mtp_chat ** out) {
    return guard(MTP_CHAT_ERROR_TEMPLATE, [&] {
        const jinja::limits::level within; // the limits are those of all that follows
        check_template(source);
        auto chat = std::make_unique<mtp_chat>();
        try {
            chat->templates = common_chat_templates_init(nullptr, source, bos, eos);
        } catch (const std::exception & error) {
            std::string found = error.what(); // the parser's errors have lost their text
            found             = found == "std::exception" ? "an error in it" : found.substr(0, found.find('\n')).substr(0, 200);
            throw std::invalid_argument("tokenizer.chat_template: expected a Jinja template that llama.cpp reads, found " + found);
        }
        *out = chat.release();
    });
}

void mtp_chat_close(mtp_chat * chat) {
    delete chat;
}

mtp_chat_status mtp_chat_render(mtp_chat * chat, const char * text, const llama_model * model, size_t n_ctx, size_t * size) {
    return guard(MTP_CHAT_ERROR_REQUEST, [&] {
        const jinja::limits::level within;
        json                       request = json::parse(text);
        mtp::drop_old_turns(request, n_ctx, [&](json given) {
            return count_tokens(model, render(chat, given).at("prompt").get<std::string>(), mtp::member(given, "media"));
        });
        chat->result = render(chat, request).dump();
        *size        = chat->result.size();
    });
}

mtp_chat_status mtp_chat_result(const mtp_chat * chat, char * out, size_t capacity) {
    return guard(MTP_CHAT_ERROR_REQUEST, [&] { copy(chat->result, out, capacity); });
}

mtp_chat_status mtp_chat_answer_open(const char * text, mtp_chat_answer ** out) {
    return guard(MTP_CHAT_ERROR_REQUEST, [&] {
        const json rendered      = json::parse(text);
        auto       answer        = std::make_unique<mtp_chat_answer>();
        auto &     parser        = answer->parser;
        parser.format            = (common_chat_format) rendered.at("format").get<int>();
        parser.reasoning_format  = (common_reasoning_format) rendered.at("reasoning_format").get<int>();
        parser.generation_prompt = rendered.at("generation_prompt").get<std::string>();
        parser.parse_tool_calls  = rendered.at("parse_tool_calls").get<bool>();
        const std::string saved  = rendered.at("parser").get<std::string>();
        if (!saved.empty()) {
            parser.parser.load(saved);
        }
        if (rendered.at("is_continuation").get<bool>()) { // what is continued is no part of the answer
            parser.is_continuation = true;
            answer->message        = common_chat_parse("", true, parser);
        }
        *out = answer.release();
    });
}

void mtp_chat_answer_close(mtp_chat_answer * answer) {
    delete answer;
}

mtp_chat_status mtp_chat_answer_add(mtp_chat_answer * answer, const char * text, size_t n, int is_last, size_t * size) {
    return guard(MTP_CHAT_ERROR_ANSWER, [&] {
        answer->text.append(text, n);
        auto message = without_unfinished_call(common_chat_parse(answer->text, !is_last, answer->parser), is_last != 0);
        json deltas  = json::array();
        if (!message.empty()) {
            message.set_tool_call_ids(answer->ids, random_id);
            for (const auto & diff : common_chat_msg_diff::compute_diffs(answer->message, message)) {
                deltas.push_back(to_json(diff));
            }
            answer->message = std::move(message);
        }
        answer->message.role = "assistant";
        answer->result       = json{ { "message", answer->message.to_json_oaicompat() }, { "deltas", deltas } }.dump_safe();
        *size                = answer->result.size();
    });
}

mtp_chat_status mtp_chat_answer_result(const mtp_chat_answer * answer, char * out, size_t capacity) {
    return guard(MTP_CHAT_ERROR_REQUEST, [&] { copy(answer->result, out, capacity); });
}
