#include "mtp.h"

#include <string>

static thread_local std::string last_error;

const char * mtp_last_error(void) {
    return last_error.c_str();
}
