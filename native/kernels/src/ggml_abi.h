// What the library knows of ggml's insides: the structures that ggml-cpu passes to operations, its entry for other
// implementations of operations, and the blocks of quantized types. registration.cpp checks the first two against the ggml that
// runs before anything is used; the blocks are file formats.
//
// ggml_tensor and the numbers of types are those of the public ggml.h.

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

struct ggml_threadpool;

// As the CPU backend passes it to an operation, once for each thread.
struct ggml_compute_params {
    int ith, nth;
    size_t wsize;
    void * wdata;
    ggml_threadpool * threadpool;
    bool use_ref;  // of newer versions; see ggml_api::has_use_ref
};

// An entry of ggml-cpu's list: functions, the first of which returns its name, whose number varies with the version; a
// device; a context, which is an extra_buffer_type.
struct ggml_backend_buffer_type;

namespace mtp {

// The virtual functions of ggml::cpu::tensor_traits and ggml::cpu::extra_buffer_type in their order. They are classes of
// our own, because those of ggml-cpu are not exported everywhere.
class tensor_traits {
public:
    virtual ~tensor_traits() = default;
    // Whether `size` is the work memory that the operation needs with so many threads; called while a graph is planned.
    virtual bool work_size(int n_threads, const ggml_tensor * op, size_t & size) = 0;
    // Whether the operation was computed; called by each thread.
    virtual bool compute_forward(ggml_compute_params * params, ggml_tensor * op) = 0;
};

class extra_buffer_type {
public:
    virtual ~extra_buffer_type() = default;
    virtual bool supports_op(void * device, const ggml_tensor * op) = 0;
    virtual tensor_traits * get_tensor_traits(const ggml_tensor * op) = 0;
};

}  // namespace mtp

#define QK_K 256
#define QK8_0 32

struct block_q4_K {
    uint16_t d, dmin;
    uint8_t scales[12];  // scales and minima of 6 bits
    uint8_t qs[QK_K / 2];
};
static_assert(sizeof(block_q4_K) == 144, "a block of 256 in 4.5 bits");

struct block_q5_K {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qh[QK_K / 8];
    uint8_t qs[QK_K / 2];
};
static_assert(sizeof(block_q5_K) == 176, "a block of 256 in 5.5 bits");

struct block_q6_K {
    uint8_t ql[QK_K / 2];
    uint8_t qh[QK_K / 4];
    int8_t scales[QK_K / 16];
    uint16_t d;
};
static_assert(sizeof(block_q6_K) == 210, "a block of 256 in 6.5625 bits");

struct block_iq4_xs {
    uint16_t d;
    uint16_t scales_h;
    uint8_t scales_l[QK_K / 64];
    uint8_t qs[QK_K / 2];
};
static_assert(sizeof(block_iq4_xs) == 136, "a block of 256 in 4.25 bits");

struct block_q8_0 {
    uint16_t d;
    int8_t qs[QK8_0];
};
static_assert(sizeof(block_q8_0) == 34, "a block of 32 in 8.5 bits");

struct block_q2_K {
    uint8_t scales[QK_K / 16];  // scales in the low halves, minima in the high ones
    uint8_t qs[QK_K / 4];
    uint16_t d, dmin;
};
static_assert(sizeof(block_q2_K) == 84, "a block of 256 in 2.625 bits");

struct block_q3_K {
    uint8_t hmask[QK_K / 8];
    uint8_t qs[QK_K / 4];
    uint8_t scales[12];  // of 6 bits
    uint16_t d;
};
static_assert(sizeof(block_q3_K) == 110, "a block of 256 in 3.4375 bits");

struct block_tq2_0 {
    uint8_t qs[QK_K / 4];
    uint16_t d;
};
static_assert(sizeof(block_tq2_0) == 66, "a block of 256 in 2.0625 bits");

// Types whose elements are magnitudes from a table, with signs; see lanes/lanes-grid-formats.h.

struct block_iq3_xxs {
    uint16_t d;
    uint8_t qs[QK_K / 4];     // numbers of the table, for four elements each
    uint8_t signs[QK_K / 8];  // of each 32 elements four times 7 bits, and 4 bits of scale
};
static_assert(sizeof(block_iq3_xxs) == 98, "a block of 256 in 3.0625 bits");

struct block_iq3_s {
    uint16_t d;
    uint8_t qs[QK_K / 4];
    uint8_t qh[QK_K / 32];    // the ninth bits
    uint8_t signs[QK_K / 8];  // a bit for each element
    uint8_t scales[QK_K / 64];
};
static_assert(sizeof(block_iq3_s) == 110, "a block of 256 in 3.4375 bits");

struct block_iq2_xxs {
    uint16_t d;
    uint8_t qs[QK_K / 4];  // of each 32 elements four numbers of the table, four times 7 bits of signs and 4 bits of scale
};
static_assert(sizeof(block_iq2_xxs) == 66, "a block of 256 in 2.0625 bits");

struct block_iq2_xs {
    uint16_t d;
    uint16_t qs[QK_K / 8];  // for eight elements 9 bits of number and 7 of signs
    uint8_t scales[QK_K / 32];
};
static_assert(sizeof(block_iq2_xs) == 74, "a block of 256 in 2.3125 bits");

struct block_iq2_s {
    uint16_t d;
    uint8_t qs[QK_K / 8];     // for eight elements the low 8 bits of the number
    uint8_t signs[QK_K / 8];  // a bit for each element
    uint8_t qh[QK_K / 32];    // two more bits of each number
    uint8_t scales[QK_K / 32];
};
static_assert(sizeof(block_iq2_s) == 82, "a block of 256 in 2.5625 bits");

struct block_mxfp4 {
    uint8_t e;  // exponent of a power of two
    uint8_t qs[16];
};
static_assert(sizeof(block_mxfp4) == 17, "a block of 32 in 4.25 bits");

struct block_nvfp4 {
    uint8_t d[4];    // UE4M3 scales of 16 elements each
    uint8_t qs[32];  // of each 16 elements 0 to 7 in the low halves, 8 to 15 in the high ones
};
static_assert(sizeof(block_nvfp4) == 36, "a block of 64 in 4.5 bits");

struct block_q2_0 {
    uint16_t d;
    uint8_t qs[16];  // four consecutive elements in a byte, the first in the lowest bits
};
static_assert(sizeof(block_q2_0) == 18, "a block of 64 in 2.25 bits");

struct block_q4_0 {
    uint16_t d;
    uint8_t qs[16];  // elements 0 to 15 in the low halves, 16 to 31 in the high ones
};
static_assert(sizeof(block_q4_0) == 18, "a block of 32 in 4.5 bits");

struct block_q4_1 {
    uint16_t d, m;
    uint8_t qs[16];
};
static_assert(sizeof(block_q4_1) == 20, "a block of 32 in 5 bits");

struct block_q5_0 {
    uint16_t d;
    uint8_t qh[4];
    uint8_t qs[16];
};
static_assert(sizeof(block_q5_0) == 22, "a block of 32 in 5.5 bits");

struct block_q5_1 {
    uint16_t d, m;
    uint8_t qh[4];
    uint8_t qs[16];
};
static_assert(sizeof(block_q5_1) == 24, "a block of 32 in 6 bits");

// Activations that are multiplied with blocks of 256
struct block_q8_K {
    float d;
    int8_t qs[QK_K];
    int16_t bsums[QK_K / 16];  // of 16 elements
};
static_assert(sizeof(block_q8_K) == 292, "a block of 256 bytes, their scale and sums");
