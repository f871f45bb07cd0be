#pragma once
// Functions that not every llama.cpp has, looked up at run time: upstream's for the hidden states that the MTP
// block takes, and those of patches/.
//
// This file has all functions of src/llama-ext.h that libmtp uses. Before llama.cpp 1.0 that is a staging header,
// which is not installed, and upstream's functions have C++ names. 1.0 has moved them to llama.h. Either name is
// taken:
//
//   src/llama-ext.h              llama.h of 1.0
//   llama_set_embeddings_nextn   the same
//   llama_get_embeddings_nextn   the same
//
// Those of patches/ have C names, which no version of upstream has.

#include "llama.h"

namespace mtp {

// A function of the loaded llama.cpp or ggml; NULL if there is none of this name.
void * exported(const char * name);

struct Nextn {
    // Whether the context outputs hidden states: of all tokens of a batch, or if masked only of those
    // with logits.
    void (*set)(llama_context * context, bool value, bool masked);
    // The hidden states of the last decode, NULL if there are none.
    float * (*get)(llama_context * context);
};

// Throws MTP_ERROR_BACKEND if the loaded llama.cpp lacks one of them.
const Nextn & nextn();

// Outputs of a decode that stay on the device that computed them (patches/0107).
struct DeviceOutputs {
    // Whether they stay there until they are asked for. False if the CPU computes them.
    bool (*set)(llama_context * context, bool value);
    // The token with the largest logit of a row; negative if it is unknown or the logits are not finite.
    llama_token (*largest)(llama_context * context, int32_t row);
    // The k largest logits of a row and their tokens, in no order, and the probability of the largest one. False
    // if they are not on a device, it lacks an operation, or a logit is infinite or NaN.
    bool (*top)(llama_context * context, int32_t row, int32_t k, llama_token * tokens, float * logits, float * share);
    // The hidden states of the last decode, [n_embd, tokens], and the backend that computes them; NULL if they
    // are not on a device.
    ggml_tensor * (*hidden)(llama_context * context, ggml_backend_t * backend);
};

// The output matrix of a loaded model, or its token embeddings (patches/0107); nullptr if the loaded llama.cpp
// does not tell.
ggml_tensor * model_matrix(const llama_model * model, bool output);

// nullptr if the loaded llama.cpp lacks them.
const DeviceOutputs * device_outputs();

} // namespace mtp
