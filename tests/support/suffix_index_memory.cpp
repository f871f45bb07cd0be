// Appends to a suffix index and truncates it while allocations fail, one after the other. A call that fails
// must leave the index as it was; matches are compared with a naive search. Prints the number of failures.

#include "lookup/suffix_index.h"

#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

static long countdown = -1; // the allocation that fails; negative: none

void * operator new(size_t n) {
    if (countdown >= 0 && countdown-- == 0) {
        throw std::bad_alloc();
    }
    if (void * p = std::malloc(n)) {
        return p;
    }
    throw std::bad_alloc();
}

void operator delete(void * p) noexcept { std::free(p); }
void operator delete(void * p, size_t) noexcept { std::free(p); }

static void must(bool kept, const char * promise) {
    if (!kept) {
        std::printf("broken: %s\n", promise);
        std::exit(1);
    }
}

static void check(const mtp::SuffixIndex & index, const std::vector<int32_t> & text) {
    const int64_t size = int64_t(text.size());
    must(index.size() == size, "the number of tokens");
    int64_t longest = 0;
    for (int64_t end = 0; end + 1 < size; ++end) {
        int64_t length = 0;
        while (length <= end && text[size_t(end - length)] == text[size_t(size - 1 - length)]) {
            ++length;
        }
        longest = longest > length ? longest : length;
    }
    const mtp::SuffixIndex::Match match = index.match();
    must(match.length == longest, "the longest repeated suffix");
    must(longest == 0 || match.next < size, "it is followed by a token");
    for (int64_t i = 0; i < longest; ++i) {
        must(text[size_t(match.next - 1 - i)] == text[size_t(size - 1 - i)], "its earlier occurrence is one");
    }
}

// Calls `change` until no allocation fails in it.
template <typename Change>
static int insist(const mtp::SuffixIndex & index, const std::vector<int32_t> & text, Change && change) {
    for (int failures = 0;; ++failures) {
        countdown = failures;
        try {
            change();
            countdown = -1;
            return failures;
        } catch (const std::bad_alloc &) {
            countdown = -1;
            check(index, text);
        }
    }
}

int main() {
    uint32_t random = 1;
    const auto draw = [&](uint32_t n) { return (random = random * 1664525u + 1013904223u) / 65536u % n; };
    int failures = 0;
    for (int round = 0; round < 40; ++round) {
        mtp::SuffixIndex index;
        std::vector<int32_t> text;
        for (int step = 0; step < 120; ++step) {
            if (draw(6) > 0) {
                const int32_t token = int32_t(draw(round % 2 ? 3 : 40));
                failures += insist(index, text, [&] { index.append(token); });
                text.push_back(token);
            } else {
                const size_t size = text.size() * draw(9) / 8;
                failures += insist(index, text, [&] { index.truncate(int64_t(size)); });
                text.resize(size);
            }
            check(index, text);
        }
        countdown = 0;
        index.truncate(0); // needs no memory
        countdown = -1;
        check(index, {});
    }
    std::printf("%d\n", failures);
}
