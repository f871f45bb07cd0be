#pragma once
// The opaque types of mtp.h.

#include "checkpoint.h"
#include "corpus_handle.h"
#include "head_handle.h"
#include "session.h"

struct mtp_session : mtp::Session {
    using Session::Session;
};

struct mtp_checkpoint : mtp::Checkpoint {};
