#include "session/trunk_state.h"

#include "error.h"

#include <algorithm>
#include <cstring>

namespace mtp {

namespace {

const char * const WHAT = "checkpoint: the trunk's state";

class Reader : public BoundedReader {
public:
    explicit Reader(const Blob & bytes) : BoundedReader(WHAT, bytes.data(), bytes.size()), begin_(bytes.data()) {}

    void expect(const char * field, int64_t want, int64_t found) const {
        if (found != want) {
            refuse(format("%s: expected %lld, found %lld", field, (long long) want, (long long) found));
        }
    }

    // Skips a * b * c bytes; all factors are below 2^32 except one, which may be any number.
    void skip(uint64_t a, uint64_t b, uint64_t c, const char * field) {
        if (a > left() || b > left() || c > left() || (a != 0 && b > left() / a) || (a * b != 0 && c > left() / (a * b))) {
            refuse(format("%s: expected %llu x %llu x %llu bytes, found %zu", field, (unsigned long long) a,
                          (unsigned long long) b, (unsigned long long) c, left()));
        }
        BoundedReader::skip(size_t(a * b * c));
    }

    size_t offset() const { return size_t(at() - begin_); }

private:
    const uint8_t * begin_;
};

// Cells in any order: one for each position, from 0 if `all` is set, else of the last positions. Only the cells of a
// picture share a position, with x and y from there on; the positions up to the next text have no cell. x and y of text are
// its position, or 0.
void check_cells(Reader & in, int64_t cells, bool all, int64_t length, bool mrope) {
    std::vector<bool> seen(size_t(length), false);
    int64_t first = length;
    bool has_picture = false;
    for (int64_t i = 0; i < cells; ++i) {
        const int32_t position = in.take<int32_t>("position");
        in.expect("sequences of a cell", 1, in.take<uint32_t>("sequences of a cell"));
        bool is_picture = false;
        if (mrope) {
            const int32_t x = in.take<int32_t>("x"), y = in.take<int32_t>("y");
            is_picture = !(x == position && y == position) && !(x == 0 && y == 0);
            if (is_picture && (std::min(x, y) < position || std::max(x, y) >= length)) {
                in.refuse(format("x and y: expected %d to %lld, found %d and %d", position, (long long) length - 1, x, y));
            }
            in.skip(1, sizeof(int32_t), 1, "token"); // any value is valid
        }
        in.skip(1, sizeof(int32_t), 1, "sequence"); // llama.cpp replaces it
        if (position < 0 || position >= length || (seen[size_t(position)] && !is_picture)) {
            in.refuse(format("position: expected each of 0 to %lld once, found %d", (long long) length - 1, position));
        }
        seen[size_t(position)] = true;
        first = std::min<int64_t>(first, position);
        has_picture = has_picture || is_picture;
    }
    if (!seen.back()) {
        in.refuse(format("position: expected %lld, found only others", (long long) length - 1));
    }
    if (!has_picture) {
        in.expect("cells", all ? length : length - first, cells);
    }
}

void skip_rows(Reader & in, uint32_t layers, int64_t length, const char * field) {
    for (uint32_t i = 0; i < layers; ++i) {
        in.take<int32_t>(field);
        in.skip(in.take<uint64_t>(field), uint64_t(length), 1, field);
    }
}

void skip_columns(Reader & in, uint32_t layers, int64_t length) {
    for (uint32_t i = 0; i < layers; ++i) {
        in.take<int32_t>("values");
        const uint32_t element = in.take<uint32_t>("values");
        in.skip(element, in.take<uint32_t>("values"), uint64_t(length), "values");
    }
}

const size_t CACHES_AT = sizeof(uint32_t) + sizeof(int32_t); // after magic and sequence

// The parts that do not depend on the number of streams.
struct Parts {
    struct Range {
        size_t begin;
        size_t end;
    };
    uint32_t streams;
    std::vector<Range> caches; // of each the stream with cells, including their number
    size_t rest;               // where the recurrent part begins; the end if there is none
};

// Reads a cache. all: it has the cells of all positions, and not only of the last ones.
Parts::Range read_cache(Reader & in, int64_t length, bool all, StateLayout layout, uint32_t & streams) {
    Parts::Range out = {};
    streams = in.take<uint32_t>("streams");
    int64_t filled = 0;
    for (uint32_t i = 0; i < streams; ++i) { // a count that is too large runs into the end of the data
        const size_t begin = in.offset();
        const int64_t cells = in.take<uint32_t>("cells");
        if (cells == 0) {
            continue;
        }
        in.expect("streams with cells", 1, ++filled);
        check_cells(in, cells, all, length, layout.mrope);
        const uint32_t transposed = in.take<uint32_t>("values transposed");
        const uint32_t layers = in.take<uint32_t>("layers");
        in.skip(layout.rotations ? 2 : 0, sizeof(uint32_t), 1, "rotations"); // llama.cpp compares them
        skip_rows(in, layers, cells, "keys");
        if (transposed != 0) {
            skip_columns(in, layers, cells);
        } else {
            skip_rows(in, layers, cells, "values");
        }
        out = {begin, in.offset()};
    }
    in.expect("streams with cells", 1, filled);
    return out;
}

void check_recurrent_cell(Reader & in, int64_t length) {
    in.expect("recurrent cells", 1, in.take<uint32_t>("recurrent cells"));
    in.expect("recurrent position", length - 1, in.take<int32_t>("recurrent position"));
    in.expect("sequences of the recurrent cell", 0, in.take<uint32_t>("sequences of the recurrent cell"));
}

Parts find_parts(const Blob & state, int64_t length, StateLayout layout) {
    Reader in(state);
    Parts parts = {};
    in.take<uint32_t>("magic"); // llama.cpp checks it
    in.take<int32_t>("sequence");
    parts.caches.push_back(read_cache(in, length, true, layout, parts.streams));
    if (layout.memory == StateLayout::WINDOWED) {
        uint32_t streams = 0;
        parts.caches.push_back(read_cache(in, length, false, layout, streams));
        in.expect("streams of the layers with a window", parts.streams, streams);
    }
    parts.rest = in.offset();
    if (layout.memory != StateLayout::HYBRID) {
        in.expect("bytes", int64_t(in.offset()), int64_t(state.size()));
        return parts;
    }
    check_recurrent_cell(in, length);
    return parts;
}

} // namespace

std::vector<uint8_t> to_streams(const Blob & state, int64_t length, StateLayout layout,
                                uint32_t streams) {
    const Parts parts = find_parts(state, length, layout);
    std::vector<uint8_t> out(state.data(), state.data() + int64_t(CACHES_AT));
    for (const Parts::Range & cache : parts.caches) {
        const uint8_t * number = reinterpret_cast<const uint8_t *>(&streams);
        out.insert(out.end(), number, number + sizeof(streams));
        out.insert(out.end(), state.data() + int64_t(cache.begin), state.data() + int64_t(cache.end));
        out.resize(out.size() + (streams - 1) * sizeof(uint32_t)); // the others have no cells
    }
    out.insert(out.end(), state.data() + int64_t(parts.rest), state.data() + state.size());
    return out;
}

std::vector<uint8_t> to_one_stream(const Blob & state, int64_t length, StateLayout layout) {
    return to_streams(state, length, layout, 1);
}

void check_trunk_state(const Blob & state, int64_t length, StateLayout layout) {
    const uint32_t streams = find_parts(state, length, layout).streams;
    if (streams != 1) {
        throw Error(MTP_ERROR_FORMAT, format("%s: streams: expected 1, found %u", WHAT, streams));
    }
}

void check_recurrent_state(const Blob & state, int64_t length) {
    Reader in(state);
    in.skip(CACHES_AT, 1, 1, "magic and sequence"); // llama.cpp checks them
    check_recurrent_cell(in, length);
}

uint32_t count_streams(const Blob & state) {
    uint32_t streams = 0;
    if (state.size() >= CACHES_AT + sizeof(streams)) {
        std::memcpy(&streams, state.data() + CACHES_AT, sizeof(streams));
    }
    return streams;
}

} // namespace mtp
