// Memory in pages of 2 MiB.

#pragma once

#include <cstddef>

namespace mtp {

// Moves the whole pages of 2 MiB within memory that is read again and again to such pages, where the system allows that on
// demand. CPUs prefetch within a page only, and have few entries for pages of 4 KiB. Memory that grows at
// its end may be passed again and again: what was moved before is not looked at. Other threads may read it meanwhile.
//
// A page takes about half a millisecond, and a cache grows by a page in all layers at the same token. So unless `all` is to be
// moved, a call moves one page, and none while those before took more than a fiftieth of the time.
void use_huge_pages(const void * data, size_t bytes, bool all);

}  // namespace mtp
