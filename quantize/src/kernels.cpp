// The kernels of one instruction set; CMakeLists.txt compiles this file once for each, with
// MTP_TARGET as the namespace and the instruction set's own flags.
#include "rounding_formats.h"
#include "scale_formats.h"
#include "scale_min_formats.h"
#include "table_formats.h"

namespace MTP_TARGET {

template <typename Format, typename Source, bool Weighted> void run(const Job & job) {
    const Source * source = (const Source *) job.source;
    for (int64_t first = 0; first < job.n_blocks; first += LANES) {
        const int64_t rest  = job.n_blocks - first;
        const int     count = rest < LANES ? (int) rest : LANES;
        // Lanes without a block repeat the last one.
        const Source * blocks[LANES];
        const float *  weights[LANES];
        for (int lane = 0; lane < LANES; ++lane) {
            const int64_t block = first + (lane < count ? lane : count - 1);
            blocks[lane] = source + block * Format::LENGTH;
            if (Weighted) weights[lane] = job.importance + block % job.blocks_per_row * Format::LENGTH;
        }
        Float values[Format::LENGTH], importance[Weighted ? Format::LENGTH : 1];
        load_lanes<Format::LENGTH>(blocks, values);
        if (Weighted) load_lanes<Format::LENGTH>(weights, importance);

        Int words[(Format::BYTES + 3) / 4];
        const Mask irregular = Format::template quantize<Weighted>(values, importance, words);
        const Mask infinite  = not_finite<Format::LENGTH>(values);
        store_lanes<Format::BYTES>(words, job.out + first * Format::BYTES, count);
        if (any(irregular | infinite)) {
            for (int lane = 0; lane < count; ++lane) {
                if (irregular[lane] | infinite[lane]) job.leave(job, first + lane, !infinite[lane]);
            }
        }
    }
}

template <typename Format, bool Weighted> constexpr KernelSet::BySource by_source() {
    return {run<Format, float, Weighted>, run<Format, F16, Weighted>, run<Format, BF16, Weighted>};
}

template <typename Format> constexpr KernelSet kernels_of() {
    if constexpr (Format::IMPORTANCE == Importance::USED) {
        return {Format::TYPE, by_source<Format, false>(), by_source<Format, true>()};
    } else if constexpr (Format::IMPORTANCE == Importance::IGNORED) {
        return {Format::TYPE, by_source<Format, false>(), by_source<Format, false>()};
    } else {
        return {Format::TYPE, by_source<Format, false>(), {}};
    }
}

constexpr KernelSet::BySource TO_F16 = {round_to_f16<float>, round_to_f16<F16>, round_to_f16<BF16>};

// The list ends with type -1.
extern const KernelSet KERNELS[];
const KernelSet KERNELS[] = {
    {1, TO_F16, TO_F16},
    kernels_of<Q40>(),
    kernels_of<Q80>(),
    kernels_of<Q2K>(),
    kernels_of<Q3K>(),
    kernels_of<ScaleMinFormat<12, 4>>(),
    kernels_of<ScaleMinFormat<13, 5>>(),
    kernels_of<Q6K>(),
    kernels_of<IQ4NL>(),
    kernels_of<IQ4XS>(),
    {-1, {}, {}},
};

}  // namespace MTP_TARGET
