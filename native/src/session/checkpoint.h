#pragma once
// A checkpoint: the state of a sequence at one length.

#include "drafter.h"
#include "session/trunk.h"

#include "mtp.h"

#include <cstdint>
#include <vector>

namespace mtp {

struct Checkpoint {
    mtp_checkpoint_kind kind = MTP_CHECKPOINT_HOST;
    int64_t length = 0; // tokens, >= 1

    // What the head needs to continue; HEAD and WHOLE: with its rows.
    DrafterState head;

    // DEVICE and HOST: the recurrent state. The caches stay in place; they are valid as long as the
    // token at position length - 1 still has this mark.
    Trunk::Copy recurrent;
    uint64_t mark = 0;

    // HEAD and WHOLE: the fingerprints of the models. WHOLE: also the trunk's state.
    uint64_t head_fingerprint = 0;
    uint64_t trunk_fingerprint = 0;
    StateLayout trunk_layout;
    std::vector<uint8_t> trunk;

    // TextDrafts::save(), with tokens if HEAD or WHOLE; empty if the session drafts nothing from the text.
    std::vector<uint8_t> text;

    // The number of bytes that write() produces; 0 for kinds that are tied to their session.
    size_t written_size() const;

    // Serializes a checkpoint of kind HEAD or WHOLE.
    void write(uint8_t * out) const;

    // Parses and fully validates untrusted data, also that of the first version, which had no text.
    // MTP_ERROR_FORMAT names the fault.
    static Checkpoint read(const uint8_t * data, size_t size);
};

} // namespace mtp

// The opaque checkpoint of mtp.h.
struct mtp_checkpoint : mtp::Checkpoint {};
