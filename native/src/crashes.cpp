// Crash messages. llama.cpp has assertions and reads models from mapped files, so a bad file can crash the
// process. A program then prints one sentence and exits with code 1.

#include "error.h"

#include "ggml.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <initializer_list>

#ifdef _WIN32
#include <io.h>
#else
#include <fcntl.h>
#include <unistd.h>
#endif

namespace mtp {

#ifdef _WIN32

static int duplicate_stderr() {
    return _dup(2);
}

static void handle(int number, void (*handler)(int)) {
    const auto before = std::signal(number, handler);
    if (before != SIG_DFL) { // keep existing handlers
        std::signal(number, before);
    }
}

static void use_signal_stack() {} // a thread whose stack overflowed has no room for a handler

constexpr int kSignals[] = {SIGFPE, SIGSEGV};

#else

static int duplicate_stderr() {
    return fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
}

static void handle(int number, void (*handler)(int)) {
    struct sigaction before = {};
    sigaction(number, nullptr, &before);
    if (before.sa_handler == SIG_DFL) { // keep existing handlers
        struct sigaction action = {};
        action.sa_handler = handler;
        action.sa_flags = SA_ONSTACK;
        sigaction(number, &action, nullptr);
    }
}

// Handlers of the calling thread get a stack of their own, because its stack may have overflowed. One that is there stays.
static void use_signal_stack() {
    alignas(16) static char memory[64 << 10]; // what the system saves of a CPU with AMX takes 11 KB
    stack_t before = {};
    stack_t own = {};
    own.ss_sp = memory;
    own.ss_size = sizeof(memory);
    if (sigaltstack(nullptr, &before) == 0 && before.ss_flags == SS_DISABLE) {
        sigaltstack(&own, nullptr);
    }
}

constexpr int kSignals[] = {SIGBUS, SIGFPE, SIGSEGV};

#endif

// Standard error as it was: llama_cpp hides it while it loads a model.
static std::atomic<int> the_output{-1};

// Called in signal handlers: nothing here allocates or locks.
[[noreturn]] static void end_with(const char * what) noexcept {
    const int output = the_output;
    for (const char * part : {"\nmtp-gguf: the model ended the process: ", what,
                              "; `mtp-gguf doctor MODEL --load` tries a model in a process of its own\n"}) {
        if (write(output, part, unsigned(std::strlen(part))) < 0) {
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
#ifdef SIGBUS
    if (number == SIGBUS) {
        end_with("a file was cut off while it was in use");
    }
#endif
    end_with(number == SIGFPE ? "a division by zero (SIGFPE)" : "an invalid memory access (SIGSEGV)");
}

} // namespace mtp

mtp_status mtp_tell_crashes(void) {
    return mtp::guard([&] {
        if (mtp::the_output >= 0) {
            return;
        }
        const int output = mtp::duplicate_stderr();
        if (output < 0) {
            throw mtp::Error(MTP_ERROR_FILE, mtp::format("standard error: %s", std::strerror(errno)));
        }
        mtp::the_output = output;
        ggml_set_abort_callback(mtp::on_abort);
        std::set_terminate(mtp::on_terminate);
        mtp::use_signal_stack();
        for (const int number : mtp::kSignals) {
            mtp::handle(number, mtp::on_signal);
        }
    });
}
