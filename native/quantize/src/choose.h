// Which kernel quantizes a type on this machine, if any.
#pragma once

#include "job.h"

struct Choice {
    KernelSet::BySource kernels;
    const char *        name;  // as mtp_quantize_kernel() gives it
};

// The choice for a type, with the comparison with ggml behind it. Choices live forever.
const Choice & choose(int type, bool with_importance);

// The instruction sets that run here, best first, then "ggml".
const char * target_names();

// Whether MTP_QUANTIZE_TARGET is unset or one of them.
bool target_exists();
