#include "choose.h"

#include "ggml.h"
#include "rows.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

// The instruction sets that CMakeLists.txt compiles kernels.cpp for, best first.
#if defined(__x86_64__)
namespace avx512 { extern const KernelSet KERNELS[]; }
namespace avx2 { extern const KernelSet KERNELS[]; }
namespace sse2 { extern const KernelSet KERNELS[]; }
#elif defined(__aarch64__)
namespace neon { extern const KernelSet KERNELS[]; }
#else
namespace generic { extern const KernelSet KERNELS[]; }
#endif

namespace {

struct Target {
    const char *      name;
    const KernelSet * kernels;  // NULL: ggml
};

std::vector<Target> find_targets() {
    std::vector<Target> targets;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        targets.push_back({"avx512", avx512::KERNELS});
    }
    if (__builtin_cpu_supports("avx2")) targets.push_back({"avx2", avx2::KERNELS});
    targets.push_back({"sse2", sse2::KERNELS});
#elif defined(__aarch64__)
    targets.push_back({"neon", neon::KERNELS});
#else
    targets.push_back({"generic", generic::KERNELS});
#endif
    targets.push_back({"ggml", nullptr});
    return targets;
}

const std::vector<Target> & targets() {
    static const std::vector<Target> found = find_targets();
    return found;
}

// The forced target, or the best one; NULL if the forced one does not exist.
const Target * find_target() {
    const char * forced = std::getenv("MTP_QUANTIZE_TARGET");
    if (!forced || !*forced) return &targets().front();
    for (const Target & target : targets()) {
        if (!std::strcmp(target.name, forced)) return &target;
    }
    return nullptr;
}

const Target * target() {
    static const Target * const chosen = find_target();
    return chosen;
}

// Values for the comparison with ggml: blocks of noise at different scales, then special values.
std::vector<float> sample(int64_t n_blocks, int64_t length) {
    std::vector<float> values(n_blocks * length);
    uint64_t state = 1;
    const auto uniform = [&] {  // in [-1, 1); Knuth's MMIX generator
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (float) ((int32_t) (state >> 32)) * 0x1p-31f;
    };
    for (int64_t block = 0; block < n_blocks; ++block) {
        float * const x = values.data() + block * length;
        const float size = std::ldexp(1.f, (int) (block % 24) - 16);
        for (int64_t i = 0; i < length; ++i) x[i] = size * (uniform() + uniform() + uniform());
        switch (block % 64) {
            case 0: for (int64_t i = 0; i < length; ++i) x[i] = 0; break;
            case 1: for (int64_t i = 0; i < length; ++i) x[i] = size; break;
            case 2: for (int64_t i = 0; i < length; ++i) x[i] = -size; break;
            case 3: for (int64_t i = 0; i < length; ++i) x[i] = i % 2 ? size : -size; break;
            case 4: x[block / 64 % length] = 1000 * size; break;
            case 5: for (int64_t i = 0; i < length; ++i) x[i] *= 0x1p-130f; break;  // denormal
            case 6: for (int64_t i = 0; i < length; ++i) x[i] *= 0x1p110f; break;
            case 7: for (int64_t i = 0; i < length; ++i) x[i] = std::fabs(x[i]); break;
            case 8: for (int64_t i = length / 4; i < length; ++i) x[i] = 0; break;
            case 9: for (int64_t i = 0; i < length; ++i) x[i] = std::round(x[i] / size) * size; break;
            case 10: for (int64_t i = 0; i < length; ++i) x[i] *= i < 32 ? 1 : 0x1p-12f; break;
            default: break;
        }
    }
    return values;
}

// Whether the kernel and ggml produce the same bytes for the sample.
bool agrees(int type, Kernel kernel, bool with_importance) {
    const int64_t length   = ggml_blck_size((ggml_type) type);
    const int64_t n_blocks = length < 256 ? 4096 : 1024, blocks_per_row = 4;
    const std::vector<float> values = sample(n_blocks, length);
    std::vector<float> importance;
    if (with_importance) {
        importance = sample(blocks_per_row, length);
        for (float & weight : importance) weight = weight * weight * 0x1p20f;
    }
    const float * weights  = with_importance ? importance.data() : nullptr;
    const int64_t n_rows   = n_blocks / blocks_per_row, row_length = blocks_per_row * length;
    const size_t  n_bytes  = n_rows * ggml_row_size((ggml_type) type, row_length);
    std::vector<uint8_t> ours(n_bytes), theirs(n_bytes);
    const Rows rows = {type, GGML_TYPE_F32, values.data(), n_rows, row_length, weights};
    int64_t n_not_finite = 0;
    quantize_by_kernel(rows, kernel, ours.data(), &n_not_finite);
    quantize_by_ggml(rows, theirs.data());
    return ours == theirs;
}

// Types whose bytes cannot depend on contraction, because no rounded product is ever added to anything.
bool adds_no_product(int type) { return type == GGML_TYPE_Q8_0 || type == GGML_TYPE_F16; }

// A ggml that contracts products and sums produces different bytes for a quarter of the Q5_K sample, but
// in other types for as little as one block in thousands or millions, which the sample can miss. All types
// are compiled together, so Q5_K decides for all of them.
bool witness_agrees(int type, bool with_importance) {
    if (adds_no_product(type) || (type == GGML_TYPE_Q5_K && !with_importance)) return true;
    return choose(GGML_TYPE_Q5_K, false).kernels.f32;
}

Choice make_choice(int type, bool with_importance) {
    const Choice none = {{}, "ggml"};
    if (!target() || !target()->kernels) return none;
    for (const KernelSet * set = target()->kernels; set->type >= 0; ++set) {
        const KernelSet::BySource & kernels = with_importance ? set->weighted : set->plain;
        if (set->type != type || !kernels.f32) continue;
        if (!witness_agrees(type, with_importance) || !agrees(type, kernels.f32, with_importance)) {
            return {{}, "ggml: this build of it rounds differently from the kernel"};
        }
        return {kernels, target()->name};
    }
    return none;
}

}  // namespace

const Choice & choose(int type, bool with_importance) {
    static std::once_flag once[GGML_TYPE_COUNT][2];
    static Choice         choices[GGML_TYPE_COUNT][2];
    Choice & choice = choices[type][with_importance];
    std::call_once(once[type][with_importance], [&] { choice = make_choice(type, with_importance); });
    return choice;
}

const char * target_names() {
    static const std::string names = [] {
        std::string joined;
        for (const Target & target : targets()) joined += (joined.empty() ? "" : " ") + std::string(target.name);
        return joined;
    }();
    return names.c_str();
}

bool target_exists() { return target() != nullptr; }
