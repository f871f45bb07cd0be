// Crash messages. llama.cpp has assertions and reads models from mapped files, so a bad file can crash the
// process. A program then prints one sentence and exits with code 1.

#include "error.h"

#include "ggml.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <fcntl.h>
#include <initializer_list>
#include <unistd.h>

namespace mtp {

// Standard error as it was: llama_cpp hides it while it loads a model.
static std::atomic<int> the_output{-1};

// Called in signal handlers: nothing here allocates or locks.
[[noreturn]] static void end_with(const char * what) noexcept {
    const int output = the_output;
    for (const char * part : {"\nmtp-gguf: the model ended the process: ", what,
                              "; `mtp-gguf doctor MODEL --load` tries a model in a process of its own\n"}) {
        if (write(output, part, std::strlen(part)) < 0) {
            break; // standard error is closed
        }
    }
    _exit(1);
}

static void on_abort(const char * message) {
    end_with(message);
}

static void on_terminate() {
    end_with("an exception that llama.cpp did not catch");
}

static void on_signal(int number) {
    end_with(number == SIGBUS ? "a file was cut off while it was in use"
             : number == SIGFPE ? "a division by zero (SIGFPE)"
                                : "an invalid memory access (SIGSEGV)");
}

} // namespace mtp

mtp_status mtp_tell_crashes(void) {
    return mtp::guard([&] {
        if (mtp::the_output >= 0) {
            return;
        }
        const int output = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
        if (output < 0) {
            throw mtp::Error(MTP_ERROR_FILE, mtp::format("standard error: %s", std::strerror(errno)));
        }
        mtp::the_output = output;
        ggml_set_abort_callback(mtp::on_abort);
        std::set_terminate(mtp::on_terminate);
        for (const int number : {SIGBUS, SIGFPE, SIGSEGV}) {
            struct sigaction before = {};
            sigaction(number, nullptr, &before);
            if (before.sa_handler == SIG_DFL) { // keep existing handlers
                struct sigaction action = {};
                action.sa_handler = mtp::on_signal;
                sigaction(number, &action, nullptr);
            }
        }
    });
}
