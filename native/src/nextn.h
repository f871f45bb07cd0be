#pragma once
// llama.cpp's functions for the hidden states that the MTP block takes, looked up at run time.
//
// Before llama.cpp 1.0 they are C++ functions of a staging header that is not installed
// (src/llama-ext.h); 1.0 exports them from llama.h under their C names. Either is taken.

#include "llama.h"

namespace mtp {

struct Nextn {
    // Whether the context outputs hidden states: of all tokens of a batch, or if masked only of those
    // with logits.
    void (*set)(llama_context * context, bool value, bool masked);
    // The hidden states of the last decode, NULL if there are none.
    float * (*get)(llama_context * context);
};

// Throws MTP_ERROR_BACKEND if the loaded llama.cpp lacks one of them.
const Nextn & nextn();

} // namespace mtp
