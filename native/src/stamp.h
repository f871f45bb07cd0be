#pragma once
// Numbers that never come again in this process, to tell a thing from what took its place.

#include <atomic>
#include <cstdint>

namespace mtp {

inline uint64_t next_stamp() {
    static std::atomic<uint64_t> last{0};
    return ++last;
}

} // namespace mtp
