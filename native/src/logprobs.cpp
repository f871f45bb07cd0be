// Log-probabilities of tokens, from rows of logits: for llama-server (server/prompt_logprobs.h) and for Python. A row takes about
// as long as it takes to read it from memory.

#include "error.h"
#include "threads.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__GNUC__) && defined(__x86_64__)
#define MTP_X86_TARGETS
#endif

namespace mtp {
namespace {

constexpr int block = 1024; // logits of which the largest is noted; their exponentials are added as floats

#define MTP_INLINE inline __attribute__((always_inline))

template <int n_bytes> struct Vectors {
    typedef float   Floats __attribute__((vector_size(n_bytes)));
    typedef int32_t Ints __attribute__((vector_size(n_bytes)));
    static constexpr int width = n_bytes / 4;
};

// Store a vector of the logits from `at` to `end`; where there are no more, of the least ones. (Compilers warn of functions that
// return vectors.)
template <typename V> MTP_INLINE void load(const float * at, const float * end, typename V::Floats & out) {
    out = typename V::Floats{} - INFINITY;
    std::memcpy(&out, at, std::min<size_t>(V::width, size_t(end - at)) * sizeof(float));
}

template <typename V> MTP_INLINE void block_maxima(const float * logits, int n, float * out) {
    for (int first = 0; first < n; first += block) {
        const float *      end  = logits + std::min(first + block, n);
        typename V::Floats best = typename V::Floats{} - INFINITY;
        for (const float * at = logits + first; at < end; at += V::width) {
            typename V::Floats in;
            load<V>(at, end, in);
            best = in > best ? in : best;
        }
        float largest = best[0];
        for (int i = 1; i < V::width; ++i) {
            largest = std::max(largest, best[i]);
        }
        *out++ = largest;
    }
}

// The sum of exp(logit - best), each to the last bits of a float.
template <typename V> MTP_INLINE double exp_sum(const float * logits, int n, float best) {
    using Floats       = typename V::Floats;
    const Floats least = Floats{} - 87.0f; // below it exp is no normal float
    double       sum   = 0;
    for (int first = 0; first < n; first += block) {
        const float * end  = logits + std::min(first + block, n);
        Floats        sums = {};
        for (const float * at = logits + first; at < end; at += V::width) {
            // exp(x) = 2^whole * exp(rest) with |rest| <= ln(2) / 2, by a polynomial
            Floats x;
            load<V>(at, end, x);
            x -= best;
            x = x > least ? x : least; // also of a NaN
            const auto   whole    = __builtin_convertvector(x * 1.44269504f - 0.5f, typename V::Ints);
            const Floats exponent = __builtin_convertvector(whole, Floats);
            const Floats rest     = (x - exponent * 0.693359375f) + exponent * 2.12194440e-4f;
            Floats       value    = Floats{} + 1 / 5040.0f;
            for (const float factor : {1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f, 1.0f, 1.0f}) {
                value = value * rest + factor;
            }
            const auto bits = (whole + 127) << 23;
            Floats     power;
            std::memcpy(&power, &bits, sizeof(power));
            sums += value * power;
        }
        for (int i = 0; i < V::width; ++i) {
            sum += sums[i];
        }
    }
    return sum;
}

// The two functions with the vectors of a CPU.
struct Kernels {
    void (*maxima)(const float *, int, float *);
    double (*sum)(const float *, int, float);
};

#define MTP_KERNELS(name, n_bytes, target)                                                                               \
    target void maxima_##name(const float * logits, int n, float * out) {                                                \
        block_maxima<Vectors<n_bytes>>(logits, n, out);                                                                  \
    }                                                                                                                    \
    target double sum_##name(const float * logits, int n, float best) { return exp_sum<Vectors<n_bytes>>(logits, n, best); }

MTP_KERNELS(any, 16, )
#ifdef MTP_X86_TARGETS
MTP_KERNELS(avx2, 32, __attribute__((target("avx2,fma"))))
MTP_KERNELS(avx512, 64, __attribute__((target("avx512f"))))
#endif

Kernels kernels() {
#ifdef MTP_X86_TARGETS
    if (__builtin_cpu_supports("avx512f")) {
        return {maxima_avx512, sum_avx512};
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return {maxima_avx2, sum_avx2};
    }
#endif
    return {maxima_any, sum_any};
}

using Likely = std::pair<float, int32_t>; // a logit and its token

bool likelier(const Likely & a, const Likely & b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
}

// Keep in `top`, a heap with the least likely one in front, the likeliest tokens, of which it has room for n_top.
void find_top(const float * logits, int n, const std::vector<float> & maxima, size_t n_top, std::vector<Likely> & top) {
    top.clear();
    for (int first = 0; n_top > 0 && first < n; first += block) {
        if (top.size() == n_top && !(maxima[size_t(first / block)] > top.front().first)) {
            continue;
        }
        for (int id = first; id < std::min(first + block, n); ++id) {
            const Likely found = {logits[id], id};
            if (top.size() == n_top) {
                if (!likelier(found, top.front())) {
                    continue;
                }
                std::pop_heap(top.begin(), top.end(), likelier);
                top.pop_back();
            }
            top.push_back(found);
            std::push_heap(top.begin(), top.end(), likelier);
        }
    }
    std::sort_heap(top.begin(), top.end(), likelier);
}

// As mtp_token_logprobs.
void token_logprobs(const float * const * rows, const int32_t * tokens, int n, int n_vocab, int n_top, int n_threads,
                    double * out, int32_t * out_top_ids, double * out_top) {
    struct Scratch { // nothing is allocated in threads, where it could not be reported
        std::vector<float>  maxima;
        std::vector<Likely> top;
    };
    static const Kernels use = kernels();
    n_threads = std::max(1, std::min(n_threads, n));
    std::vector<Scratch> scratch{size_t(n_threads)};
    for (Scratch & own : scratch) {
        own.maxima.resize(size_t((n_vocab + block - 1) / block));
        own.top.reserve(size_t(n_top));
    }
    in_threads(n_threads, [&](int thread) {
        auto & [maxima, top] = scratch[size_t(thread)];
        for (int i = thread; i < n; i += n_threads) {
            const float * logits = rows[i];
            use.maxima(logits, n_vocab, maxima.data());
            const float  best = *std::max_element(maxima.begin(), maxima.end());
            const double norm = best + std::log(use.sum(logits, n_vocab, best));
            out[i]            = logits[tokens[i]] - norm;
            find_top(logits, n_vocab, maxima, size_t(n_top), top);
            for (size_t j = 0; j < top.size(); ++j) {
                out_top_ids[size_t(i) * size_t(n_top) + j] = top[j].second;
                out_top[size_t(i) * size_t(n_top) + j]     = top[j].first - norm;
            }
        }
    });
}

} // namespace
} // namespace mtp

using mtp::guard;
using mtp::require;
using mtp::require_range;

mtp_status mtp_token_logprobs(const float * const * rows, const int32_t * tokens, int32_t n, int32_t n_vocab, int32_t n_top,
                              int32_t n_threads, double * out, int32_t * out_top_ids, double * out_top) {
    return guard([&] {
        require_range(n, 0, INT32_MAX, "n");
        require_range(n_vocab, 1, 1 << 30, "n_vocab");
        require_range(n_top, 0, n_vocab, "n_top");
        require_range(n_threads, 1, INT32_MAX, "n_threads");
        for (int32_t i = 0; i < n; ++i) {
            require(require(rows, "rows")[i], "rows");
            require_range(require(tokens, "tokens")[i], 0, n_vocab - 1, "tokens");
        }
        if (n > 0) {
            require(out, "out");
        }
        if (n > 0 && n_top > 0) {
            require(out_top_ids, "out_top_ids");
            require(out_top, "out_top");
        }
        mtp::token_logprobs(rows, tokens, n, n_vocab, n_top, n_threads, out, out_top_ids, out_top);
    });
}
