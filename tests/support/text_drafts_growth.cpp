// Counts the basic blocks that drafts from the text execute, on inputs that are bad for a search: prints
// "KIND TOKENS BLOCKS" for each. The sources of the index are compiled with -fsanitize-coverage=trace-pc,
// this file without, so the counts are those of the index, and the same in every run.

#include "lookup/text_drafts.h"

#include <cstdio>
#include <functional>
#include <map>
#include <string>

static uint64_t blocks = 0;

extern "C" void __sanitizer_cov_trace_pc(void) { ++blocks; }

// Reads a prompt, generates the second half of the text, drafting after each token, and empties it, twice.
// Between that it is cut in half and goes on.
static void work(int32_t n, const std::function<int32_t(int32_t)> & token) {
    mtp::TextDrafts text;
    std::vector<int32_t> prompt;
    for (int32_t i = 0; i < n / 2; ++i) {
        prompt.push_back(token(i));
    }
    for (int32_t round = 0; round < 2; ++round) {
        text.read(prompt.data(), int64_t(prompt.size()));
        for (int32_t i = n / 2; i < n; ++i) {
            int32_t out[16];
            mtp::Chances chances = {};
            text.generated(token(i));
            text.propose(out, 15, chances);
        }
        text.truncate(n / 2);
        text.read(prompt.data(), int64_t(prompt.size()));
        text.truncate(0);
    }
}

// After a text that is bad for it, a token is appended and removed again and again, each time another one.
static void alternate(int32_t n, const std::function<int32_t(int32_t)> & token) {
    mtp::TextDrafts text;
    for (int32_t i = 0; i < n / 2; ++i) {
        const int32_t next = token(i);
        text.read(&next, 1);
    }
    for (int32_t i = n / 2; i < n; ++i) {
        const int32_t last[] = {1000000 + i, 5};
        text.read(last, 1 + i % 2);
        text.generated(2000000 + i);
        text.truncate(n / 2);
    }
}

static void count(const std::string & kind, void (*run)(int32_t, const std::function<int32_t(int32_t)> &),
                  const std::function<int32_t(int32_t)> & token) {
    for (const int32_t n : {2000, 16000}) {
        blocks = 0;
        run(n, token);
        std::printf("%s\t%d\t%llu\n", kind.c_str(), n, (unsigned long long) blocks);
    }
}

int main() {
    const std::map<std::string, std::function<int32_t(int32_t)>> kinds = {
        {"one token", [](int32_t) { return 5; }},
        {"two tokens", [](int32_t i) { return int32_t(uint32_t(i) * 2654435761u >> 16 & 1); }},
        {"a period", [](int32_t i) { return i % 1000; }},
        {"all different", [](int32_t i) { return i; }},
        {"one token before each", [](int32_t i) { return i % 2 ? i : 0; }},
        {"a token after many", [](int32_t i) { return i % 997 ? 0 : i; }},
        // 0 where the Fibonacci word has its letter a: many repeated suffixes of many lengths
        {"Fibonacci", [](int32_t i) { return int32_t(int64_t((i + 2) * 0.6180339887498949) - int64_t((i + 1) * 0.6180339887498949)); }},
        // a copy in which one token in twelve is replaced
        {"edits", [](int32_t i) { return i % 12 == 0 ? 100000 + i : i % 500; }},
    };
    for (const auto & [kind, token] : kinds) {
        count(kind, work, token);
    }
    for (const std::string kind : {"one token", "Fibonacci", "one token before each"}) {
        count(kind + ", alternating", alternate, kinds.at(kind));
    }
}
