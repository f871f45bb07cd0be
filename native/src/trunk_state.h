#pragma once
// What llama.cpp wrote of a sequence, checked before llama.cpp reads it again.
//
// llama_state_seq_set_data compares types and sizes itself, but it takes positions and counts on
// trust and aborts the process where they contradict each other. The layout is that of the llama.cpp
// this library was built for (llama_kv_cache::state_write and llama_memory_recurrent::state_write):
//
//   u32 magic, i32 sequence
//   u32 streams; for each: u32 cells; where there are any:
//     for each cell: i32 position, u32 sequences = 1, i32 x, i32 y, i32 token, i32 sequence
//     u32 values transposed, u32 layers
//     keys of each layer: i32 type, u64 bytes of a row, rows
//     values of each layer: the same; transposed: i32 type, u32 bytes of an element, u32 width, data
//   u32 recurrent cells = 1: i32 position, u32 sequences = 0; the rest holds no count

// A checkpoint keeps one stream, the one with the cells; a context has as many as it likes.

#include <cstdint>
#include <vector>

namespace mtp {

// From llama.cpp's bytes for a sequence of `length` tokens to those with one stream.
std::vector<uint8_t> to_one_stream(const std::vector<uint8_t> & state, int64_t length);

// MTP_ERROR_FORMAT unless `state` is that of a sequence of `length` tokens of a hybrid model, in one
// stream.
void check_trunk_state(const std::vector<uint8_t> & state, int64_t length);

// From checked bytes to those for a context with so many streams.
std::vector<uint8_t> to_streams(const std::vector<uint8_t> & state, int64_t length, uint32_t streams);

// The number of streams in what llama.cpp wrote.
uint32_t count_streams(const std::vector<uint8_t> & state);

} // namespace mtp
