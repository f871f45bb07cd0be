#pragma once
// What llama-server's prompt cache keeps of a conversation, as bytes: the section `slot` of session files, and what files of
// /slots have behind llama.cpp's own format. patches/ includes this file in tools/server.
//
// The bytes have, each with its number of bytes before it, the states of the target, the draft context and the drafter, and
// then of each context checkpoint three numbers and its three states.
//
// A file of /slots ends, behind what llama.cpp writes, with these bytes without the state of the target, and 24 more: `mtpslot`
// and a zero, the number of the bytes (u64), their CRC-32 and a version, 1 (u32). llama.cpp ignores them.

#include "server-task.h"
#include "speculative.h"

#include <array>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace mtp {

// CRC-32 as zlib computes it, eight bytes at a time.
inline uint32_t crc32(const void * data, size_t size, uint32_t crc = 0) {
    static const auto table = [] {
        std::array<std::array<uint32_t, 256>, 8> of = {};
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t x = i;
            for (int bit = 0; bit < 8; bit++) {
                x = x >> 1 ^ (x & 1 ? 0xedb88320u : 0);
            }
            of[0][i] = x;
        }
        for (uint32_t i = 0; i < 256; i++) {
            for (int k = 1; k < 8; k++) {
                of[k][i] = of[k - 1][i] >> 8 ^ of[0][of[k - 1][i] & 255];
            }
        }
        return of;
    }();
    const uint8_t * p = (const uint8_t *) data;
    crc = ~crc;
    for (; size >= 8; size -= 8, p += 8) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + 4, 4);
        low ^= crc;
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
              table[3][high & 255] ^ table[2][high >> 8 & 255] ^ table[1][high >> 16 & 255] ^ table[0][high >> 24];
    }
    for (; size > 0; size--, p++) {
        crc = crc >> 8 ^ table[0][(crc ^ *p) & 255];
    }
    return ~crc;
}

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
inline void unpack_slot(const std::vector<uint8_t> & slot, server_prompt_cache_state & to) {
    const uint8_t *       p   = slot.data();
    const uint8_t * const end = p + slot.size();
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

struct SlotTrailer {
    char     magic[8] = { 'm', 't', 'p', 's', 'l', 'o', 't', 0 };
    uint64_t nbytes   = 0;
    uint32_t checksum = 0;
    uint32_t version  = 1;
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
    pack_slot(state, [&](const void * data, size_t size) {
        file.write((const char *) data, (std::streamsize) size);
        trailer.checksum = crc32(data, size, trailer.checksum);
        trailer.nbytes += size;
    });
    file.write((const char *) &trailer, sizeof(trailer));
    file.close();
    if (!file) {
        SRV_WRN("%s: the state of the drafter is not saved\n", path.c_str());
        return 0;
    }
    return trailer.nbytes + sizeof(trailer);
}

// Restores into a slot, whose target has been restored from the file's first `offset` bytes, what the file ends with. If it is
// damaged, or the file of another llama-server, the slot goes on without it.
template <typename Slot>
void restore_from_slot_file(const std::string & path, size_t offset, Slot & slot) {
    common_speculative_set_seq_state(slot.spec, slot.id, {});
    try {
        std::ifstream file(path, std::ios::binary | std::ios::ate);
        const uint64_t size = (uint64_t) file.tellg();
        SlotTrailer trailer;
        const SlotTrailer expected;
        if (size < offset + sizeof(trailer) || !file.seekg((std::streamoff) (size - sizeof(trailer))) ||
            !file.read((char *) &trailer, sizeof(trailer)) || memcmp(trailer.magic, expected.magic, sizeof(expected.magic))) {
            return;
        }
        if (trailer.version != expected.version || trailer.nbytes > size - sizeof(trailer) - offset) {
            throw std::runtime_error("expected version 1 and bytes within the file, found others");
        }
        std::vector<uint8_t> slot_bytes(trailer.nbytes);
        file.seekg((std::streamoff) (size - sizeof(trailer) - trailer.nbytes));
        if (!file.read((char *) slot_bytes.data(), (std::streamsize) slot_bytes.size()) ||
            crc32(slot_bytes.data(), slot_bytes.size()) != trailer.checksum) {
            throw std::runtime_error("expected another checksum; the file is damaged");
        }
        server_prompt_cache_state state;
        state.prompt.tokens = slot.prompt.tokens.clone();
        unpack_slot(slot_bytes, state);
        const auto & drft = state.data.drft;
        if (drft.empty() ? slot.ctx_dft != nullptr
                         : !slot.ctx_dft || llama_state_seq_set_data_ext(slot.ctx_dft, drft.data(), drft.size(), slot.id, 0) != drft.size()) {
            throw std::runtime_error("expected the state of this draft context, found another");
        }
        common_speculative_set_seq_state(slot.spec, slot.id, state.data.spec);
        if (!state.prompt.checkpoints.empty()) {
            slot.prompt.checkpoints = std::move(state.prompt.checkpoints);
        }
    } catch (const std::exception & error) {
        SRV_WRN("%s: only the target is restored: %s\n", path.c_str(), error.what());
    }
}

} // namespace mtp
