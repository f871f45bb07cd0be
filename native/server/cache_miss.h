#pragma once
// Why a request did not reuse all of its prompt, for the log and for `timings`. patches/ includes this file in tools/server.

#include <cstdint>
#include <string>

namespace mtp {

// docs/server.md lists the reasons.
struct CacheMiss {
    std::string reason;     // a word; "" if all was reused
    uint64_t    shared = 0; // tokens of the prompt that what the reason names has, from its beginning
    std::string message;    // a sentence

    template <typename Json> Json to_json() const { return Json{ { "reason", reason }, { "shared", shared }, { "message", message } }; }
};

} // namespace mtp
