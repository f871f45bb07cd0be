#include "lanes.h"

#include <cstring>

#if defined(LANES_AVX_VNNI)
#include <cpuid.h>
#elif defined(LANES_NEON) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(LANES_NEON)
#include <sys/auxv.h>
#endif

namespace mtp {

namespace {

constexpr int most_sets = 4;  // of vectors' instructions

#if defined(__x86_64__) && defined(__GNUC__)

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

#if defined(LANES_AVX_VNNI)
bool has_avx_vnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#endif

// A set with other products of quants.
template <product_kernel (*Product)(ggml_type)>
const kernel_set * with_products(const char * name, const kernel_set & all, double (*multiply)(int64_t n)) {
    static product_kernel (*others)(ggml_type) = all.product;
    static kernel_set set = all;
    set.name = name;
    set.multiply = multiply;
    set.product = [](ggml_type type) {
        const product_kernel product = Product(type);
        return product ? product : others(type);
    };
    return &set;
}

#elif defined(LANES_NEON)

#if defined(__APPLE__)
bool has(const char * feature) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value;
}
bool has_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has("hw.optional.arm.FEAT_I8MM"); }
#else
bool has_dotprod() { return getauxval(AT_HWCAP) & (1ul << 20); }  // HWCAP_ASIMDDP
bool has_i8mm() { return getauxval(AT_HWCAP2) & (1ul << 13); }    // HWCAP2_I8MM
#endif

// Without the types for which a single column takes no fewer instructions than with ggml's kernels, which repack q8_0 and
// accumulate f16 in half floats.
const kernel_set * cheaper(const kernel_set & all) {
    static product_kernel (*product)(ggml_type) = all.product;
    static kernel_set set = all;
    set.product = [](ggml_type type) { return type == GGML_TYPE_Q8_0 || type == GGML_TYPE_F16 ? nullptr : product(type); };
    return &set;
}

#endif

}  // namespace

bool has_word(const char * words, const char * word) {
    const size_t n = strlen(word);
    for (const char * at = words; at && (at = strstr(at, word)); at += n) {
        if ((at == words || at[-1] == ',') && (at[n] == ',' || at[n] == 0)) {
            return true;
        }
    }
    return false;
}

int candidates_of(ggml_type type, int64_t block, int columns, const kernel_set & kernels, const char * restriction,
                  candidate (&to)[most_candidates]) {
    struct {
        const char * name;
        product_kernel product;
    } sets[most_sets] = { { kernels.name, kernels.product(type) } };
    int n_sets = 1, n = 0;
    bool once = false, two = false, panels = false;
#if defined(__x86_64__) && defined(__GNUC__)
    // Products of quants have the same bits with all of these; those of floats have not.
    const auto add = [&](bool has, const char * name, product_kernel (*product)(ggml_type)) {
        if (has && strcmp(name, kernels.name)) {
            sets[n_sets++] = { name, product(type) };
        }
    };
    if (block > 1 && !has_word(restriction, "avx512") && !has_word(restriction, "avx_vnni") && !has_word(restriction, "avx2")) {
#if defined(LANES_AVX_VNNI)
        add(has_avx_vnni(), "AVX_VNNI", avx_vnni_product);
#endif
        add(has_avx512(), avx512_kernels.name, avx512_kernels.product);
        add(has_avx2(), avx2_kernels.name, avx2_kernels.product);
    }
    once = block == 1 || class_columns[columns] <= LANES_COLS;  // there is one way to prefetch for panels
    two = block == QK_K && class_columns[columns] == 1;
    panels = block > 1 && class_columns[columns] > 4 && class_columns[columns] <= LANES_COLS;
#else
    (void) block;
    (void) columns;
#endif
    // Whether the restriction says that something is to be so (`word`) or not to be (`other`), where both are possible
    const auto fits = [&](bool is, bool possible, const char * word, const char * other) {
        return possible ? !has_word(restriction, is ? other : word) : !is;
    };
    for (int set = 0; set < n_sets; set++) {
        for (int i = 0; i < 8; i++) {
            const reading how = { (i & 1) != 0, (i & 2) != 0, (i & 4) != 0 };
            if (sets[set].product && fits(how.panels, panels, "panels", "rows") &&
                fits(how.once, once && !how.panels, "hint", "no_hint") && fits(how.two, two, "two_streams", "one_stream")) {
                to[n++] = { sets[set].name, sets[set].product, how, 8 * set + i };
            }
        }
    }
    // A tile has 16 columns: of fewer, most of its work is in vain.
    if (block == QK_K && class_columns[columns] >= 16 && kernels.multiply == amx_multiply) {
        n = has_word(restriction, "amx") ? 0 : n;
        to[n++] = { "AMX", amx_product(type), {}, 8 * most_sets };
    }
    if (n == 0) {  // the words contradict each other
        to[n++] = { sets[0].name, sets[0].product, {}, 0 };
    }
    return n;
}

const kernel_set * choose_kernels(const char * restriction) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    const bool avx2 = has_word(restriction, "avx2"), avx_vnni = has_word(restriction, "avx_vnni");
    if (has_avx512() && !avx2 && !avx_vnni) {
        return __builtin_cpu_supports("avx512vnni") && !has_word(restriction, "avx512")
                   ? with_products<avx512_vnni_product>(
                         "AVX512_VNNI", avx512_kernels,
                         !has_word(restriction, "no_amx") && has_amx() ? amx_multiply : avx512_vnni_multiply)
                   : &avx512_kernels;
    }
#if defined(LANES_AVX_VNNI)
    if (has_avx_vnni() && !avx2) {
        return with_products<avx_vnni_product>("AVX_VNNI", avx2_kernels, avx_vnni_multiply);
    }
#endif
    return has_avx2() ? &avx2_kernels : nullptr;
#elif defined(LANES_NEON)
    if (!has_dotprod()) {
        return nullptr;
    }
    const kernel_set & best = has_i8mm() && !has_word(restriction, "dotprod") ? neon_i8mm_kernels : neon_dotprod_kernels;
    return has_word(restriction, "all") ? &best : cheaper(best);
#else
    (void) restriction;
    (void) has_word;
    return nullptr;
#endif
}

}  // namespace mtp
