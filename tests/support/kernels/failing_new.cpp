// Allocations of the library that fail on demand. Linked with it and -Bsymbolic by test_plugged.py.

#include <atomic>
#include <cstdlib>
#include <new>

static std::atomic<long> left{-1};  // allocations until all fail; less than 0: none does

extern "C" __attribute__((visibility("default"))) void fail_allocations_after(long n) { left = n; }

void * operator new(size_t size) {
    if (left >= 0 && left.fetch_sub(left > 0) == 0) {
        throw std::bad_alloc();
    }
    return std::malloc(size);
}

void * operator new(size_t size, const std::nothrow_t &) noexcept { return left == 0 ? nullptr : std::malloc(size); }

void operator delete(void * data) noexcept { std::free(data); }

void operator delete(void * data, size_t) noexcept { std::free(data); }
