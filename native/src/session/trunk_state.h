#pragma once
// Validation of a sequence state that llama.cpp has written, before llama.cpp reads it again.
//
// llama_state_seq_set_data checks types and sizes, but trusts positions and counts and aborts the process
// if they contradict each other. The layout is that of llama_kv_cache::state_write and
// llama_memory_recurrent::state_write, up to version 4 of llama.cpp's sequence files:
//
//   u32 magic, i32 sequence
//   for each cache (a second one of the layers with a window, whose cells are those of the last positions):
//   u32 streams; for each: u32 cells; if there are any:
//     for each cell: i32 position, u32 sequences = 1, with M-RoPE i32 x, i32 y, i32 token; i32 sequence
//     u32 values transposed, u32 layers; from version 4 on u32 and u32, how keys and values are rotated
//     keys of each layer: i32 type, u64 bytes of a row, rows
//     values of each layer: the same; transposed: i32 type, u32 bytes of an element, u32 width, data
//   of hybrid models: u32 recurrent cells = 1: i32 position, u32 sequences = 0; the rest contains no counts
//
// The state of the recurrent part alone (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) is the same without the caches.

// A checkpoint holds a single stream, the one with the cells; contexts may have several.

#include "bytes.h"

#include <cstdint>
#include <vector>

namespace mtp {

// The versions of llama.cpp's sequence files whose layout is known, and the first one with rotations.
constexpr uint32_t FIRST_STATE_VERSION = 2;
constexpr uint32_t ROTATIONS_STATE_VERSION = 4;
constexpr uint32_t LAST_STATE_VERSION = 4;

// What the layout depends on.
struct StateLayout {
    enum Memory : uint32_t { ATTENTION, HYBRID, WINDOWED, N_MEMORIES };

    bool mrope = false;        // positions run in three dimensions
    Memory memory = ATTENTION; // HYBRID: and recurrent; WINDOWED: some layers see a window only
    bool rotations = false;    // it says how keys and values are rotated

    bool operator==(const StateLayout & other) const {
        return mrope == other.mrope && memory == other.memory && rotations == other.rotations;
    }
};

// Converts llama.cpp's state of a sequence of `length` tokens to one with a single stream.
std::vector<uint8_t> to_one_stream(const Blob & state, int64_t length, StateLayout layout);

// Throws MTP_ERROR_FORMAT unless `state` is the state of a sequence of `length` tokens in this layout, with a
// single stream.
void check_trunk_state(const Blob & state, int64_t length, StateLayout layout);

// The same for the state of the recurrent part alone.
void check_recurrent_state(const Blob & state, int64_t length);

// Converts a checked state to one for a context with `streams` streams.
std::vector<uint8_t> to_streams(const Blob & state, int64_t length, StateLayout layout, uint32_t streams);

// Returns the number of streams in a state that llama.cpp has written.
uint32_t count_streams(const Blob & state);

} // namespace mtp
