#pragma once
// A checkpoint: the state of a sequence at one length.

#include "sequence_state.h"
#include "session/trunk.h"

#include "mtp.h"

#include <cstdint>
#include <vector>

namespace mtp {

// HEAD and WHOLE: with the head's rows, the tokens of the text and the fingerprints; WHOLE: with the trunk's state.
struct Checkpoint : SequenceState {
    mtp_checkpoint_kind kind = MTP_CHECKPOINT_HOST;

    // DEVICE and HOST: the recurrent state. The caches stay in place; they are valid as long as the
    // token at position length - 1 still has this mark; 0: read, and not attached to a sequence yet.
    Trunk::Copy recurrent;
    uint64_t mark = 0;

    // WHOLE: the layout of the trunk's state.
    StateLayout trunk_layout;
    void set_trunk(std::vector<uint8_t> state, StateLayout layout);

    // The number of bytes that write() produces; 0 if this cannot leave its session: DEVICE, and HOST without a
    // recurrent state.
    size_t written_size() const;
    void write(uint8_t * out) const;

    // As SequenceState::read, and validates the trunk's state, too.
    static Checkpoint read(const uint8_t * data, size_t size, bool borrow);
};

} // namespace mtp

// The opaque checkpoint of mtp.h.
struct mtp_checkpoint : mtp::Checkpoint {};
