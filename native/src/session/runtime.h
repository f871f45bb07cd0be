#pragma once
// What is known of the llama.cpp that this process has loaded.

#include "llama.h"

#include <cstdint>

namespace mtp {

// The version of the sequence files that the loaded llama.cpp writes (LLAMA_STATE_SEQ_VERSION); 0 if it cannot be
// found out. Its first call for another llama.cpp than the one that the library was built for writes a file with
// the last sequence of the context, so it should be empty.
uint32_t state_version(llama_context * context);

} // namespace mtp
