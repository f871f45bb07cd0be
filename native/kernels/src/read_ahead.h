// Experts that are mapped from a file which the memory has no room for.

#pragma once

#include "operation.h"

namespace mtp {

// Asks the system to read the chosen experts of a MUL_MAT_ID all at once. Page faults would read them one after the other, with
// what lies around them. Does nothing where the variable MTP_GGUF_READ_AHEAD is 0, or where this thread, the first of those
// that compute, has not read from a disk lately.
void read_experts_ahead(const ggml_tensor * op, const int64_t * chosen, int64_t n_chosen);

}  // namespace mtp
