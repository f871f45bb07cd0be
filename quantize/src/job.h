// The input of a kernel, the same for every instruction set.
#pragma once

#include <stdint.h>

// Sixteen-bit floats as stored in memory; distinct from integers so that loads can be overloaded.
struct F16 { uint16_t bits; };
struct BF16 { uint16_t bits; };

// Consecutive blocks to quantize, and a callback for blocks that the kernel cannot handle.
struct Job {
    const void *  source;          // values of `n_blocks` blocks, F32, F16 or BF16 by the kernel
    int64_t       n_blocks;
    int64_t       blocks_per_row;
    const float * importance;      // a weight for each column of a row, or NULL; then block 0
                                   // is the first of a row
    uint8_t *     out;

    // Called for each block whose result may differ from ggml's, after its bytes are written: it contains
    // NaN or infinity, or its arithmetic left the range that the kernel assumes.
    void (*leave)(const Job & job, int64_t block, bool is_finite);
    void * context;                // for `leave`
};

using Kernel = void (*)(const Job &);

// The kernels of one type.
struct KernelSet {
    struct BySource { Kernel f32, f16, bf16; };  // all NULL: ggml quantizes it

    int      type;  // enum ggml_type
    BySource plain, weighted;
};
