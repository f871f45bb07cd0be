#pragma once
// The dimensions of each MTP block of a head, read from a GGUF's metadata and checked against limits.

#include "head/gguf_file.h"

#include <cstdint>
#include <string>
#include <vector>

namespace mtp {

struct HeadConfig {
    std::string arch; // general.architecture
    bool moe;
    bool mrope;       // rotates text by rope_sections, and not as NeoX
    bool gated;       // the query matrix has a gate of the attention's output per head
    bool head_gated;  // each head's output has a gate, if the block has their matrix
    bool passes_norm; // the next step takes the hidden state after the head's norm, and not before it
    const char * ffn_norm; // suffix of the norm before the feed-forward network
    int block;        // N of blk.N

    int64_t n_embd;
    int64_t n_head;
    int64_t n_head_kv;
    int64_t head_dim;
    int64_t window;        // how many positions attention sees, its own included; 0 for all
    int64_t n_ff;          // dense only
    int64_t n_expert;      // MoE only, as the next seven
    int64_t n_expert_used;
    int64_t n_ff_expert;
    int64_t n_ff_shared;   // 0 if not known
    bool    sigmoid_router; // experts are chosen by sigmoids and a bias, and not by a softmax
    bool    normed_shares;  // the weights of the chosen experts are divided by their sum
    float   expert_scale;  // factor on the experts' weights, 1 if the file has none
    float   expert_limit;  // on the activations of the chosen experts, 0 for none
    float   ffn_limit;     // of the shared expert or the dense network
    float   norm_eps;

    // Arguments of ggml's rope, as llama.cpp derives them from the same keys.
    int   n_rot;
    int   rope_sections[4];
    int   n_ctx_orig;
    float freq_base;
    float freq_scale;
    float ext_factor;
    float attn_factor;
    float beta_fast;
    float beta_slow;
    bool  rope_factors; // on the frequencies: rope_freqs.weight, if there is one

    int64_t kv_width() const { return head_dim * n_head_kv; }

    // Rows of the query matrix.
    int64_t query_rows() const { return (gated ? 2 : 1) * head_dim * n_head; }

    // "blk.<N>.<suffix>"
    std::string name(const std::string & suffix) const;

    // One of each block: layer i of several drafts in step i, and a single one in every step.
    // MTP_ERROR_NO_HEAD for a model without an MTP block, MTP_ERROR_UNSUPPORTED for another
    // architecture, MTP_ERROR_FORMAT for invalid values.
    static std::vector<HeadConfig> read(const GgufFile & file);
};

} // namespace mtp
