// Work on several threads that live as long as it does.
#pragma once

#include <exception>
#include <thread>
#include <vector>

namespace mtp {

// Call work(0) to work(n - 1), each on a thread of its own as far as threads can be had. The work throws nothing.
template <typename Work> void in_threads(int n, const Work & work) {
    std::vector<std::thread> others;
    for (int i = 1; i < n; ++i) {
        try {
            others.emplace_back(work, i);
        } catch (const std::exception &) { // no more threads can be had
            work(i);
        }
    }
    work(0);
    for (std::thread & other : others) {
        other.join();
    }
}

} // namespace mtp
