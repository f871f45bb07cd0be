#include "sequence_state.h"

#include "error.h"
#include "lookup/text_drafts.h"

#include "ggml.h"

#include <cmath>
#include <cstddef>
#include <cstring>

namespace mtp {

namespace {

// The header, little-endian like all supported machines; hidden, head_rows, trunk, text, depth and ring follow.
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
    uint32_t cells;      // the layout of the trunk's state; this and the next are 1 in the first version
    uint32_t memory;
    uint64_t depth_bytes; // not before the fourth version
    uint64_t ring_bytes;  // not before the fifth version
};

const char MAGIC[8] = {'m', 't', 'p', 's', 't', 'a', 't', '5'}; // its last byte is the version
const int32_t LAST_VERSION = MAGIC[7] - '0';
// By version; 0: what other data is refused with.
const size_t HEADER_BYTES[] = {sizeof(Header), offsetof(Header, text_bytes), offsetof(Header, depth_bytes),
                               offsetof(Header, depth_bytes), offsetof(Header, ring_bytes), sizeof(Header)};
const int64_t MOST_TOKENS = 1 << 24;

void refuse(const std::string & text) {
    throw Error(MTP_ERROR_FORMAT, "checkpoint: " + text);
}

void check_ring(const SequenceState & c) {
    int32_t before = -1;
    for (const DraftRing::Entry & entry : c.head.ring) {
        if (entry.position <= before || entry.position >= c.length || entry.token < 0) {
            refuse(format("the draft vocabulary: expected tokens at rising positions below %lld, found %d at %d",
                          (long long) c.length, entry.token, entry.position));
        }
        before = entry.position;
    }
}

} // namespace

size_t SequenceState::written_size() const {
    return sizeof(Header) + head.hidden.size() * sizeof(float) + head.rows.size() + trunk.size() + text.size() +
           head.depth.size() + head.ring.size() * sizeof(DraftRing::Entry);
}

void SequenceState::write(uint8_t * out) const {
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
    header.depth_bytes = head.depth.size();
    header.ring_bytes = head.ring.size() * sizeof(DraftRing::Entry);
    header.cells = trunk_cells;
    header.memory = trunk_memory;
    const auto add = [&out](const void * data, size_t n) {
        if (n > 0) { // an empty vector may have no address
            std::memcpy(out, data, n);
        }
        out += n;
    };
    add(&header, sizeof(header));
    add(head.hidden.data(), header.hidden_bytes);
    add(head.rows.data(), header.head_bytes);
    add(trunk.data(), header.trunk_bytes);
    add(text.data(), header.text_bytes);
    add(head.depth.data(), header.depth_bytes);
    add(head.ring.data(), header.ring_bytes);
}

SequenceState SequenceState::read(const uint8_t * data, size_t size, bool borrow) {
    Header header = {};
    const bool is_state = size >= sizeof(MAGIC) && std::memcmp(data, MAGIC, sizeof(MAGIC) - 1) == 0;
    const int32_t named = is_state ? data[sizeof(MAGIC) - 1] - '0' : 0;
    const int32_t version = named >= 1 && named <= LAST_VERSION ? named : 0; // 0: other data
    const size_t header_bytes = HEADER_BYTES[version];
    if (size < header_bytes) {
        refuse(format("expected %zu bytes or more, found %zu", header_bytes, size));
    }
    header.cells = header.memory = version == 1 ? 1 : 0;
    std::memcpy(&header, data, header_bytes);
    if (version == 0) {
        refuse("expected the output of mtp_checkpoint_write, found other data");
    }
    const uint64_t parts[] = {header.hidden_bytes, header.head_bytes, header.trunk_bytes, header.text_bytes,
                              header.depth_bytes, header.ring_bytes};
    uint64_t left = size - header_bytes;
    for (const uint64_t part : parts) {
        left = part <= left ? left - part : UINT64_MAX;
    }
    if (left != 0) {
        refuse(format("expected %llu + %llu + %llu + %llu + %llu + %llu bytes after its header, found %llu",
                      (unsigned long long) parts[0], (unsigned long long) parts[1], (unsigned long long) parts[2],
                      (unsigned long long) parts[3], (unsigned long long) parts[4],
                      (unsigned long long) parts[5], (unsigned long long) (size - header_bytes)));
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
    if (header.hidden_bytes % sizeof(float) != 0 || header.head_bytes % sizeof(ggml_fp16_t) != 0 ||
        header.ring_bytes % sizeof(DraftRing::Entry) != 0) {
        refuse("the head's state: expected whole numbers, found a part of one");
    }
    if (header.hidden_bytes == 0 && header.trunk_bytes == 0 && header.text_bytes == 0 && header.depth_bytes == 0) {
        refuse("expected the state of a head, a trunk, a text or a choice of depths, found none");
    }
    SequenceState c;
    c.length = header.length;
    c.head.token = int32_t(header.token);
    c.head.first = header.head_first;
    c.trunk_fingerprint = header.trunk_fingerprint;
    c.head_fingerprint = header.head_fingerprint;
    c.trunk_cells = header.cells;
    c.trunk_memory = header.memory;
    const auto blob = [borrow](const uint8_t * bytes, uint64_t n) {
        return borrow ? Blob::borrow(bytes, size_t(n)) : Blob(std::vector<uint8_t>(bytes, bytes + n));
    };
    const uint8_t * at = data + header_bytes;
    c.head.hidden.resize(size_t(header.hidden_bytes / sizeof(float)));
    if (!c.head.hidden.empty()) {
        std::memcpy(c.head.hidden.data(), at, size_t(header.hidden_bytes));
    }
    at += header.hidden_bytes;
    c.head.rows = blob(at, header.head_bytes);
    at += header.head_bytes;
    c.trunk = blob(at, header.trunk_bytes);
    at += header.trunk_bytes;
    if (version != 2) { // which has other estimates
        c.text.assign(at, at + header.text_bytes);
    }
    at += header.text_bytes;
    c.head.depth.assign(at, at + header.depth_bytes);
    at += header.depth_bytes;
    c.head.ring.resize(size_t(header.ring_bytes / sizeof(DraftRing::Entry)));
    if (!c.head.ring.empty()) {
        std::memcpy(c.head.ring.data(), at, size_t(header.ring_bytes));
    }
    check_ring(c);
    if (!c.head.is_finite()) {
        refuse("the head's state: expected finite numbers, found NaN or infinity");
    }
    if (!c.head.depth.empty()) {
        Drafter::check_depth(c.head.depth);
    }
    if (c.trunk_memory == RECURRENT_ONLY) {
        if (!c.head.rows.empty() || c.trunk.empty()) {
            refuse("expected a recurrent state without rows of the head, found others");
        }
        if (!c.text.empty()) {
            TextDrafts::check_learned(c.text, c.length);
        }
    } else if (!c.text.empty()) {
        TextDrafts::check_saved(c.text, c.length, int64_t(INT32_MAX) + 1); // of any vocabulary, until it is restored
    }
    return c;
}

} // namespace mtp
