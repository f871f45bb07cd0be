#pragma once
// One graph evaluation: feeds R rows into the MTP layer's cache, then drafts D tokens without leaving
// the device.
//
// Step 1 uses the last fed row; each later step uses the embedding of the previous step's token and the
// block's own hidden state after its norm. Only keys and values are computed for the fed rows, except
// for the last one. Rows of the cache beyond the last position hold leftovers of earlier drafts; the
// mask hides them until they are overwritten.

#include "head_cache.h"
#include "head_config.h"
#include "weights.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace mtp {

// How drafts are sampled: from the softmax of logits / temperature, without tokens whose logit is too
// far below the largest.
struct Drawing {
    float inverse_temperature;
    float cutoff;                 // <= 0, distance from the largest logit
    std::vector<double> uniforms; // two for each step, in [0, 1)
};

class DraftGraph {
public:
    // The parameters of a graph; calls with equal keys share one.
    struct Key {
        int64_t capacity; // of the sequence's cache
        int64_t rows;     // R >= 1
        int64_t depth;    // D >= 0
        int64_t n_kv;     // rows of the cache that attention reads, a multiple of CACHE_BUCKET; 0 when D is 0
        bool draws = false; // drafts are sampled from the head's distribution instead of its argmax

        bool operator==(const Key & other) const {
            return capacity == other.capacity && rows == other.rows && depth == other.depth && n_kv == other.n_kv &&
                   draws == other.draws;
        }
    };

    // seq: any sequence with the key's capacity; its tensors determine buffer and type. Throws
    // MTP_ERROR_UNSUPPORTED, naming op and type, if the backend cannot run the graph.
    DraftGraph(const Key & key, const HeadConfig & config, const BlockTensors & weights, const HeadCache & cache,
               int seq, ggml_backend_t backend);

    const Key & key() const { return key_; }

    // Memory of the activations and of the graph itself.
    size_t bytes() const;

    // Runs on a sequence with the key's capacity. embedding, hidden: [R][n_embd]. first: the position of
    // row 0. drawing: required if the graph samples.
    void run(const HeadCache & cache, int seq, const float * embedding, const float * hidden, int64_t first,
             const Drawing * drawing);

    // The result of a step (from 0): its index in the draft vocabulary, its probability, all logits. The
    // probability is 0 if a sampling graph had no valid distribution, as with NaNs.
    int32_t index(int64_t step) const;
    float probability(int64_t step) const;
    void logits(int64_t step, float * out) const;

    // The distribution that a step of a sampling graph used, [draft vocabulary].
    void drawn_from(int64_t step, std::vector<double> & out) const;

    // Adds the names of the ops: "MUL_MAT", "UNARY:SIGMOID", "GLU:SWIGLU".
    void collect_ops(std::set<std::string> & names) const;

private:
    class Builder;

    void bind(const ggml_tensor * keys, const ggml_tensor * values);

    Key key_;
    ggml_backend_t backend_;
    ggml_context_ptr context_;
    ggml_gallocr_ptr allocator_;
    ggml_cgraph * graph_ = nullptr;

    ggml_tensor * keys_ = nullptr;           // [kv_width, capacity] F16, where the sequence's are
    ggml_tensor * values_ = nullptr;         // the same
    std::vector<ggml_tensor *> cache_views_; // of these two
    ggml_tensor * embedding_ = nullptr;      // [n_embd, R]
    ggml_tensor * hidden_ = nullptr;         // [n_embd, R]
    ggml_tensor * feed_positions_ = nullptr; // [4 R] I32
    ggml_tensor * feed_slots_ = nullptr;     // [R] I64, rows of the sequence's cache
    ggml_tensor * step_positions_ = nullptr; // [4, D] I32
    ggml_tensor * step_slots_ = nullptr;     // [D] I64
    ggml_tensor * mask_ = nullptr;           // [n_kv, D] F16
    ggml_tensor * sharpness_ = nullptr;      // [1] F32, inverse temperature
    ggml_tensor * cutoff_ = nullptr;         // [1] F32, of a logit below the largest
    ggml_tensor * uniforms_ = nullptr;       // [4, D] F32, each uniform in two parts
    std::vector<ggml_tensor *> weights_;       // D of [DRAW_BLOCK, blocks] F32, zeros at the end
    std::vector<ggml_tensor *> block_shares_;  // D of [blocks] F32, running shares of the total
    std::vector<ggml_tensor *> inner_shares_;  // D of [DRAW_BLOCK] F32, those in the block drawn
    std::vector<ggml_tensor *> indices_;       // D of [1] I32
    std::vector<ggml_tensor *> probabilities_; // D of [1, 1] F32, for a graph that does not draw
    std::vector<ggml_tensor *> logits_;        // D of [draft vocabulary, 1] F32
};

} // namespace mtp
