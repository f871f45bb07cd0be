#pragma once
// Says why a request does not reuse all of its prompt (cache_miss.h). patches/ includes this file in tools/server.

#include "cache_miss.h"
#include "session_folder.h"

namespace mtp {

// Notes the part of a slot's prompt that its request overwrites, if nobody else has it.
template <typename Slot> void note_lost(const Slot & slot, server_prompt_cache * cache, size_t n_past) {
    const server_tokens & tokens = slot.prompt.tokens;
    if (!cache || tokens.size() < n_past + SessionFolder::least_tokens) {
        return;
    }
    for (const auto & state : cache->states) {
        if (state.prompt.tokens.get_common_prefix(tokens) == tokens.size()) {
            return;
        }
    }
    cache->note_removed(tokens.clone());
}

// What explains best that a slot's request reuses its first n_past tokens only. Called while the slot's prompt is still whole.
template <typename Slot, typename Slots>
CacheMiss explain_miss(const Slot & slot, const Slots & slots, const server_prompt_cache * cache, size_t n_past) {
    const server_tokens & tokens = slot.task->tokens;
    const size_t n_kept = slot.prompt.tokens.size();
    const size_t common = slot.prompt.tokens.get_common_prefix(tokens);
    if (n_past + 1 >= tokens.size()) { // the last token is always read
        return {};
    }
    if (!slot.task->params.cache_prompt || !slot.can_split()) {
        return { "request", common, "the request asks for none, as embeddings and \"cache_prompt\": false do" };
    }
    CacheMiss miss;
    const auto consider = [&](size_t shared, const char * reason, const std::string & message) {
        if (shared > std::max({ common, n_past, (size_t) miss.shared })) {
            miss = { reason, shared, message };
        }
    };
    for (const auto & other : slots) {
        if (other.id != slot.id) {
            consider(other.prompt.tokens.get_common_prefix(tokens), other.is_processing() ? "busy" : "share",
                     string_format("slot %d has more of it, but %s", other.id,
                                   other.is_processing() ? "is busy" : slot.task->id_slot >= 0 ? "another one was asked for" : "too little to be taken"));
        }
    }
    if (cache) {
        for (const auto & state : cache->states) {
            consider(state.prompt.tokens.get_common_prefix(tokens), "share",
                     string_format("a conversation of %zu tokens in memory has more of it, but too little to be taken", state.prompt.tokens.size()));
        }
        for (const auto & removed : cache->removed) {
            consider(removed.get_common_prefix(tokens), "evicted",
                     string_format("a conversation of %zu tokens that has more of it was removed from memory to make room", removed.size()));
        }
    }
    std::string unreadable;
    if (cache && cache->sessions) {
        unreadable = cache->sessions->explain(tokens, consider);
    }
    if (!miss.reason.empty()) {
        return miss;
    }
    if (n_past < common) {
        return { "checkpoint", common, string_format("%zu tokens are the same, but the model can only go on from token %zu", common, n_past) };
    }
    if (common < SessionFolder::least_tokens && !unreadable.empty()) {
        return { "unreadable", common, unreadable };
    }
    if (common == 0) {
        if (cache && cache->sessions && tokens.size() < SessionFolder::least_tokens) {
            return { "short", 0, string_format("nothing in memory begins like it, and fewer than %zu tokens are not kept in files", SessionFolder::least_tokens) };
        }
        return { "nothing", 0, std::string("nothing that is kept begins like it") + (cache ? "" : "; --cache-ram 0 keeps only what the slots have") };
    }
    if (common < n_kept) {
        return { "parted", common, string_format("the text parts from the one that was kept at token %zu", common) };
    }
    return { "new", common, string_format("the text that was kept ends at token %zu, and the rest is new", common) };
}

} // namespace mtp
