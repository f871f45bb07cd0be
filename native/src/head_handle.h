#pragma once
// The opaque head of mtp.h.

#include "head.h"

struct mtp_head : mtp::Head {
    using Head::Head;
};
