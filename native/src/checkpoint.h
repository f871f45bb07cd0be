#pragma once
// The state of a sequence at one length, to come back to.

#include "trunk.h"

#include "mtp.h"

#include <cstdint>
#include <vector>

namespace mtp {

struct Checkpoint {
    mtp_checkpoint_kind kind = MTP_CHECKPOINT_HOST;
    int64_t length = 0; // tokens, >= 1

    // What the head needs to go on: the last token and the trunk's hidden state of it, [n_embd];
    // empty where the session knows none.
    int32_t token = 0;
    std::vector<float> hidden;

    // DEVICE and HOST: the recurrent state. The caches stay where they are, as long as the token at
    // position length - 1 is the very one with this mark.
    Trunk::Copy recurrent;
    uint64_t mark = 0;

    // HEAD and WHOLE: rows head_first .. length - 1 of the head's cache, keys then values; WHOLE: the
    // trunk's state. Each with the number of the model that it fits.
    uint64_t head_fingerprint = 0;
    int64_t head_first = 0;
    std::vector<uint8_t> head_rows;
    uint64_t trunk_fingerprint = 0;
    std::vector<uint8_t> trunk;

    // What write() takes; 0 for the kinds that cannot leave their session.
    size_t written_size() const;

    // The bytes of a checkpoint of kind HEAD or WHOLE.
    void write(uint8_t * out) const;

    // Nothing of the bytes is trusted: MTP_ERROR_FORMAT names what is wrong.
    static Checkpoint read(const uint8_t * data, size_t size);
};

} // namespace mtp
