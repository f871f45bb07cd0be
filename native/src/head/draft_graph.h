#pragma once
// One graph evaluation: feeds rows into the MTP layers' caches, then drafts tokens without leaving the
// device. Several sequences can share it: their rows go through each weight together, and only
// attention looks at one sequence at a time.
//
// Step 1 uses a sequence's last fed row; each later step uses the embedding of the previous step's token
// and the block's own hidden state. Only keys and values are computed for the fed rows, except for the last
// one. Rows of the cache beyond the last position hold leftovers of earlier drafts; the mask hides them
// until they are overwritten.
//
// Of several layers each has a step of its own. All are fed the same rows. A step's layer has not seen the
// tokens drafted so far, so it computes its keys and values of them first, from the hidden states that the
// layers before it gave out.

#include "head/draft_vocabulary.h"
#include "head/head_cache.h"
#include "head/head_config.h"
#include "head/imatrix.h"
#include "head/packed_tensors.h"
#include "head/tensor_context.h"
#include "head/weights.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
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
        struct Sequence {
            int seq;       // -1: any sequence whose cache has these rows
            int64_t depth; // tokens to draft, 0 only if it is the only sequence
            int64_t n_kv;  // rows of the cache that are read and written, a multiple of CACHE_BUCKET

            bool operator==(const Sequence & other) const {
                return seq == other.seq && depth == other.depth && n_kv == other.n_kv;
            }
        };
        std::vector<Sequence> sequences; // 1 or more, deepest first
        int64_t rows;                    // R >= 1, fed for each sequence
        bool draws = false;              // the drafts of the only sequence are sampled from the head's distribution
        bool hidden_on_device = false;   // the hidden states are rows of HiddenRows::tensor()
        bool indexed = false;            // the fed tokens are in the draft vocabulary, whose rows are on the device
        bool masks_on_device = false;    // the masks are computed there, from the rows that are visible
        bool collects = false;           // what the blocks' matrices are multiplied by can be read after the run

        int64_t depth() const { return sequences.front().depth; }
        int64_t n() const { return int64_t(sequences.size()); }
        // How many sequences draft in a step (from 0): the first ones.
        int64_t drafting(int64_t step) const;

        bool operator==(const Key & other) const {
            return rows == other.rows && draws == other.draws && hidden_on_device == other.hidden_on_device &&
                   indexed == other.indexed && masks_on_device == other.masks_on_device && collects == other.collects &&
                   sequences == other.sequences;
        }
    };

    // What a run feeds into one sequence: rows at positions first, first + 1, ... . If there are fewer than
    // the key's, the others are padded and write into rows of the cache after the last position. A sequence
    // without rows only fills its place in the graph; what is drafted for it means nothing.
    struct Feed {
        int seq;
        int64_t first;
        const int32_t * tokens;
        const float * hidden; // [rows][n_embd], unless they are on the device
        int64_t rows;
        int64_t on_device = 0; // the first of the sequence's rows there
    };

    // layers, weights: of each layer. seqs: sequences that fit the key; their tensors determine buffer and
    // type. hidden: HiddenRows::tensor(), if they are on the device. Throws MTP_ERROR_UNSUPPORTED, naming op
    // and type, if the backend cannot run the graph.
    DraftGraph(const Key & key, const std::vector<HeadConfig> & layers, const std::vector<BlockTensors> & weights,
               const HeadCache & cache, const std::vector<int> & seqs, ggml_tensor * hidden, ggml_backend_t backend);

    // Whether the backend can compute masks, and the most rows of the cache that one can have then.
    static bool computes_masks(ggml_backend_t backend);
    static constexpr int64_t MOST_MASKED = int64_t(1) << 23; // twice as much is not exact in F32

    const Key & key() const { return key_; }

    // Memory of the activations and of the graph itself.
    size_t bytes() const;

    // Runs on sequences that fit the key, in its order. drawing: required if the graph samples.
    void run(const HeadCache & cache, const DraftVocabulary & vocabulary, const std::vector<Feed> & feeds,
             const Drawing * drawing, Transfers & transfers);

    // The result of a step (from 0) for the key's sequence i: its index in the draft vocabulary, its
    // probability, all logits. The probability is 0 if a sampling graph had no valid distribution, as with
    // NaNs.
    int32_t index(int64_t i, int64_t step) const;
    float probability(int64_t i, int64_t step) const;
    void logits(int64_t i, int64_t step, float * out) const;

    // The probabilities that a step of a sampling graph gave to these indices of the draft vocabulary.
    std::vector<double> drawn_from(int64_t step, const std::vector<int32_t> & indices, Transfers & transfers);

    // Adds what the last run has multiplied the blocks' matrices by, if the key collects.
    void collect(Imatrix & imatrix) const;

    // Adds the names of the ops: "MUL_MAT", "UNARY:SIGMOID", "GLU:SWIGLU".
    void collect_ops(std::set<std::string> & names) const;

