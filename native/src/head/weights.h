#pragma once
// The tensors of a head's MTP blocks on a ggml device.
//
// On the CPU a tensor is used in place in the mapped file (the trunk maps the same pages); on other
// devices, and for gathered rows, it is copied. Of the embedding only the draft vocabulary's rows are
// loaded: fed tokens can be any token of the target, and their few rows are read from the mapped file as
// floats.

#include "head/draft_vocabulary.h"
#include "head/gguf_file.h"
#include "head/head_config.h"
#include "head/tensor_context.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace mtp {

// Tensor shapes are in ggml's order (columns first). Pointers are nullptr if a model has no such tensor.
struct BlockTensors {
    ggml_tensor * enorm;     // [n_embd]
    ggml_tensor * hnorm;     // [n_embd]
    ggml_tensor * eh_proj;   // [2 * n_embd, n_embd], input [embedding, hidden]
    ggml_tensor * attn_norm; // [n_embd]
    ggml_tensor * q;         // [n_embd, query_rows], if gated per head query then gate
    ggml_tensor * k;         // [n_embd, kv_width]
    ggml_tensor * v;         // [n_embd, kv_width]
    ggml_tensor * q_bias;    // [query_rows]
    ggml_tensor * k_bias;    // [kv_width]
    ggml_tensor * v_bias;    // [kv_width]
    ggml_tensor * q_norm;    // [head_dim]
    ggml_tensor * k_norm;    // [head_dim]
    ggml_tensor * attn_out;  // [head_dim * n_head, n_embd]
    ggml_tensor * head_gate; // [n_embd, n_head], of each head's output
    ggml_tensor * rope_factors; // [n_rot / 2 or more]
    ggml_tensor * ffn_norm;  // [n_embd]

    ggml_tensor * ffn_gate;  // [n_embd, n_ff]
    ggml_tensor * ffn_up;    // [n_embd, n_ff]
    ggml_tensor * ffn_down;  // [n_ff, n_embd]

    ggml_tensor * router;       // [n_embd, n_expert]
    ggml_tensor * router_bias;  // [n_expert], for the choice alone
    ggml_tensor * gate_up_exps; // [n_embd, 2 * n_ff_expert, n_expert], or the next two
    ggml_tensor * gate_exps;    // [n_embd, n_ff_expert, n_expert]
    ggml_tensor * up_exps;      // [n_embd, n_ff_expert, n_expert]
    ggml_tensor * down_exps;    // [n_ff_expert, n_embd, n_expert]
    ggml_tensor * shared_router; // [n_embd], nullptr if the shared expert is not gated
    ggml_tensor * shared_gate;  // [n_embd, n_ff_shared]
    ggml_tensor * shared_up;    // [n_embd, n_ff_shared]
    ggml_tensor * shared_down;  // [n_ff_shared, n_embd]

    ggml_tensor * head_norm;       // [n_embd]
    ggml_tensor * output;          // [n_embd, draft vocabulary]
    ggml_tensor * draft_embedding; // [n_embd, draft vocabulary]; may be the same tensor as output
};

// The query, key and value matrices of the block's attention as stored: separate tensors, or consecutive
// rows of attn_qkv.
struct StoredAttention {
    StoredTensor q; // [n_embd, query_rows]
    StoredTensor k; // [n_embd, kv_width]
    StoredTensor v; // [n_embd, kv_width]

    // Throws MTP_ERROR_FORMAT if a tensor is missing or has the wrong shape.
    static StoredAttention find(const GgufFile & head, const HeadConfig & config);
};

class Weights {
public:
    // backend: where the graph will run. loaded: token embeddings and output matrix of the loaded trunk, or
    // nullptr. All of them, and the files, must outlive this object. type: matrices of the blocks in more bits are
    // quantized to it, by n_threads threads; GGML_TYPE_COUNT for none.
    using Loaded = std::array<const ggml_tensor *, 2>;
    Weights(const GgufFile & head, const GgufFile * trunk, const std::vector<HeadConfig> & layers,
            const DraftVocabulary & vocabulary, const Loaded & loaded, ggml_backend_t backend, ggml_type type,
            int n_threads);

    // The type with ggml's name, in either case; GGML_TYPE_COUNT for nullptr or "". Throws MTP_ERROR_ARGUMENT if there is
    // no such type, or if matrices cannot be quantized to it without calibration data.
    static ggml_type quantized_type(const char * name);

    // The type in which a device can read rows of the embedding: its own, or F16 for the rows of a draft vocabulary.
    // Throws MTP_ERROR_UNSUPPORTED if there is none.
    static ggml_type embedding_type(const DraftTables & tables, const DraftVocabulary & vocabulary, ggml_backend_t backend);

    // Of each layer.
    const std::vector<BlockTensors> & tensors() const { return tensors_; }
    // Replaces rows from `first` on in all matrices that have the draft vocabulary's rows, by those of these ids.
    void replace_rows(int64_t first, const int32_t * ids, int64_t n);

    int64_t copied_bytes() const { return copied_bytes_; }
    int64_t mapped_bytes() const { return mapped_bytes_; }

private:
    // Writes the tensor's data once it is allocated.
    using Fill = std::function<void(ggml_tensor *)>;

    // The tensor, or its first rows; layers that have it in common share it.
    ggml_tensor * place(const StoredTensor & stored, int64_t rows = -1);
    // A matrix of a block, quantized if its type has more bits than type_.
    ggml_tensor * place_matrix(const StoredTensor & stored, int64_t rows = -1);
    ggml_tensor * place_rows(const StoredTensor & stored, const std::vector<int32_t> & ids, ggml_type type);
    BlockTensors place_block(const GgufFile & head, const GgufFile * trunk, const HeadConfig & layer);
    ggml_tensor * place_whole(const StoredTensor & stored, const GgufFile & trunk, const Loaded & loaded);
    void place_tables(const DraftTables & tables, const DraftVocabulary & vocabulary, const GgufFile & model,
                      const Loaded & loaded, BlockTensors & out);
    void upload();

    ggml_backend_t backend_;
    ggml_type type_; // of quantized matrices
    int n_threads_;
    bool in_place_; // the device reads host memory
    TensorContext context_;
    std::vector<ggml_backend_buffer_ptr> buffers_;
    std::vector<std::pair<ggml_tensor *, Fill>> pending_;
    // By where they are stored, and the type of gathered rows, or GGML_TYPE_COUNT.
    std::map<std::pair<const uint8_t *, ggml_type>, ggml_tensor *> placed_;
    std::vector<std::pair<ggml_tensor *, StoredTensor>> gathered_; // matrices with the draft vocabulary's rows
    std::vector<BlockTensors> tensors_;
    int64_t copied_bytes_ = 0;
    int64_t mapped_bytes_ = 0;
};

// Reads rows of a stored matrix as floats. out: [ids.size()][ne[0]]. Ids must be in range.
void read_rows(const StoredTensor & stored, const int32_t * ids, size_t n, float * out);

} // namespace mtp
