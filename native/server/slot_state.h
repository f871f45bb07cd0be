#pragma once
// What llama-server's prompt cache keeps of a conversation, as bytes: the section `slot` of session files, and what files of
// /slots have behind llama.cpp's own format. patches/ includes this file in tools/server.
//
// The bytes have, each with its number of bytes before it, the states of the target, the draft context and the drafter, and
// then of each context checkpoint three numbers and its three states.
//
// A file of /slots ends, behind what llama.cpp writes, with these bytes without the state of the target, and 24 more: `mtpslot`
// and a zero, the number of the bytes (u64), their CRC-32 and a version (u32). llama.cpp ignores them. The version is 1, or 2 if
// the bytes begin with the number of the conversation's owner (api_key.h), which is not 0.

#include "../src/crc32.h"
#include "server-task.h"
#include "speculative.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace mtp {

// Hands the bytes of a conversation to `sink`, part by part.
template <typename Sink>
void pack_slot(const server_prompt_cache_state & state, Sink && sink) {
    const auto put = [&](const std::vector<uint8_t> & data) {
        const uint64_t size = data.size();
        sink(&size, sizeof(size));
        sink(data.data(), data.size());
    };
    put(state.data.main);
    put(state.data.drft);
    put(state.data.spec);
    for (const auto & at : state.prompt.checkpoints) {
        const int64_t numbers[3] = { at.n_tokens, at.pos_min, at.pos_max };
        sink(numbers, sizeof(numbers));
        put(at.data_tgt);
        put(at.data_dft);
        put(at.data_spec);
    }
}

// The other way, into a state that has its tokens. Throws if the bytes are not those of such a conversation.
inline void unpack_slot(const uint8_t * p, size_t nbytes, server_prompt_cache_state & to) {
    const uint8_t * const end = p + nbytes;
    const auto take = [&](void * out, size_t size) {
        if ((size_t) (end - p) < size) {
            throw std::runtime_error("slot: expected more bytes, found its end");
        }
        memcpy(out, p, size);
        p += size;
    };
    const auto bytes = [&] {
        uint64_t size = 0;
        take(&size, sizeof(size));
        if (size > (uint64_t) (end - p)) {
            throw std::runtime_error("slot: expected more bytes, found its end");
        }
        std::vector<uint8_t> found(p, p + size);
        p += size;
        return found;
    };
    to.data.main = bytes();
    to.data.drft = bytes();
    to.data.spec = bytes();
    while (p < end) {
        int64_t numbers[3];
        take(numbers, sizeof(numbers));
        common_prompt_checkpoint at;
        at.update_pos(numbers[0], (llama_pos) numbers[1], (llama_pos) numbers[2]);
        at.data_tgt  = bytes();
        at.data_dft  = bytes();
        at.data_spec = bytes();
        if (at.n_tokens < 0 || at.n_tokens > (int64_t) to.prompt.tokens.size()) {
            throw std::runtime_error("slot: expected a checkpoint within the tokens, found another");
        }
        to.prompt.checkpoints.push_back(std::move(at));
    }
}

// A copy of a slot's conversation; false if it has none.
template <typename Slot>
bool copy_slot(const Slot & slot, server_prompt_cache_state & to) {
    server_prompt_cache alone(/* no limit */ 0, 0);
    if (!slot.prompt_save(alone)) {
        return false;
    }
    to = std::move(alone.states.front());
    return true;
}

// Files of /slots ---------------------------------------------------------------------------------------------------------

// Whether a task of /slots would save or erase what requests with another API key have computed.
template <typename Slots>
bool asks_for_slot_of_another_key(const server_task & task, const Slots & slots) {
    if (task.type != SERVER_TASK_TYPE_SLOT_SAVE && task.type != SERVER_TASK_TYPE_SLOT_ERASE) {
        return false;
    }
    for (const auto & slot : slots) {
        if (slot.id == task.slot_action.id_slot) {
            // a task for a busy slot waits, and is asked again
            return !slot.is_processing() && !slot.prompt.tokens.empty() && slot.prompt.tokens.owner != task.tokens.owner;
        }
    }
    return false;
}

// Whether a task of /slots names something else than a file: a pipe would hold up all slots, and a device may have no end.
inline bool asks_for_no_file(const server_task & task) {
    if (task.type != SERVER_TASK_TYPE_SLOT_SAVE && task.type != SERVER_TASK_TYPE_SLOT_RESTORE) {
        return false;
    }
    std::error_code error;
    const auto type = std::filesystem::status(std::filesystem::u8path(task.slot_action.filepath), error).type();
    return type != std::filesystem::file_type::regular && type != std::filesystem::file_type::not_found;
}

struct SlotTrailer {
    char     magic[8] = { 'm', 't', 'p', 's', 'l', 'o', 't', 0 };
    uint64_t nbytes   = 0;
    uint32_t checksum = 0;
    uint32_t version  = without_owner;

