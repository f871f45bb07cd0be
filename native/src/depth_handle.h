#pragma once
// The opaque depth chooser of mtp.h.

#include "depth.h"

struct mtp_depth : mtp::Depth {
    using Depth::Depth;
};
