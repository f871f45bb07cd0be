// The tables of magnitudes of iq2 and iq3 types, which are part of ggml and not repeated here.

#pragma once

#include "ggml_abi.h"

#include <cstdint>

namespace mtp {

struct grid_tables {
    uint32_t iq3_xxs[256], iq3_s[512];                // four elements each, the first in the lowest byte
    uint64_t iq2_xxs[256], iq2_xs[512], iq2_s[1024];  // eight
};

extern grid_tables grids;

// Whether a type's elements are looked up in one of these tables; its blocks begin with their d, and any bytes are a block.
bool has_grid(ggml_type type);

// Finds out what ggml makes of each number, by its own conversion to floats. A type that this ggml lacks has zeros.
void read_grids();

}  // namespace mtp
