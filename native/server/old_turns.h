#pragma once
// `truncation: "auto"`, as in OpenAI's Responses: a chat that does not fit the context loses its oldest turns. patches/ includes
// this file in tools/server.

#include "chat_request.h"
#include "json.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace mtp {

// Whether old turns may be left out. The texts of a chat have to be all of it, because the tokens of pictures are not counted here.
inline bool may_drop_turns(const common_json & body) {
    const common_json given = member(body, "truncation");
    const std::string word  = given.is_string() ? given.get<std::string>() : "";
    if (given.is_null() || word == "disabled") {
        return false;
    }
    if (word != "auto") {
        refuse("truncation", R"("auto" or "disabled")", given);
    }
    const common_json messages = member(body, "messages");
    for (size_t i = 0; messages.is_array() && i < messages.size(); i++) {
        const common_json content = member(messages.at(i), "content");
        for (size_t j = 0; content.is_array() && j < content.size(); j++) {
            const common_json type = member(content.at(j), "type");
            if (type.is_string() && type.get<std::string>() != "text" && type.get<std::string>() != "refusal") {
                refuse("truncation", R"("disabled" for messages with pictures or sound)", given);
            }
        }
    }
    return true;
}

// The tokens that are kept free for the answer: as many as it may have, and at most a quarter of the context.
inline size_t room_for_answer(const common_json & body, size_t n_ctx) {
    for (const char * key : { "n_predict", "max_tokens", "max_completion_tokens" }) {
        const common_json given = member(body, key);
        if (given.is_number() && given.get<double>() >= 0) {
            return (size_t) std::min(given.get<double>(), n_ctx / 4.0);
        }
    }
    return n_ctx / 4;
}

// Remove the oldest turns from the messages of a request if they leave no room for the answer; say how many messages these were in
// `dropped_messages`. A turn is a message of the user with all that follows up to the next one; the last turn and the system
// messages at the beginning stay. size(request) is its number of tokens.
//
// The turns that are removed make up a multiple of a quarter of the room for messages. So the next requests of the same chat lose
// the same ones, and what remains is in the cache, until another quarter is full.
template <typename Size> void drop_old_turns(common_json & body, size_t n_ctx, const Size & size) {
    body["dropped_messages"] = 0; // not what the client says
    if (!may_drop_turns(body)) {
        return;
    }
    const size_t most  = n_ctx - room_for_answer(body, n_ctx);
    const size_t total = size(body);
    if (total <= most) {
        return;
    }
    const common_json messages = body.at("messages");
    const auto        role     = [&](size_t i) { return messages.at(i).at("role").template get<std::string>(); };
    size_t            first    = 0;
    while (first < messages.size() && (role(first) == "system" || role(first) == "developer")) {
        first++;
    }
    std::vector<size_t> turns = { first };
    for (size_t i = first + 1; i < messages.size(); i++) {
        if (role(i) == "user" && role(i - 1) != "user") {
            turns.push_back(i);
        }
    }
    const auto without = [&](size_t n_turns) {
        common_json fewer = common_json::array();
        for (size_t i = 0; i < messages.size(); i++) {
            if (i < first || i >= turns[n_turns]) {
                fewer.push_back(messages.at(i));
            }
        }
        common_json request = body;
        request["messages"] = fewer;
        return request;
    };
    const size_t step   = std::max<size_t>(most / 4, 1);
    const size_t excess = (total - most + step - 1) / step * step;
    size_t       least = 0, enough = turns.size() - 1; // turns to remove: more than `least`, at most `enough`
    while (least + 1 < enough) {
        const size_t middle = (least + enough) / 2;
        (size(without(middle)) + excess <= total ? enough : least) = middle;
    }
    if (enough > 0) {
        body                     = without(enough);
        body["dropped_messages"] = turns[enough] - first;
    }
}

// Say in a complete answer, or in the last part of a stream, how many messages were left out.
template <typename Json> Json say_dropped(size_t n_messages, Json answer) {
    if (n_messages > 0) {
        Json & last = answer.is_array() ? answer.back() : answer;
        Json & data = last.contains("data") ? last.at("data") : last;
        (data.contains("response") ? data.at("response") : data)["dropped_messages"] = n_messages;
    }
    return answer;
}

} // namespace mtp
