#pragma once
// The state of a sequence at one length, as bytes that another process can restore: that of the head, of the text that
// is drafted from, of the choice of depths and, for sessions, of the trunk.

#include "bytes.h"
#include "drafter.h"

#include <cstdint>
#include <vector>

namespace mtp {

struct SequenceState {
    int64_t length = 0; // tokens, >= 1

    // What the head needs to continue.
    DrafterState head;

    // The fingerprints of the models; 0: not known.
    uint64_t head_fingerprint = 0;
    uint64_t trunk_fingerprint = 0;

    // trunk_memory of a state whose caches, rows of the head and tokens of the text are still in a sequence.
    static constexpr uint32_t RECURRENT_ONLY = 3;

    // The trunk's state, if it is here too, and two numbers for its layout (session/trunk_state.h).
    uint32_t trunk_cells = 0;
    uint32_t trunk_memory = 0;
    Blob trunk;

    // TextDrafts::save(), with tokens; empty if nothing is drafted from the text.
    std::vector<uint8_t> text;

    // The number of bytes that write() produces.
    size_t written_size() const;
    void write(uint8_t * out) const;

    // Parses and validates untrusted bytes, those of older versions too, but for the trunk's. MTP_ERROR_FORMAT names the
    // fault. borrow: the trunk's state and the head's rows stay where they are, and `data` must outlive this object.
    static SequenceState read(const uint8_t * data, size_t size, bool borrow);
};

} // namespace mtp
