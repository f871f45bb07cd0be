#pragma once
// How the library fails inside: one exception, turned into a status and a sentence at the C surface.

#include "mtp.h"

#include <new>
#include <stdexcept>
#include <string>

namespace mtp {

// Carries the status that the C surface returns and the sentence for mtp_last_error().
class Error : public std::runtime_error {
public:
    Error(mtp_status status, const std::string & text) : std::runtime_error(text), status(status) {}

    const mtp_status status;
};

// printf into a string.
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
std::string format(const char * fmt, ...);

// Sets this thread's last error.
void set_last_error(const std::string & text) noexcept;

// Runs the body of a C function: nothing thrown leaves it.
template <typename Body>
mtp_status guard(Body && body) noexcept {
    try {
        body();
        return MTP_OK;
    } catch (const Error & error) {
        set_last_error(error.what());
        return error.status;
    } catch (const std::bad_alloc &) {
        set_last_error("out of memory");
        return MTP_ERROR_MEMORY;
    } catch (const std::exception & error) {
        set_last_error(std::string("internal error: ") + error.what());
        return MTP_ERROR_INTERNAL;
    } catch (...) {
        set_last_error("internal error: something that is no std::exception was thrown");
        return MTP_ERROR_INTERNAL;
    }
}

// For pointers that a caller must not leave out.
template <typename T>
T * require(T * pointer, const char * name) {
    if (pointer == nullptr) {
        throw Error(MTP_ERROR_ARGUMENT, format("%s: expected a pointer, found NULL", name));
    }
    return pointer;
}

// For numbers from outside: lowest <= value <= highest.
inline void require_range(long long value, long long lowest, long long highest, const char * name) {
    if (value < lowest || value > highest) {
        throw Error(MTP_ERROR_ARGUMENT,
                    format("%s: expected %lld to %lld, found %lld", name, lowest, highest, value));
    }
}

} // namespace mtp
