#pragma once
// The opaque importance matrix of mtp.h.

#include "imatrix.h"

struct mtp_imatrix : mtp::Imatrix {
    using Imatrix::Imatrix;
};
