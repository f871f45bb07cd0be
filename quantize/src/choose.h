// Chooses the kernel that quantizes a type on this machine, if there is one.
#pragma once

#include "job.h"

struct Choice {
    KernelSet::BySource kernels;
    const char *        name;  // as mtp_quantize_kernel() gives it
};

// Returns the choice for a type, made by a comparison with ggml. Choices are never freed.
const Choice & choose(int type, bool with_importance);

// The instruction sets that run here, best first, then "ggml".
const char * target_names();

// Whether MTP_QUANTIZE_TARGET is unset or one of them.
bool target_exists();
