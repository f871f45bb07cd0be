#pragma once
// The opaque types of mtp.h.

#include "head.h"
#include "session.h"

struct mtp_head : mtp::Head {
    using Head::Head;
};

struct mtp_session : mtp::Session {
    using Session::Session;
};
