#pragma once
// FNV-1a (Fowler, Noll, Vo; 64 bits), to distinguish models. It is not cryptographic.

#include <cstddef>
#include <cstdint>

namespace mtp {

class Fingerprint {
public:
    void add(const void * data, size_t n) {
        const uint8_t * bytes = static_cast<const uint8_t *>(data);
        for (size_t i = 0; i < n; ++i) {
            value_ = (value_ ^ bytes[i]) * 0x100000001b3u;
        }
    }

    void add(uint64_t number) { add(&number, sizeof(number)); }

    uint64_t value() const { return value_; }

private:
    uint64_t value_ = 0xcbf29ce484222325u;
};

} // namespace mtp
