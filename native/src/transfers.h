#pragma once
// What the host exchanges with the head's device. On a GPU each of these takes microseconds in which
// nothing is computed.

#include <cstdint>

namespace mtp {

struct Transfers {
    int64_t graphs = 0;     // graph launches
    int64_t syncs = 0;      // waits for the device
    int64_t bytes_up = 0;   // from host to device
    int64_t bytes_down = 0; // from device to host
};

} // namespace mtp
