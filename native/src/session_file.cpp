#include "session_file.h"

#include "bytes.h"
#include "crc32.h"

#include <algorithm>

namespace mtp {

static const char MAGIC[8] = {'m', 't', 'p', 's', 'e', 's', 's', 0};
static const size_t CHECKSUM_AT = 12;
static const size_t SECTION_BYTES = 24;
static const size_t FIELD_BYTES = 4; // without its name and value
static const size_t BLOCK = 256 << 10; // read at once, and still in the CPU's cache for the checksum

static uint64_t aligned(uint64_t offset) {
    return (offset + 63) / 64 * 64;
}

static uint32_t header_checksum(const uint8_t * data, size_t size) {
    const uint32_t zeros = 0;
    const uint32_t crc = crc32(&zeros, 4, crc32(data, CHECKSUM_AT));
    return crc32(data + CHECKSUM_AT + 4, size - CHECKSUM_AT - 4, crc);
}

static bool is_printable(const std::string & text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

const char * SessionHeader::section_name(size_t index) const {
    return index == 0 ? "tokens" : index > 1 ? "earlier" : program == MTP_LLAMA ? "checkpoint" : "slot";
}

size_t SessionHeader::size(const char * where, const uint8_t * start, uint64_t file_size) {
    BoundedReader in(where, start, size_t(std::min<uint64_t>(START_BYTES, file_size)));
    if (in.left() < sizeof(MAGIC) || std::memcmp(start, MAGIC, sizeof(MAGIC)) != 0) {
        in.refuse("expected a session file, found other data");
    }
    in.take<uint64_t>("magic");
    const uint32_t version = in.take<uint32_t>("version");
    if (version != VERSION) {
        in.refuse(format("version: expected %u, found %u; %s", VERSION, version,
                         version < VERSION ? "an older mtp-gguf wrote it: save the session anew"
                                           : "update mtp-gguf, or save the session anew"));
    }
    if (file_size < START_BYTES) {
        in.refuse(format("expected %zu bytes or more, found %llu", START_BYTES, (unsigned long long) file_size));
    }
    in.take<uint32_t>("checksum");
    const uint64_t nbytes = in.take<uint64_t>("bytes");
    if (nbytes != file_size) {
        in.refuse(format("expected %llu bytes, found %llu", (unsigned long long) nbytes, (unsigned long long) file_size));
    }
    const uint64_t most = START_BYTES + MOST_SECTIONS * SECTION_BYTES +
                          uint64_t(MOST_FIELDS) * (FIELD_BYTES + MOST_NAME + MOST_VALUE) + MOST_EXTRA;
    return size_t(in.integer<uint32_t>("header", START_BYTES, int64_t(std::min(most, file_size))));
}

SessionHeader SessionHeader::read(const char * where, const uint8_t * data, size_t n, uint64_t file_size) {
    if (n < std::min<uint64_t>(START_BYTES, file_size) || n != size(where, data, file_size)) {
        throw Error(MTP_ERROR_FORMAT, format("%s: header: expected other than %zu bytes; the file changed", where, n));
    }
    BoundedReader in(where, data + CHECKSUM_AT, n - CHECKSUM_AT);
    const uint32_t checksum = in.take<uint32_t>("checksum");
    if (checksum != header_checksum(data, n)) {
        in.refuse(format("header: expected checksum %08x, found that of other bytes; the file is damaged", checksum));
    }
    SessionHeader out;
    out.nbytes = in.take<uint64_t>("bytes");
    in.take<uint32_t>("header");
    out.program = in.integer<uint32_t>("program", MTP_LLAMA, LLAMA_SERVER);
    out.n_tokens = in.integer<uint32_t>("n_tokens", 1, MOST_TOKENS);
    const uint32_t most_sections = out.program == MTP_LLAMA ? MOST_SECTIONS : 2;
    const uint32_t n_sections = in.integer<uint32_t>("sections", 2, most_sections);
    const uint32_t n_fields = in.integer<uint32_t>("identity", 0, MOST_FIELDS);
    const uint32_t n_extra = in.integer<uint32_t>("extra", 0, MOST_EXTRA);
    out.owner = in.take<uint64_t>("owner");
    in.integer<uint64_t>("reserved", 0, 0);
    const size_t fewest = n_sections * SECTION_BYTES + n_fields * (FIELD_BYTES + 1) + n_extra;
    if (in.left() < fewest) {
        in.refuse(format("header: expected %zu bytes or more, found %zu", START_BYTES + fewest, n));
    }
    out.sections.resize(n_sections);
    out.identity.resize(n_fields);

    uint64_t end = n;
    uint32_t before = 0;
    for (size_t i = 0; i < out.sections.size(); ++i) {
        SessionSection & section = out.sections[i];
        const char * name = out.section_name(i);
        section.offset = in.take<uint64_t>(name);
        section.nbytes = in.take<uint64_t>(name);
        section.checksum = in.take<uint32_t>(name);
        section.n_tokens = in.take<uint32_t>(name);
        if (section.offset != aligned(end)) {
            in.refuse(format("%s: expected offset %llu, found %llu", name, (unsigned long long) aligned(end),
                             (unsigned long long) section.offset));
        }
        if (section.offset >= file_size || section.nbytes < 1 || section.nbytes > file_size - section.offset) {
            in.refuse(format("%s: expected 1 byte or more within the file, found %llu at %llu of %llu", name,
                             (unsigned long long) section.nbytes, (unsigned long long) section.offset,
                             (unsigned long long) file_size));
        }
        end = section.offset + section.nbytes;
        const uint32_t least = i < 2 ? out.n_tokens : before + 1;
        if (section.n_tokens < least || section.n_tokens > out.n_tokens) {
            in.refuse(format("%s: expected rising numbers from 1 to %u, found %u tokens after %u", name, out.n_tokens,
                             section.n_tokens, before));
        }
        before = i < 2 ? 0 : section.n_tokens;
    }
    if (end != file_size) {
        in.refuse(format("%s: expected its end at %llu, found %llu", out.section_name(out.sections.size() - 1),
                         (unsigned long long) file_size, (unsigned long long) end));
    }
    if (out.program == MTP_LLAMA && out.sections[0].nbytes != 4 * uint64_t(out.n_tokens)) {
        in.refuse(format("tokens: expected %u bytes, found %llu", 4 * out.n_tokens,
                         (unsigned long long) out.sections[0].nbytes));
    }

    const auto text = [&](uint16_t length) {
        if (length > in.left()) {
            in.refuse(format("identity: expected %u bytes, found the end", length));
        }
        std::string found(reinterpret_cast<const char *>(in.at()), length);
        in.skip(length);
        if (!is_printable(found)) {
            in.refuse("identity: expected printable ASCII, found other characters");
        }
        return found;
    };
    std::vector<const std::string *> names;
    for (auto & field : out.identity) {
        const uint16_t name = uint16_t(in.integer<uint16_t>("identity: bytes of a name", 1, MOST_NAME));
        const uint16_t value = uint16_t(in.integer<uint16_t>("identity: bytes of a value", 0, MOST_VALUE));
        field.first = text(name);
        field.second = text(value);
        names.push_back(&field.first);
    }
    std::sort(names.begin(), names.end(), [](const std::string * a, const std::string * b) { return *a < *b; });
    const auto twice = std::adjacent_find(names.begin(), names.end(),
                                          [](const std::string * a, const std::string * b) { return *a == *b; });
    if (twice != names.end()) {
        in.refuse(format("identity: expected different names, found %s twice", (*twice)->c_str()));
    }
    if (in.left() != n_extra) {
        in.refuse(format("extra: expected %u bytes, found %zu", n_extra, in.left()));
    }
    out.extra.assign(reinterpret_cast<const char *>(in.at()), in.left());
    return out;
}

std::vector<uint8_t> SessionHeader::write(const char * where) {
    const auto require_size = [&](const char * what, size_t found, uint32_t most) {
        if (found > most) {
            throw Error(MTP_ERROR_ARGUMENT, format("%s: %s: expected at most %u bytes, found %zu", where, what, most, found));
        }
    };
    require_size("extra", extra.size(), MOST_EXTRA);
    size_t size = START_BYTES + sections.size() * SECTION_BYTES + extra.size();
    for (const auto & field : identity) {
        require_size("identity: a name", field.first.size(), MOST_NAME);
        require_size("identity: a value", field.second.size(), MOST_VALUE);
        size += FIELD_BYTES + field.first.size() + field.second.size();
    }
    nbytes = size;
    for (SessionSection & section : sections) {
        section.offset = aligned(nbytes);
        nbytes = section.offset + section.nbytes;
    }
    std::vector<uint8_t> out(MAGIC, MAGIC + sizeof(MAGIC));
    out.reserve(size);
    put(out, VERSION);
    put(out, uint32_t(0));
    put(out, nbytes);
    for (const size_t number : {size, size_t(program), size_t(n_tokens), sections.size(), identity.size(), extra.size()}) {
        put(out, uint32_t(number));
    }
    put(out, owner);
    put(out, uint64_t(0));
    for (const SessionSection & section : sections) {
        put(out, section.offset);
        put(out, section.nbytes);
        put(out, section.checksum);
        put(out, section.n_tokens);
    }
    for (const auto & field : identity) {
        put(out, uint16_t(field.first.size()));
        put(out, uint16_t(field.second.size()));
        out.insert(out.end(), field.first.begin(), field.first.end());
        out.insert(out.end(), field.second.begin(), field.second.end());
    }
    out.insert(out.end(), extra.begin(), extra.end());
    const uint32_t checksum = header_checksum(out.data(), out.size());
    std::memcpy(&out[CHECKSUM_AT], &checksum, sizeof(checksum));
    try {
        read(where, out.data(), out.size(), nbytes);
    } catch (const Error & error) {
        throw Error(MTP_ERROR_ARGUMENT, error.what());
    }
    return out;
}

SessionFile::SessionFile(const std::string & path) : path_(path), file_(path) {
    std::vector<uint8_t> data(size_t(std::min<uint64_t>(SessionHeader::START_BYTES, file_.size())));
    file_.read(0, data.data(), data.size());
    const size_t start = data.size();
    data.resize(SessionHeader::size(path.c_str(), data.data(), file_.size()));
    file_.read(start, data.data() + start, data.size() - start);
    header_ = SessionHeader::read(path.c_str(), data.data(), data.size(), file_.size());
}

void SessionFile::read(size_t index, void * out) const {
    const SessionSection & section = header_.sections.at(index);
    std::vector<uint8_t> block(out == nullptr ? size_t(std::min<uint64_t>(BLOCK, section.nbytes)) : 0);
    uint32_t checksum = 0;
    for (uint64_t at = 0; at < section.nbytes; at += BLOCK) {
        const size_t n = size_t(std::min<uint64_t>(BLOCK, section.nbytes - at));
        uint8_t * to = out == nullptr ? block.data() : static_cast<uint8_t *>(out) + at;
        file_.read(section.offset + at, to, n);
        checksum = crc32(to, n, checksum);
    }
    if (checksum != section.checksum) {
        throw Error(MTP_ERROR_FORMAT, format("%s: %s: expected checksum %08x, found that of other bytes; the file is damaged",
                                             path_.c_str(), header_.section_name(index), section.checksum));
    }
}

} // namespace mtp
