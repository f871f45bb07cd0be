#pragma once
// Numbers that are unique within this process, to detect that something was replaced.

#include <atomic>
#include <cstdint>

namespace mtp {

inline uint64_t next_stamp() {
    static std::atomic<uint64_t> last{0};
    return ++last;
}

} // namespace mtp