    static constexpr uint32_t without_owner = 1, with_owner = 2;
};

// Appends to the file that llama.cpp has written for a slot what its format lacks, which in older versions includes the
// context checkpoints. Returns the number of bytes; 0 if that fails, and the file then is one of llama.cpp's.
template <typename Slot>
size_t append_to_slot_file(const std::string & path, const Slot & slot, bool with_checkpoints) {
    server_prompt_cache_state state;
    if (!copy_slot(slot, state)) {
        return 0;
    }
    state.data.main.clear(); // is in the file
    if (!with_checkpoints) {
        state.prompt.checkpoints.clear();
    }
    SlotTrailer trailer;
    std::ofstream file(path, std::ios::binary | std::ios::app);
    const auto append = [&](const void * data, size_t size) {
        file.write((const char *) data, (std::streamsize) size);
        trailer.checksum = crc32(data, size, trailer.checksum);
        trailer.nbytes += size;
    };
    const uint64_t owner = slot.prompt.tokens.owner;
    if (owner != 0) {
        append(&owner, sizeof(owner));
        trailer.version = SlotTrailer::with_owner;
    }
    pack_slot(state, append);
    file.write((const char *) &trailer, sizeof(trailer));
    file.close();
    if (!file) {
        SRV_WRN("%s: the state of the drafter is not saved\n", path.c_str());
        return 0;
    }
    return trailer.nbytes + sizeof(trailer);
}

// What the file of a slot has behind its first `offset` bytes, and whose conversation it is; nothing, and everybody's, in the file
// of another llama-server. Throws if it is damaged.
inline std::vector<uint8_t> read_slot_trailer(const std::string & path, size_t offset, uint64_t & owner) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    const uint64_t size = (uint64_t) file.tellg();
    SlotTrailer trailer;
    const SlotTrailer expected;
    if (size < offset + sizeof(trailer) || !file.seekg((std::streamoff) (size - sizeof(trailer))) ||
        !file.read((char *) &trailer, sizeof(trailer)) || memcmp(trailer.magic, expected.magic, sizeof(expected.magic))) {
        return {};
    }
    const size_t start = trailer.version == SlotTrailer::with_owner ? sizeof(owner) : 0;
    if ((trailer.version != SlotTrailer::without_owner && start == 0) || trailer.nbytes > size - sizeof(trailer) - offset ||
        trailer.nbytes < start) {
        throw std::runtime_error("expected version 1 or 2 and bytes within the file, found others");
    }
    std::vector<uint8_t> bytes(trailer.nbytes);
    file.seekg((std::streamoff) (size - sizeof(trailer) - trailer.nbytes));
    if (!file.read((char *) bytes.data(), (std::streamsize) bytes.size()) || crc32(bytes.data(), bytes.size()) != trailer.checksum) {
        throw std::runtime_error("expected another checksum; the file is damaged");
    }
    memcpy(&owner, bytes.data(), start);
    bytes.erase(bytes.begin(), bytes.begin() + (std::ptrdiff_t) start);
    return bytes;
}

// Restores into a slot, whose target has been restored from the file's first `offset` bytes, what the file ends with. If it is
// damaged, or the file of another llama-server, the slot goes on without it. Throws if the file is not of this owner.
template <typename Slot>
void restore_from_slot_file(const std::string & path, size_t offset, Slot & slot, uint64_t owner) {
    common_speculative_set_seq_state(slot.spec, slot.id, {});
    uint64_t saved_by = 0;
    try {
        const std::vector<uint8_t> slot_bytes = read_slot_trailer(path, offset, saved_by);
        if (!slot_bytes.empty() && saved_by == owner) {
            server_prompt_cache_state state;
            state.prompt.tokens = slot.prompt.tokens.clone();
            unpack_slot(slot_bytes.data(), slot_bytes.size(), state);
            const auto & drft = state.data.drft;
            if (drft.empty() ? slot.ctx_dft != nullptr
                             : !slot.ctx_dft || llama_state_seq_set_data_ext(slot.ctx_dft, drft.data(), drft.size(), slot.id, 0) != drft.size()) {
                throw std::runtime_error("expected the state of this draft context, found another");
            }
            common_speculative_set_seq_state(slot.spec, slot.id, state.data.spec);
            if (!state.prompt.checkpoints.empty()) {
                slot.prompt.checkpoints = std::move(state.prompt.checkpoints);
            }
        }
    } catch (const std::exception & error) {
        SRV_WRN("%s: only the target is restored: %s\n", path.c_str(), error.what());
    }
    if (saved_by != owner) {
        throw std::runtime_error("expected a file that was saved with this API key, found another");
    }
    slot.prompt.tokens.owner = owner;
}

} // namespace mtp
