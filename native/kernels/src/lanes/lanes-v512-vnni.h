// v512 with products of bytes and of words by AVX-512 VNNI. Included after that is chosen.

#pragma once

#include "lanes-v512.h"

namespace mtp {
namespace {

struct vnni_512 : v512 {
    LANES_INLINE I dpbusd(I acc, I u, I s) { return _mm512_dpbusd_epi32(acc, u, s); }
    LANES_INLINE I dpwssd(I acc, I a, I b) { return _mm512_dpwssd_epi32(acc, a, b); }
};

}  // namespace
}  // namespace mtp
