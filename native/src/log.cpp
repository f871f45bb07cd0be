// Captures llama.cpp's log; its last lines explain why a call failed. This is done in C++ because
// llama.cpp logs from any thread, and Ctrl-C would be lost inside a Python callback.

#include "error.h"

#include "llama.h"

#include <cstdio>
#include <deque>
#include <mutex>
#include <string>

namespace mtp {

constexpr size_t kKeptLines = 12;     // enough for an error and a little context
constexpr size_t kLongestLine = 1000; // longer lines, such as metadata of a file, are cut off

class Log {
public:
    void listen(bool echo) {
        const std::lock_guard<std::mutex> lock(mutex_);
        echo_ = echo;
        line_.clear();
        lines_.clear();
    }

    // A line may come in several pieces, all but the first with GGML_LOG_LEVEL_CONT. Lines for debugging llama.cpp do
    // not explain why a call failed.
    void add(ggml_log_level level, const char * text) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (echo_) {
            std::fputs(text, stderr);
        }
        level_ = level == GGML_LOG_LEVEL_CONT ? level_ : level;
        if (level_ == GGML_LOG_LEVEL_DEBUG) {
            return;
        }
        for (; *text != '\0'; ++text) {
            if (*text == '\n') {
                end_line();
            } else if (line_.size() < kLongestLine) {
                line_ += *text;
            }
        }
    }

    std::string last() {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::string out;
        for (const std::string & line : lines_) {
            out += line + "\n";
        }
        return out;
    }

private:
    void end_line() {
        if (line_.find_first_not_of(" .") != std::string::npos) { // progress is written in dots
            lines_.push_back(line_);
            if (lines_.size() > kKeptLines) {
                lines_.pop_front();
            }
        }
        line_.clear();
    }

    std::mutex mutex_;
    bool echo_ = false;
    ggml_log_level level_ = GGML_LOG_LEVEL_NONE; // of the last line
    std::string line_;
    std::deque<std::string> lines_;
};

// Never freed, because backends log until the process ends.
static Log & the_log() {
    static Log & log = *new Log;
    return log;
}

static void on_log(ggml_log_level level, const char * text, void *) noexcept {
    try {
        the_log().add(level, text);
    } catch (...) { // out of memory: the line is lost
    }
}

} // namespace mtp

mtp_status mtp_log_listen(bool echo) {
    return mtp::guard([&] {
        mtp::the_log().listen(echo);
        llama_log_set(mtp::on_log, nullptr);
    });
}

const char * mtp_log_last(void) {
    static thread_local std::string text;
    try {
        text = mtp::the_log().last();
    } catch (...) {
        text.clear();
    }
    return text.c_str();
}
