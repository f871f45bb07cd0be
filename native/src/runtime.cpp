// Checks that the loaded ggml and llama.cpp are those that the library was built for.
//
// The struct layouts of llama.h are valid only for one version, so a mismatch is rejected on loading
// instead of crashing later. MTP_BUILT_* come from the CMake packages that the build found.

#include "error.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

namespace mtp {

struct Version {
    std::string ggml;
    std::string commit; // as short as git prints it; "" where the build had no git
    std::string llama;

    std::string text() const {
        return "ggml " + ggml + " (" + (commit.empty() ? "commit unknown" : commit) +
               "), llama.cpp " + llama;
    }
};

// "0c1e570-dirty" (a package built from an unpacked archive) names the same commit as "0c1e570";
// "unknown" names none.
static std::string plain_commit(std::string commit) {
    commit = commit.substr(0, commit.find('-'));
    return commit == "unknown" ? "" : commit;
}

static Version built() {
    return {MTP_BUILT_GGML, plain_commit(MTP_BUILT_COMMIT), MTP_BUILT_LLAMA};
}

static Version loaded() {
    return {ggml_version(), plain_commit(ggml_commit()), llama_version()};
}

// Abbreviated commits agree when the shorter is the beginning of the longer; an unknown one agrees
// with all, and the version numbers have to do.
static bool same_commit(const std::string & a, const std::string & b) {
    const size_t n = a.size() < b.size() ? a.size() : b.size();
    return a.compare(0, n, b, 0, n) == 0;
}

} // namespace mtp

int32_t mtp_api_version(void) {
    return MTP_API_VERSION;
}

const char * mtp_built_for(void) {
    static const std::string text = mtp::built().text();
    return text.c_str();
}

mtp_status mtp_check_runtime(void) {
    return mtp::guard([] {
        const mtp::Version built = mtp::built();
        const mtp::Version loaded = mtp::loaded();
        if (built.ggml != loaded.ggml || built.llama != loaded.llama ||
            !mtp::same_commit(built.commit, loaded.commit)) {
            throw mtp::Error(MTP_ERROR_VERSION, "libmtp was built for " + built.text() +
                                                    ", but this process has loaded " + loaded.text());
        }
    });
}
