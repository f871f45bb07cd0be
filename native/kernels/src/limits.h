// What this machine reads and multiplies at most: what the speed of a model is compared with.

#pragma once

#include "lanes/lanes.h"

namespace mtp {

// Bytes a second that n_threads read together, each a part of `size` bytes at `data`, such as a model's; 0 if there are not
// as many threads. Memory is read in four ways, and the fastest one counts.
double read_limit(const void * data, size_t size, int n_threads, double seconds);

// Products of two bytes a second, added up by the widest instruction of these kernels: by tiles, where the CPU has them.
double product_limit(const kernel_set & kernels, int n_threads, double seconds);

}  // namespace mtp
