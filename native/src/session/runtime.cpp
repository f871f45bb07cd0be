// Checks that the library can run on the loaded ggml and llama.cpp.
//
// It runs on those that it was built for (MTP_BUILT_* come from the CMake packages that the build found), and on
// others if the structs and numbers of ggml.h that it uses are the same there. Of llama.h it uses functions, which
// the system's loader finds, and llama_batch, which has not changed since 2023.

#include "session/runtime.h"

#include "error.h"
#include "session/nextn.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>

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
    const auto version = reinterpret_cast<const char * (*)()>(exported("llama_version")); // not before 2026
    return {ggml_version(), plain_commit(ggml_commit()), version != nullptr ? version() : "unknown"};
}

// Abbreviated commits agree when the shorter is the beginning of the longer; an unknown one agrees
// with all, and the version numbers have to do.
static bool same_commit(const std::string & a, const std::string & b) {
    const size_t n = a.size() < b.size() ? a.size() : b.size();
    return a.compare(0, n, b, 0, n) == 0;
}

static bool is_built_version() {
    const Version built = mtp::built();
    const Version loaded = mtp::loaded();
    return built.ggml == loaded.ggml && built.llama == loaded.llama && same_commit(built.commit, loaded.commit);
}

// The first field of ggml_tensor, number or type of ggml.h that the loaded ggml has another of; nullptr if there
// is none.
static const char * other_in_ggml() {
    const std::unique_ptr<ggml_context, decltype(&ggml_free)> context(ggml_init({1 << 14, nullptr, false}), ggml_free);
    if (!context) {
        throw std::bad_alloc();
    }
    const int64_t ne[GGML_MAX_DIMS] = {3, 5, 7, 2};
    ggml_tensor * x = ggml_new_tensor(context.get(), GGML_TYPE_F32, GGML_MAX_DIMS, ne);
    ggml_set_name(x, std::string(2 * GGML_MAX_NAME, 'x').c_str());
    const ggml_tensor * y = ggml_scale(context.get(), x, 0.25f);
    float scale;
    std::memcpy(&scale, y->op_params, sizeof(scale));
    const struct {
        const char * field;
        bool same;
    } checks[] = {
        {"type", x->type == GGML_TYPE_F32},
        {"buffer", x->buffer == nullptr},
        {"ne", std::memcmp(x->ne, ne, sizeof(ne)) == 0},
        {"nb", x->nb[0] == sizeof(float) && x->nb[3] == 3 * 5 * 7 * sizeof(float)},
        {"op", std::strcmp(ggml_op_name(y->op), "SCALE") == 0},
        {"op_params", scale == 0.25f},
        {"src", y->src[0] == x && y->src[1] == nullptr && y->src[GGML_MAX_SRC - 1] == nullptr},
        {"view_src", x->view_src == nullptr},
        {"data", x->data != nullptr && x->data != y->data},
        {"name", strnlen(x->name, sizeof(x->name)) == GGML_MAX_NAME - 1},
    };
    for (const auto & check : checks) {
        if (!check.same) {
            return check.field;
        }
    }
    const struct {
        ggml_type type;
        const char * name;
    } types[] = {{GGML_TYPE_F32, "f32"}, {GGML_TYPE_F16, "f16"}, {GGML_TYPE_I32, "i32"}, {GGML_TYPE_I64, "i64"}};
    for (const auto & expected : types) {
        if (std::strcmp(ggml_type_name(expected.type), expected.name) != 0) {
            return expected.name;
        }
    }
    return nullptr;
}

// A function that returns a large struct: of a type that is not trivial, so that the caller decides where it is.
struct Returned {
    Returned(const Returned &) = delete;
    ~Returned() {}

    unsigned char bytes[MTP_MAX_STRUCT];
};

// The version in a sequence file of the last sequence; 0 if llama.cpp cannot write it.
static uint32_t written_version(llama_context * context) {
    namespace fs = std::filesystem;
    std::error_code failed;
    const fs::path path = fs::temp_directory_path(failed) / format("mtp-gguf-%08x", std::random_device()());
    const llama_seq_id seq = llama_seq_id(llama_n_seq_max(context)) - 1;
    uint32_t words[2] = {}; // magic and version
    if (!failed && llama_state_seq_save_file(context, path.string().c_str(), seq, nullptr, 0) > 0) {
        std::ifstream(path, std::ios::binary).read(reinterpret_cast<char *>(words), sizeof(words));
    }
    fs::remove(path, failed);
    return words[0] == LLAMA_STATE_SEQ_MAGIC ? words[1] : 0;
}

uint32_t state_version(llama_context * context) {
    static const uint32_t version = is_built_version() ? LLAMA_STATE_SEQ_VERSION : written_version(context);
    return version;
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
        const char * other = mtp::is_built_version() ? nullptr : mtp::other_in_ggml();
        if (other != nullptr) {
            throw mtp::Error(MTP_ERROR_VERSION, "libmtp was built for " + mtp::built().text() +
                                                    ", but this process has loaded " + mtp::loaded().text() +
                                                    ", whose ggml.h has another " + other);
        }
    });
}

mtp_status mtp_call_for_struct(void (*function)(void), void * out) {
    return mtp::guard([&] {
        mtp::require(out, "out");
        new (out) mtp::Returned(reinterpret_cast<mtp::Returned (*)()>(mtp::require(function, "function"))());
    });
}
