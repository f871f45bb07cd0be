// What the chat layer's sources use of ggml and of llama.cpp's log: failed assertions are exceptions here, which the C
// surface turns into a sentence, and nothing is logged.

#include "ggml.h"
#include "log.h"

#include <cstdarg>
#include <cstdio>
#include <stdexcept>

extern "C" void ggml_abort(const char *, int, const char * fmt, ...) {
    char    text[256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    throw std::logic_error(text);
}

int common_log_get_verbosity_thold() {
    return -1;
}

common_log * common_log_main() {
    return nullptr;
}

void common_log_add(common_log *, ggml_log_level, const char *, ...) {}
