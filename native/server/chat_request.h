#pragma once
// What is wrong with a client's chat request, in one sentence with the place, instead of an error of the JSON library or of the
// chat template. The checks throw std::invalid_argument, a response 400. patches/ includes this file in tools/server.

#include "chat.h"
#include "json.h"

#include <exception>
#include <stdexcept>
#include <string>

namespace mtp {

[[noreturn]] inline void refuse(const std::string & where, const std::string & expected, const std::string & found) {
    throw std::invalid_argument(where + ": expected " + expected + ", found " + found);
}

[[noreturn]] inline void refuse(const std::string & where, const std::string & expected, const common_json & found) {
    refuse(where, expected, found.dump_safe().substr(0, 80));
}

inline common_json member(const common_json & object, const std::string & key) {
    return object.is_object() && object.contains(key) ? object.at(key) : common_json(nullptr);
}

inline std::string element(const std::string & where, size_t i) {
    return where + "[" + std::to_string(i) + "]";
}

// A member that may be missing. One that is null is as good as missing.
inline void check_optional(const std::string & where, common_json & object, const char * key, bool (common_json::*is_right)() const,
                           const char * expected) {
    const common_json value = member(object, key);
    if (value.is_null()) {
        if (object.is_object()) {
            object.erase(key);
        }
    } else if (!(value.*is_right)()) {
        refuse(where.empty() ? key : where + "." + key, expected, value);
    }
}

// The calls of an assistant's message. Arguments that are missing or empty are those of a call without arguments.
inline void check_tool_calls(const std::string & where, common_json & calls) {
    if (!calls.is_array()) {
        refuse(where, "a list of calls", calls);
    }
    for (size_t i = 0; i < calls.size(); i++) {
        common_json & call = calls.at(i);
        if (!member(member(call, "function"), "name").is_string()) {
            refuse(element(where, i), "a function with a name", call);
        }
        check_optional(element(where, i), call, "id", &common_json::is_string, "text");
        call["type"]             = "function";
        common_json & function   = call["function"];
        const common_json given  = member(function, "arguments");
        common_json arguments    = given;
        if (given.is_null() || (given.is_string() && given.get<std::string>().empty())) {
            function["arguments"] = "{}";
            continue;
        }
        if (given.is_string()) {
            try {
                arguments = common_json::parse(given.get<std::string>());
            } catch (const common_json_error &) {
                arguments = nullptr;
            }
        }
        if (!arguments.is_object()) {
            refuse(element(where, i) + ".function.arguments", "a JSON object", given);
        }
    }
}

// A content that is missing is an empty one; a refusal is the text of an assistant.
inline void check_content(const std::string & where, common_json & content) {
    if (content.is_null() || content.is_string()) {
        return;
    }
    if (!content.is_array()) {
        refuse(where, "text or a list of parts", content);
    }
    for (size_t i = 0; i < content.size(); i++) {
        common_json &     part = content.at(i);
        const common_json type = member(part, "type");
        if (type.is_string() && type.get<std::string>() == "refusal") {
            part["type"] = "text";
            part["text"] = member(part, "refusal");
        }
        if (member(part, "type").is_string() && member(part, "type").get<std::string>() == "text") {
            if (!member(part, "text").is_string()) {
                refuse(element(where, i) + ".text", "text", member(part, "text"));
            }
        } else if (!type.is_string() || (type.get<std::string>() != "image_url" && type.get<std::string>() != "input_audio" &&
                                         type.get<std::string>() != "input_video" && type.get<std::string>() != "video_url")) {
            refuse(element(where, i), "a part of type text, image_url, input_audio or input_video", type.is_null() ? part : type);
        }
    }
}

// What clients leave out of a tool is completed. A function by name as the choice becomes the only tool, which must be called.
inline void check_tools(common_json & body) {
    if (!member(body, "tools").is_array() && !member(body, "tools").is_null()) {
        refuse("tools", "a list of tools", body.at("tools"));
    }
    common_json &     tools  = body["tools"];
    const common_json choice = member(body, "tool_choice");
    const common_json chosen = member(member(choice, "function"), "name");
    common_json       called = common_json::array();
    std::string       names;
    for (size_t i = 0; i < tools.size(); i++) {
        common_json &     tool  = tools.at(i);
        const std::string where = element("tools", i);
        const common_json name  = member(member(tool, "function"), "name");
        if (!name.is_string()) {
            refuse(where, "a function with a name", tool);
        }
        tool["type"]           = "function";
        common_json & function = tool["function"];
        check_optional(where + ".function", function, "description", &common_json::is_string, "text");
        check_optional(where + ".function", function, "parameters", &common_json::is_object, "a JSON schema");
        names += (names.empty() ? "" : ", ") + name.get<std::string>();
        if (chosen.is_string() && chosen.get<std::string>() == name.get<std::string>()) {
            called.push_back(tool);
        }
    }
    const std::string word = choice.is_string() ? choice.get<std::string>() : "";
    if (!called.empty()) {
        body["tools"]       = called;
        body["tool_choice"] = "required";
    } else if (!choice.is_null() && word != "none" && word != "auto" && (word != "required" || names.empty())) {
        refuse("tool_choice", R"("none", "auto", "required" or one of the tools ()" + (names.empty() ? "there are none" : names) + ")",
               choice);
    }
}

// What is sampled from.
inline void check_sampling(common_json & body) {
    for (const char * key : { "temperature", "top_p", "min_p", "typical_p", "top_k", "presence_penalty", "frequency_penalty",
                              "repeat_penalty", "seed", "max_tokens", "max_completion_tokens", "reasoning_budget_tokens" }) {
        check_optional("", body, key, &common_json::is_number, "a number");
    }
    for (const char * key : { "max_tokens", "max_completion_tokens", "reasoning_budget_tokens" }) {
        const common_json most = member(body, key);
        if (most.is_number() && !(most.get<double>() >= -1 && most.get<double>() < 2147483648.0)) {
            refuse(key, "a number of tokens, or -1 for no limit", most);
        }
    }
    const common_json penalty = member(body, "repeat_penalty");
    if (penalty.is_number() && !(penalty.get<double>() > 0)) {
        refuse("repeat_penalty", "a number above 0", penalty);
    }
    const common_json logprobs = member(body, "logprobs");
    if (!logprobs.is_null() && !logprobs.is_boolean() && !logprobs.is_number()) {
        refuse("logprobs", "true or false", logprobs);
    }
    const common_json top = member(body, "top_logprobs");
    if (!top.is_null() && (!top.is_number() || (logprobs.is_boolean() && !logprobs.get<bool>()) || logprobs.is_null())) {
        refuse("top_logprobs", "a number, and logprobs of true beside it", top);
    }
    if (top.is_number() && top.get<double>() < 0) {
        refuse("top_logprobs", "0 or more", top);
    }
    if (top.is_number() && top.get<double>() < 1) {
        body["top_logprobs"] = 1; // with 0 llama.cpp would not even give the log-probabilities of the tokens themselves
    }
    const common_json bias  = member(body, "logit_bias");
    const auto        right = [](const common_json & value) { return value.is_number() || value.is_boolean(); };
    bool              all   = bias.is_null() || bias.is_object() || bias.is_array();
    if (bias.is_object()) {
        for (const auto & item : bias.items()) {
            all = all && right(item.value());
        }
    }
    for (size_t i = 0; bias.is_array() && i < bias.size(); i++) { // llama.cpp's form
        const common_json pair = bias.at(i);
        all = all && pair.is_array() && pair.size() == 2 && (pair.at(0).is_number() || pair.at(0).is_string()) && right(pair.at(1));
    }
    if (!all) {
        refuse("logit_bias", "numbers by token", bias);
    }
}

// A format that is not one would be ignored, and the client would take any text for an answer in it.
inline void check_response_format(common_json & body) {
    check_optional("", body, "response_format", &common_json::is_object, "an object");
    const common_json format = member(body, "response_format");
    const common_json type   = member(format, "type");
    const std::string word   = type.is_string() ? type.get<std::string>() : "";
    const bool        named  = word == "text" || word == "json_object" || word == "json_schema";
    if (!format.is_null() && (!named || (word == "json_schema" && !member(format, "json_schema").is_object()))) {
        refuse("response_format", "type text, json_object, or json_schema with an object `json_schema`", format);
    }
}

// Options whose mistakes llama.cpp would pass over, or answer as its own.
inline void check_options(common_json & body) {
    check_optional("", body, "chat_template_kwargs", &common_json::is_object, "an object");
    check_optional("", body, "reasoning_effort", &common_json::is_string, "text");
    check_optional("", body, "reasoning_format", &common_json::is_string, "text");
    check_optional("", body, "reasoning_budget_message", &common_json::is_string, "text");
    check_optional("", body, "stream", &common_json::is_boolean, "true or false");
    common_json arguments = member(body, "chat_template_kwargs");
    check_optional("chat_template_kwargs", arguments, "enable_thinking", &common_json::is_boolean, "true or false");
    const common_json format = member(body, "reasoning_format");
    try {
        common_reasoning_format_from_name(format.is_null() ? "none" : format.get<std::string>());
    } catch (const std::exception &) {
        refuse("reasoning_format", "none, auto, deepseek or deepseek-legacy", format);
    }
    const common_json last = member(body, "continue_final_message");
    const std::string part = last.is_string() ? last.get<std::string>() : "";
    if (!last.is_null() && !last.is_boolean() && part != "content" && part != "reasoning_content") {
        refuse("continue_final_message", "true, false, content or reasoning_content", last);
    }
    const common_json answer = member(body, "response_format");
    for (const common_json & schema : { member(body, "json_schema"), member(answer, "schema"), member(member(answer, "json_schema"), "schema") }) {
        if (!schema.is_null() && !schema.is_object() && !schema.is_boolean()) {
            refuse("response_format", "a JSON schema that is an object", schema);
        }
    }
    const common_json stop  = member(body, "stop");
    bool              texts = stop.is_null() || stop.is_string() || stop.is_array();
    for (size_t i = 0; stop.is_array() && i < stop.size(); i++) {
        texts = texts && stop.at(i).is_string();
    }
    if (!texts) {
        refuse("stop", "text or a list of texts", stop);
    }
}

// Check what is read of a request to /v1/chat/completions, and complete what clients leave out.
inline void check_chat_request(common_json & body) {
    if (!member(body, "messages").is_array() || body.at("messages").empty()) {
        refuse("messages", "a list of messages", member(body, "messages"));
    }
    common_json & messages = body["messages"];
    for (size_t i = 0; i < messages.size(); i++) {
        common_json &     message = messages.at(i);
        const std::string where   = element("messages", i);
        if (!member(message, "role").is_string()) {
            refuse(where, "an object with a role", message);
        }
        if (!message.contains("content")) {
            message["content"] = nullptr;
        }
        check_content(where + ".content", message["content"]);
        if (member(message, "tool_calls").is_null()) {
            message.erase("tool_calls");
        } else {
            check_tool_calls(where + ".tool_calls", message["tool_calls"]);
        }
        for (const char * key : { "name", "tool_call_id", "reasoning_content" }) {
            check_optional(where, message, key, &common_json::is_string, "text");
        }
    }
    check_tools(body);
    check_sampling(body);
    check_response_format(body);
    check_options(body);
}

// What a template says, without the place in it.
inline std::string said_by_template(const std::string & error) {
    static const std::string mark = "\nError: ", raised = "Jinja Exception: ";
    const size_t at = error.rfind(mark);
    if (at == std::string::npos) {
        return error;
    }
    const std::string last = error.substr(at + mark.size());
    return last.rfind(raised, 0) == 0 ? last.substr(raised.size()) : "an error in the template";
}

// render(inputs), a chat in its template. If that fails, the error names the message without which it would not.
template <typename Render>
auto render_chat(const common_chat_templates_inputs & inputs, const Render & render) {
    std::string error;
    try {
        return render(inputs);
    } catch (const std::exception & e) {
        error = e.what();
    }
    const std::string says = said_by_template(error);
    if (says == error) { // not the template's, but of a schema
        throw std::invalid_argument(error);
    }
    auto   fewer = inputs;
    size_t n     = 0;
    for (bool found = false; !found && ++n < inputs.messages.size();) {
        fewer.messages.assign(inputs.messages.begin(), inputs.messages.begin() + n);
        try {
            render(fewer);
        } catch (const std::exception & e) {
            found = said_by_template(e.what()) == says;
        }
    }
    refuse(n == 1 ? "messages" : element("messages", n - 1), "what the model's chat template can render", says);
}

} // namespace mtp
