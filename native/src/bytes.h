#pragma once
// States as bytes: written in the order of all supported machines, little-endian, and read without trust.

#include "error.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace mtp {

// Bytes that are owned, or borrowed from somebody who keeps them.
class Blob {
public:
    Blob() = default;
    Blob(std::vector<uint8_t> bytes) : own_(std::move(bytes)) {}

    static Blob borrow(const uint8_t * data, size_t size) {
        Blob out;
        out.borrowed_ = data;
        out.borrowed_size_ = size;
        return out;
    }

    const uint8_t * data() const { return borrowed_ != nullptr ? borrowed_ : own_.data(); }
    size_t size() const { return borrowed_ != nullptr ? borrowed_size_ : own_.size(); }
    bool empty() const { return size() == 0; }

private:
    std::vector<uint8_t> own_;
    const uint8_t * borrowed_ = nullptr;
    size_t borrowed_size_ = 0;
};

// Appends numbers to bytes.
template <typename T>
void put(std::vector<uint8_t> & out, const T & value) {
    const uint8_t * bytes = reinterpret_cast<const uint8_t *>(&value);
    out.insert(out.end(), bytes, bytes + sizeof(T));
}

// Reads numbers. Whatever is not within its bounds is an MTP_ERROR_FORMAT that names `what` and the field.
class BoundedReader {
public:
    BoundedReader(const char * what, const uint8_t * data, size_t size) : what_(what), at_(data), end_(data + size) {}

    template <typename T>
    T take(const char * field) {
        T value;
        if (size_t(end_ - at_) < sizeof(T)) {
            refuse(format("%s: expected %zu bytes, found the end", field, sizeof(T)));
        }
        std::memcpy(&value, at_, sizeof(T));
        at_ += sizeof(T);
        return value;
    }

    // lowest <= number <= highest; T: of 16, 32 or 64 bits.
    template <typename T>
    T integer(const char * field, int64_t lowest, int64_t highest) {
        const T value = take<T>(field);
        if (int64_t(value) < lowest || int64_t(value) > highest) {
            refuse(format("%s: expected %lld to %lld, found %lld", field, (long long) lowest, (long long) highest,
                          (long long) value));
        }
        return value;
    }

    // A finite number, lowest <= number <= highest.
    double number(const char * field, double lowest, double highest) {
        const double value = take<double>(field);
        if (!(value >= lowest && value <= highest)) {
            refuse(format("%s: expected %g to %g, found %g", field, lowest, highest, value));
        }
        return value;
    }

    // Throws unless all bytes were read.
    void end() const {
        if (at_ != end_) {
            refuse(format("expected its end, found %zu more bytes", size_t(end_ - at_)));
        }
    }

    // n: at most left().
    void skip(size_t n) { at_ += n; }

    const uint8_t * at() const { return at_; }
    size_t left() const { return size_t(end_ - at_); }

    [[noreturn]] void refuse(const std::string & text) const {
        throw Error(MTP_ERROR_FORMAT, std::string(what_) + ": " + text);
    }

private:
    const char * what_;
    const uint8_t * at_;
    const uint8_t * end_;
};

} // namespace mtp
