#include "error.h"

#include <cstdarg>
#include <cstdio>
#include <vector>

namespace mtp {

static thread_local std::string last_error;

void set_last_error(const std::string & text) noexcept {
    try {
        last_error = text;
    } catch (...) {
        last_error.clear(); // no memory for the message: the status must suffice
    }
}

std::string format(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    va_list again;
    va_copy(again, args);
    const int length = std::vsnprintf(nullptr, 0, fmt, args);
    va_end(args);
    std::vector<char> text(length > 0 ? size_t(length) + 1 : 1);
    std::vsnprintf(text.data(), text.size(), fmt, again);
    va_end(again);
    return std::string(text.data());
}

} // namespace mtp

const char * mtp_last_error(void) {
    return mtp::last_error.c_str();
}
