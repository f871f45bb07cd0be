#include "session/checkpoint.h"

#include "error.h"
#include "lookup/text_drafts.h"
#include "session/trunk_state.h"

#include "ggml.h"

#include <cmath>
#include <cstddef>
#include <cstring>

namespace mtp {

namespace {

// The header, little-endian like all supported machines; hidden, head_rows, trunk and text follow.
struct Header {
    char     magic[8];
    uint64_t trunk_fingerprint;
    uint64_t head_fingerprint;
    int64_t  length;
    int64_t  token;
    int64_t  head_first;
    uint64_t hidden_bytes;
    uint64_t head_bytes;
    uint64_t trunk_bytes;
    uint64_t text_bytes; // this and what follows are not in the first version
    uint32_t cells;      // bits: the layout of the trunk's state; this and the next are 1 in the first version
    uint32_t memory;     // a StateLayout::Memory
};

const char MAGIC[8] = {'m', 't', 'p', 's', 't', 'a', 't', '3'};
const char SECOND_MAGIC[8] = {'m', 't', 'p', 's', 't', 'a', 't', '2'}; // other estimates in the text
const char FIRST_MAGIC[8] = {'m', 't', 'p', 's', 't', 'a', 't', '1'};
const size_t FIRST_HEADER = offsetof(Header, text_bytes);
const uint32_t MROPE = 1, ROTATIONS = 2; // bits of `cells`
const int64_t MOST_TOKENS = 1 << 24;

void refuse(const std::string & text) {
    throw Error(MTP_ERROR_FORMAT, "checkpoint: " + text);
}

// A NaN in the head's cache would spread to every draft.
void check_finite(const Checkpoint & c) {
    bool sound = true;
    for (const float x : c.head.hidden) {
        sound = sound && std::isfinite(x);
    }
    for (size_t i = 0; i + 1 < c.head.rows.size(); i += sizeof(ggml_fp16_t)) {
        ggml_fp16_t x;
        std::memcpy(&x, c.head.rows.data() + i, sizeof(x));
        sound = sound && (x & 0x7c00) != 0x7c00; // the exponent of infinities and NaNs
    }
    if (!sound) {
        refuse("the head's state: expected finite numbers, found NaN or infinity");
    }
}

} // namespace

size_t Checkpoint::written_size() const {
    if (kind != MTP_CHECKPOINT_HEAD && kind != MTP_CHECKPOINT_WHOLE) {
        return 0;
    }
    return sizeof(Header) + head.hidden.size() * sizeof(float) + head.rows.size() + trunk.size() + text.size();
}

void Checkpoint::write(uint8_t * out) const {
    Header header = {};
    std::memcpy(header.magic, MAGIC, sizeof(MAGIC));
    header.trunk_fingerprint = trunk_fingerprint;
    header.head_fingerprint = head_fingerprint;
    header.length = length;
    header.token = head.token;
    header.head_first = head.first;
    header.hidden_bytes = head.hidden.size() * sizeof(float);
    header.head_bytes = head.rows.size();
    header.trunk_bytes = trunk.size();
    header.text_bytes = text.size();
    header.cells = (trunk_layout.mrope ? MROPE : 0) | (trunk_layout.rotations ? ROTATIONS : 0);
    header.memory = trunk_layout.memory;
    const auto put = [&out](const void * data, size_t n) {
        if (n > 0) { // an empty vector may have no address
            std::memcpy(out, data, n);
        }
        out += n;
    };
    put(&header, sizeof(header));
    put(head.hidden.data(), header.hidden_bytes);
    put(head.rows.data(), header.head_bytes);
    put(trunk.data(), header.trunk_bytes);
    put(text.data(), header.text_bytes);
}

Checkpoint Checkpoint::read(const uint8_t * data, size_t size) {
    Header header = {};
    const auto begins = [&](const char (&magic)[8]) {
        return size >= sizeof(magic) && std::memcmp(data, magic, sizeof(magic)) == 0;
    };
    const bool first = begins(FIRST_MAGIC);
    const bool second = begins(SECOND_MAGIC);
    const size_t header_bytes = first ? FIRST_HEADER : sizeof(header);
    if (size < header_bytes) {
        refuse(format("expected %zu bytes or more, found %zu", header_bytes, size));
    }
    header.cells = header.memory = first ? 1 : 0;
    std::memcpy(&header, data, header_bytes);
    if (!first && !second && !begins(MAGIC)) {
        refuse("expected the output of mtp_checkpoint_write, found other data");
    }
    const uint64_t left = size - header_bytes;
    if (header.hidden_bytes > left || header.head_bytes > left - header.hidden_bytes ||
        header.trunk_bytes > left - header.hidden_bytes - header.head_bytes ||
        header.text_bytes != left - header.hidden_bytes - header.head_bytes - header.trunk_bytes) {
        refuse(format("expected %llu + %llu + %llu + %llu bytes after its header, found %llu",
                      (unsigned long long) header.hidden_bytes, (unsigned long long) header.head_bytes,
                      (unsigned long long) header.trunk_bytes, (unsigned long long) header.text_bytes,
                      (unsigned long long) left));
    }
    if (header.length < 1 || header.length > MOST_TOKENS) {
        refuse(format("length: expected 1 to %lld, found %lld", (long long) MOST_TOKENS, (long long) header.length));
    }
    if (header.token < 0 || header.token > INT32_MAX) {
        refuse(format("token: expected 0 to %d, found %lld", INT32_MAX, (long long) header.token));
    }
    if (header.head_first < 0 || header.head_first > header.length) {
        refuse(format("head_first: expected 0 to %lld, found %lld", (long long) header.length,
                      (long long) header.head_first));
    }
    if (header.cells > (MROPE | ROTATIONS) || header.memory >= StateLayout::N_MEMORIES) {
        refuse(format("the trunk's layout: expected 0 to %u, and 0 to %u, found %u and %u", MROPE | ROTATIONS,
                      StateLayout::N_MEMORIES - 1, header.cells, header.memory));
    }
    if (header.hidden_bytes % sizeof(float) != 0 || header.head_bytes % sizeof(ggml_fp16_t) != 0) {
        refuse("the head's state: expected whole numbers, found a part of one");
    }
    if (header.hidden_bytes == 0 && header.trunk_bytes == 0 && header.text_bytes == 0) {
        refuse("expected the state of a head or of a trunk, or a text, found none");
    }
    Checkpoint c;
    c.kind = header.trunk_bytes > 0 ? MTP_CHECKPOINT_WHOLE : MTP_CHECKPOINT_HEAD;
    c.length = header.length;
    c.head.token = int32_t(header.token);
    c.head.first = header.head_first;
    c.trunk_fingerprint = header.trunk_fingerprint;
    c.head_fingerprint = header.head_fingerprint;
    const uint8_t * at = data + header_bytes;
    c.head.hidden.resize(size_t(header.hidden_bytes / sizeof(float)));
    if (!c.head.hidden.empty()) {
        std::memcpy(c.head.hidden.data(), at, size_t(header.hidden_bytes));
    }
    at += header.hidden_bytes;
    c.head.rows.assign(at, at + header.head_bytes);
    at += header.head_bytes;
    c.trunk.assign(at, at + header.trunk_bytes);
    at += header.trunk_bytes;
    if (!second) {
        c.text.assign(at, at + header.text_bytes);
    }
    check_finite(c);
    if (!c.text.empty()) {
        TextDrafts::check_saved(c.text, c.length, int64_t(INT32_MAX) + 1); // of any vocabulary, until it is restored
    }
    if (c.kind == MTP_CHECKPOINT_WHOLE) {
        c.trunk_layout = {(header.cells & MROPE) != 0, StateLayout::Memory(header.memory), (header.cells & ROTATIONS) != 0};
        check_trunk_state(c.trunk, c.length, c.trunk_layout);
    }
    return c;
}

} // namespace mtp