private:
    class LayerBuilder;
    class Builder;

    void bind(size_t i, const HeadCache & cache, int seq);
    void write_inputs(const HeadCache & cache, const DraftVocabulary & vocabulary, const std::vector<Feed> & feeds,
                      const Drawing * drawing);

    // A graph that reads the shares of some tokens in their blocks of a step's weights.
    struct ShareReader {
        TensorContext context;
        ggml_gallocr_ptr allocator;
        ggml_cgraph * graph;
        ggml_tensor * places; // [4 n] I32: the blocks, then for each token three entries of its block
        ggml_tensor * sums;   // [3, n]: the running sums up to these entries
    };
    ShareReader make_share_reader(const ggml_tensor * weights, int64_t n) const;
    std::vector<double> shares_on_device(int64_t step, const std::vector<int32_t> & indices, Transfers & transfers);
    std::vector<double> shares_on_host(int64_t step, const std::vector<int32_t> & indices, Transfers & transfers) const;

    Key key_;
    const std::vector<HeadConfig> & layers_;
    ggml_backend_t backend_;
    TensorContext context_;
    ggml_gallocr_ptr allocator_;
    ggml_cgraph * graph_ = nullptr;
    size_t alignment_; // of tensors on the device
    std::unique_ptr<PackedTensors> inputs_;
    std::unique_ptr<PackedTensors> outputs_;

    // For each layer, each sequence:
    std::vector<std::vector<ggml_tensor *>> keys_;   // [kv_width, n_kv] F16, where the sequence's are
    std::vector<std::vector<ggml_tensor *>> values_; // the same

    // For each sequence:
    std::vector<ggml_tensor *> masks_;  // [n_kv, its depth] F16
    std::vector<ggml_tensor *> bounds_; // F32 if the masks are computed: twice the first visible row, of each step
                                        // or one for all, and how many follow it in each step

    std::vector<ggml_tensor *> fed_embeddings_; // for each layer, [n_embd, R * sequences], one sequence after another;
                                                // layers with the same embedding share it
    ggml_tensor * fed_indices_ = nullptr;    // [R * sequences] I32, instead of `fed_embeddings`
    ggml_tensor * hidden_ = nullptr;         // [n_embd, R * sequences], or all that are on the device
    ggml_tensor * hidden_rows_ = nullptr;    // [R * sequences] I32, of `hidden` on the device
    ggml_tensor * feed_positions_ = nullptr; // [R * sequences] I32, four times as many with M-RoPE
    ggml_tensor * sharpness_ = nullptr;      // [1] F32, inverse temperature
    ggml_tensor * cutoff_ = nullptr;         // [1] F32, of a logit below the largest
    ggml_tensor * uniforms_ = nullptr;       // [4, depth] F32, each uniform in two parts

    // For each step, n being the sequences that draft in it:
    std::vector<ggml_tensor *> step_positions_; // [n] I32, four times as many with M-RoPE
    std::vector<ggml_tensor *> indices_;        // [n] I32
    std::vector<ggml_tensor *> probabilities_;  // [1, 1, n] F32, for a graph that does not draw
    std::vector<ggml_tensor *> logits_;         // [draft vocabulary, n] F32
    std::vector<ggml_tensor *> weights_;        // [DRAW_BLOCK, blocks] F32, zeros at the end
    std::vector<ggml_tensor *> block_shares_;   // [blocks] F32, running shares of the total
    std::vector<ggml_tensor *> inner_shares_;   // [DRAW_BLOCK] F32, those in the block drawn
    std::map<std::pair<int64_t, int64_t>, ShareReader> share_readers_; // by step and n
};

} // namespace mtp
