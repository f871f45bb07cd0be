#pragma once
// Session files: the one reader and writer, which Python (native/sessions/session_file.py) and llama-server
// (native/server/session_folder.h) call through mtp.h. It knows neither llama.cpp nor JSON, trusts no byte, and does not
// recurse.
//
// All numbers are unsigned and little-endian.
//
//   offset   bytes   contents
//        0       8   "mtpsess" and a zero
//        8       4   version, 2
//       12       4   CRC-32 of the header, with zeros in this place
//       16       8   bytes of the file
//       24       4   bytes of the header, which ends with `extra`
//       28       4   the program that wrote the file: 1 MTPLlama, 2 llama-server
//       32       4   tokens of the session, 1 to 2^24
//       36       4   sections, 2 to 1026
//       40       4   fields of the identity, up to 1024
//       44       4   bytes of `extra`, up to 64 MiB
//       48       8   owner: whose session it is (native/server/api_key.h), or 0
//       56       8   zero
//       64      24   for each section: offset (8), bytes (8), CRC-32 of its bytes (4), tokens that it belongs to (4)
//        …       …   for each field: bytes of its name (2), bytes of its value (2), its name, its value
//        …       …   extra: bytes of the program's own; those of MTPLlama are a JSON object
//
// Names have 1 to 255 characters of printable ASCII and differ, values have up to 4095. The first section has the tokens,
// of MTPLlama as int32, of llama-server as server_tokens::serialize() writes them; the second one is the state of all
// tokens, a whole checkpoint or native/server/slot_state.h; further ones, of MTPLlama, are host checkpoints of a beginning
// of the tokens, the shortest first. A section begins at the next multiple of 64 after what is before it, and the last one ends
// the file. The bytes between them have no meaning.

#include "file_map.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mtp {

struct SessionSection {
    uint64_t offset = 0;
    uint64_t nbytes = 0;
    uint32_t checksum = 0;
    uint32_t n_tokens = 0;
};

// The names and values of what a session has in common with the model that continues it, in the order of the writer.
using SessionIdentity = std::vector<std::pair<std::string, std::string>>;

struct SessionHeader {
    static constexpr uint32_t VERSION = 2;
    static constexpr uint32_t MTP_LLAMA = 1, LLAMA_SERVER = 2;
    static constexpr size_t START_BYTES = 64; // before the sections
    static constexpr uint32_t MOST_TOKENS = 1 << 24, MOST_SECTIONS = 1026, MOST_FIELDS = 1024;
    static constexpr uint32_t MOST_NAME = 255, MOST_VALUE = 4095, MOST_EXTRA = 64 << 20;

    uint64_t nbytes = 0; // of the file
    uint32_t program = MTP_LLAMA;
    uint32_t n_tokens = 0;
    uint64_t owner = 0;
    std::vector<SessionSection> sections;
    SessionIdentity identity;
    std::string extra;

    const char * section_name(size_t index) const;

    // The number of bytes of a header by its first START_BYTES, or fewer at the end of a file of `file_size` bytes.
    // MTP_ERROR_FORMAT, which begins with `where`, if they are not those of a session file.
    static size_t size(const char * where, const uint8_t * start, uint64_t file_size);

    // Parses and validates a whole header of n bytes, as many as size() says. MTP_ERROR_FORMAT names the first fault.
    static SessionHeader read(const char * where, const uint8_t * data, size_t n, uint64_t file_size);

    // The bytes of a header, whose `nbytes` and offsets are set. MTP_ERROR_ARGUMENT, which begins with `where`, if read()
    // would refuse them.
    std::vector<uint8_t> write(const char * where);
};

// A session file that is open, and whose header is valid. Others may remove or replace it meanwhile.
class SessionFile {
public:
    // path: UTF-8. MTP_ERROR_FILE, with the system's reason, if it cannot be read; MTP_ERROR_FORMAT names the first fault.
    explicit SessionFile(const std::string & path);

    const SessionHeader & header() const { return header_; }

    // Reads a section into as many bytes as it has, or only checks it if `out` is null. MTP_ERROR_FORMAT if its checksum
    // does not hold.
    void read(size_t index, void * out) const;

private:
    std::string path_;
    InputFile file_;
    SessionHeader header_;
};

} // namespace mtp
