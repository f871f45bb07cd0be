#pragma once
// The library's internal exception, which the C API turns into a status and an error message.

#include "mtp.h"

#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

namespace mtp {

// Carries the status that the C API returns and the message for mtp_last_error().
class Error : public std::runtime_error {
public:
    Error(mtp_status status, const std::string & text) : std::runtime_error(text), status(status) {}

    const mtp_status status;
};

// Formats like printf into a string.
#if defined(__MINGW32__)
__attribute__((format(gnu_printf, 1, 2))) // CMakeLists.txt asks mingw-w64 for such a printf
#elif defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
std::string format(const char * fmt, ...);

// Sets this thread's last error.
void set_last_error(const std::string & text) noexcept;

// Runs the body of a C function and converts every exception to a status.
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
    } catch (const std::system_error & error) { // what ggml's Vulkan backend throws when a device fails
        set_last_error(std::string("a device of ggml failed: ") + error.what() +
                       "; close the model and load it again, in a new process if the device is lost");
        return MTP_ERROR_DEVICE;
    } catch (const std::exception & error) {
        set_last_error(std::string("internal error: ") + error.what());
        return MTP_ERROR_INTERNAL;
    } catch (...) {
        set_last_error("internal error: an exception that is not a std::exception was thrown");
        return MTP_ERROR_INTERNAL;
    }
}

// Checks a required pointer argument.
template <typename T>
T * require(T * pointer, const char * name) {
    if (pointer == nullptr) {
        throw Error(MTP_ERROR_ARGUMENT, format("%s: expected a pointer, found NULL", name));
    }
    return pointer;
}

// Checks that an argument is within lowest .. highest.
inline void require_range(long long value, long long lowest, long long highest, const char * name) {
    if (value < lowest || value > highest) {
        throw Error(MTP_ERROR_ARGUMENT,
                    format("%s: expected %lld to %lld, found %lld", name, lowest, highest, value));
    }
}

} // namespace mtp
