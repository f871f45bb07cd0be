#pragma once
// What a choice of depths has learned, kept in a file for the next process that runs the same model.

#include "depth/depth.h"

#include <cstdint>
#include <string>

namespace mtp {

// The choice goes on as the one that was kept at `path` (UTF-8), if that is a file that write_depth_file wrote for a head with
// this fingerprint; with its costs if they were measured on `machine`. Anything else there is ignored: it can only cost time.
void read_depth_file(const std::string & path, uint64_t machine, uint64_t head, Depth & depth);

// Replaces the file, and makes its folder. Nothing happens if it cannot be written.
void write_depth_file(const std::string & path, uint64_t machine, uint64_t head, const Depth & depth);

} // namespace mtp
