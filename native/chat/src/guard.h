#pragma once
// Exceptions of llama.cpp's chat layer as a status and a sentence.

#include "mtp_chat.h"

#include <exception>
#include <new>
#include <string>

namespace mtp_chat_layer {

inline std::string & last_error() {
    static thread_local std::string text;
    return text;
}

// Runs the body of a C function; an exception becomes `kind`.
template <typename Body>
mtp_chat_status guard(mtp_chat_status kind, Body && body) noexcept {
    const char * text = "out of memory";
    try {
        try {
            body();
            return MTP_CHAT_OK;
        } catch (const std::bad_alloc &) {
            kind = MTP_CHAT_ERROR_MEMORY;
        } catch (const std::exception & error) {
            last_error() = error.what();
            return kind;
        }
        last_error() = text;
    } catch (...) { // no memory for the text
        kind = MTP_CHAT_ERROR_MEMORY;
    }
    return kind;
}

} // namespace mtp_chat_layer
