#include "session/checkpoint.h"

#include "error.h"
#include "session/trunk_state.h"

#include <utility>

namespace mtp {

namespace {

const uint32_t MROPE = 1, ROTATIONS = 2; // bits of `trunk_cells`

} // namespace

void Checkpoint::set_trunk(std::vector<uint8_t> state, StateLayout layout) {
    trunk = std::move(state);
    trunk_layout = layout;
    trunk_cells = (layout.mrope ? MROPE : 0) | (layout.rotations ? ROTATIONS : 0);
    trunk_memory = layout.memory;
}

// What is written of HOST, without a copy of the recurrent state.
static SequenceState with_recurrent(const Checkpoint & c) {
    SequenceState out = c;
    out.trunk = Blob::borrow(c.recurrent.bytes.data(), c.recurrent.bytes.size());
    out.trunk_memory = SequenceState::RECURRENT_ONLY;
    return out;
}

size_t Checkpoint::written_size() const {
    switch (kind) {
        case MTP_CHECKPOINT_HEAD:
        case MTP_CHECKPOINT_WHOLE: return SequenceState::written_size();
        case MTP_CHECKPOINT_HOST: return recurrent.empty() ? 0 : with_recurrent(*this).written_size();
        default: return 0;
    }
}

void Checkpoint::write(uint8_t * out) const {
    if (kind == MTP_CHECKPOINT_HOST) {
        with_recurrent(*this).write(out);
    } else {
        SequenceState::write(out);
    }
}

Checkpoint Checkpoint::read(const uint8_t * data, size_t size, bool borrow) {
    Checkpoint c;
    static_cast<SequenceState &>(c) = SequenceState::read(data, size, borrow);
    if (c.trunk_memory == RECURRENT_ONLY) {
        check_recurrent_state(c.trunk, c.length);
        c.kind = MTP_CHECKPOINT_HOST;
        c.recurrent.bytes = std::move(c.trunk);
        c.trunk = Blob();
        return c;
    }
    if (c.trunk_cells > (MROPE | ROTATIONS) || c.trunk_memory >= StateLayout::N_MEMORIES) {
        throw Error(MTP_ERROR_FORMAT,
                    format("checkpoint: the trunk's layout: expected 0 to %u, and 0 to %u, found %u and %u",
                           MROPE | ROTATIONS, StateLayout::N_MEMORIES - 1, c.trunk_cells, c.trunk_memory));
    }
    c.kind = c.trunk.empty() ? MTP_CHECKPOINT_HEAD : MTP_CHECKPOINT_WHOLE;
    if (c.kind == MTP_CHECKPOINT_WHOLE) {
        c.trunk_layout = {(c.trunk_cells & MROPE) != 0, StateLayout::Memory(c.trunk_memory), (c.trunk_cells & ROTATIONS) != 0};
        check_trunk_state(c.trunk, c.length, c.trunk_layout);
    }
    return c;
}

} // namespace mtp
