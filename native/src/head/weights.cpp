#include "head/weights.h"

#include "error.h"
#include "threads.h"

#include <algorithm>
#include <cctype>
#include <cstring>

namespace mtp {

// ggml's CPU kernels load whole vectors, but a file may have a smaller alignment.
static const uintptr_t IN_PLACE_ALIGNMENT = 32;

void read_rows(const StoredTensor & stored, const int32_t * ids, size_t n, float * out) {
    const size_t row_bytes = stored.row_bytes();
    const ggml_type_traits * traits = ggml_get_type_traits(stored.type);
    for (size_t i = 0; i < n; ++i) {
        const uint8_t * row = stored.data + size_t(ids[i]) * row_bytes;
        float * to = out + i * size_t(stored.ne[0]);
        if (stored.type == GGML_TYPE_F32) {
            std::memcpy(to, row, row_bytes);
        } else {
            traits->to_float(row, to, stored.ne[0]);
        }
    }
}

ggml_tensor * Weights::place(const StoredTensor & stored, int64_t rows) {
    ggml_tensor *& tensor = placed_[{stored.data, GGML_TYPE_COUNT}];
    if (tensor != nullptr) {
        return tensor;
    }
    int64_t ne[GGML_MAX_DIMS];
    std::memcpy(ne, stored.ne, sizeof(ne));
    if (rows >= 0) {
        ne[1] = rows; // only the first rows: part of a ranked draft vocabulary
    }
    tensor = ggml_new_tensor(context_.get(), stored.type, GGML_MAX_DIMS, ne);
    ggml_set_name(tensor, stored.name.c_str());
    if (in_place_ && reinterpret_cast<uintptr_t>(stored.data) % IN_PLACE_ALIGNMENT == 0) {
        const size_t size = ggml_nbytes(tensor);
        ggml_backend_buffer_t buffer =
            ggml_backend_cpu_buffer_from_ptr(const_cast<uint8_t *>(stored.data), size);
        if (buffer == nullptr || ggml_backend_tensor_alloc(buffer, tensor, const_cast<uint8_t *>(stored.data)) !=
                                     GGML_STATUS_SUCCESS) {
            ggml_backend_buffer_free(buffer);
            throw Error(MTP_ERROR_MEMORY, stored.name + ": ggml cannot use it in place");
        }
        buffers_.emplace_back(buffer);
        mapped_bytes_ += int64_t(size);
    } else {
        const uint8_t * data = stored.data;
        pending_.emplace_back(tensor, [data](ggml_tensor * t) { ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t)); });
    }
    return tensor;
}

ggml_type Weights::quantized_type(const char * name) {
    if (name == nullptr || name[0] == 0) {
        return GGML_TYPE_COUNT;
    }
    const auto same = [](char a, char b) { return std::tolower((unsigned char) a) == std::tolower((unsigned char) b); };
    const std::string wanted = name;
    std::string known;
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const ggml_type type = ggml_type(i);
        const ggml_type_traits * traits = ggml_get_type_traits(type);
        if (!traits->is_quantized || traits->to_float == nullptr || traits->from_float_ref == nullptr ||
            ggml_quantize_requires_imatrix(type)) {
            continue;
        }
        const std::string found = traits->type_name;
        if (std::equal(wanted.begin(), wanted.end(), found.begin(), found.end(), same)) {
            return type;
        }
        known += (known.empty() ? "" : ", ") + found;
    }
    throw Error(MTP_ERROR_ARGUMENT, format("mtp_type: expected one of %s, found %s", known.c_str(), name));
}

// Writes stored rows to `tensor` in its type.
static void set_quantized(ggml_tensor * tensor, const StoredTensor & stored, int n_threads) {
    static const int64_t SLICE = 1 << 22; // values that a thread holds as floats
    const int64_t width = stored.ne[0];
    const int64_t n_rows = ggml_nrows(tensor);
    const int64_t part = std::max<int64_t>(1, std::min(SLICE / width, (n_rows + n_threads - 1) / n_threads));
    const size_t row_bytes = ggml_row_size(tensor->type, width);
    ggml_quantize_init(tensor->type);
    std::vector<std::vector<float>> floats(size_t(n_threads), std::vector<float>(size_t(part * width)));
    std::vector<uint8_t> rows(size_t(part * n_threads) * row_bytes);
    std::vector<StoredTensor> slices(size_t(n_threads), stored); // nothing is allocated in threads, where it could not be reported
    const auto quantize = [&](int64_t first, int64_t thread) {
        StoredTensor & slice = slices[size_t(thread)];
        slice.data = stored.data + size_t(first) * stored.row_bytes();
        const int64_t n = std::min(part, n_rows - first);
        float * values = floats[size_t(thread)].data();
        for (int32_t i = 0; i < n; ++i) {
            read_rows(slice, &i, 1, values + i * width);
        }
        ggml_quantize_chunk(tensor->type, values, rows.data() + size_t(thread * part) * row_bytes, 0, n, width, nullptr);
    };
    for (int64_t first = 0; first < n_rows; first += part * n_threads) {
        const int n_parts = int(std::min<int64_t>(n_threads, (n_rows - first + part - 1) / part));
        in_threads(n_parts, [&](int i) { quantize(first + i * part, i); });
        const int64_t n = std::min(part * n_threads, n_rows - first);
        ggml_backend_tensor_set(tensor, rows.data(), size_t(first) * row_bytes, size_t(n) * row_bytes);
    }
}

ggml_tensor * Weights::place_matrix(const StoredTensor & stored, int64_t rows) {
    const bool readable = stored.type == GGML_TYPE_F32 || ggml_get_type_traits(stored.type)->to_float != nullptr;
    if (type_ == GGML_TYPE_COUNT || !readable || stored.ne[0] % ggml_blck_size(type_) != 0 ||
        ggml_row_size(type_, stored.ne[0]) >= stored.row_bytes()) {
        return place(stored, rows);
    }
    ggml_tensor *& tensor = placed_[{stored.data, type_}];
    if (tensor == nullptr) {
        int64_t ne[GGML_MAX_DIMS];
        std::memcpy(ne, stored.ne, sizeof(ne));
        ne[1] = rows >= 0 ? rows : ne[1];
        tensor = ggml_new_tensor(context_.get(), type_, GGML_MAX_DIMS, ne);
        ggml_set_name(tensor, stored.name.c_str());
        pending_.emplace_back(tensor, [this, stored](ggml_tensor * t) { set_quantized(t, stored, n_threads_); });
    }
    return tensor;
}

// A matrix with a row for each token: the trunk's own if it is on the same device, else like place(). The file
// tells whether the matrices are the same.
ggml_tensor * Weights::place_whole(const StoredTensor & stored, const GgufFile & trunk, const Loaded & loaded) {
    const std::unique_ptr<StoredTensor> own = in_place_ ? nullptr : trunk.find(stored.name);
    for (const ggml_tensor * t : loaded) {
        if (own && own->data == stored.data && t != nullptr && t->buffer != nullptr && t->type == stored.type &&
            std::equal(t->ne, t->ne + GGML_MAX_DIMS, stored.ne) && stored.name == t->name &&
            ggml_backend_buffer_get_type(t->buffer) == ggml_backend_get_default_buffer_type(backend_)) {
            return const_cast<ggml_tensor *>(t);
        }
    }
    return place(stored);
}

// The rows of these ids as a device takes them: in their own type, in which the gather is exact because a quantized row
// is contiguous, or in F16.
static std::vector<uint8_t> gather(const StoredTensor & stored, const int32_t * ids, size_t n, ggml_type type) {
    const size_t to_bytes = ggml_row_size(type, stored.ne[0]);
    std::vector<uint8_t> rows(to_bytes * n);
    std::vector<float> row(type == stored.type ? 0 : size_t(stored.ne[0]));
    for (size_t i = 0; i < n; ++i) {
        uint8_t * to = rows.data() + i * to_bytes;
        if (row.empty()) {
            std::memcpy(to, stored.data + size_t(ids[i]) * to_bytes, to_bytes);
        } else {
            read_rows(stored, &ids[i], 1, row.data());
            ggml_fp32_to_fp16_row(row.data(), reinterpret_cast<ggml_fp16_t *>(to), stored.ne[0]);
        }
    }
    return rows;
}

// Sets the rows of a tensor from `first` on to those of these ids, with memory for a part of them.
static void set_rows(ggml_tensor * tensor, int64_t first, const StoredTensor & stored, const int32_t * ids, int64_t n) {
    const int64_t part = 512;
    for (int64_t i = 0; i < n; i += part) {
        const std::vector<uint8_t> rows = gather(stored, ids + i, size_t(std::min(part, n - i)), tensor->type);
        ggml_backend_tensor_set(tensor, rows.data(), size_t(first + i) * tensor->nb[1], rows.size());
    }
}

ggml_tensor * Weights::place_rows(const StoredTensor & stored, const std::vector<int32_t> & ids, ggml_type type) {
    ggml_tensor *& tensor = placed_[{stored.data, type}];
    if (tensor != nullptr) {
        return tensor;
    }
    tensor = ggml_new_tensor_2d(context_.get(), type, stored.ne[0], int64_t(ids.size()));
    ggml_format_name(tensor, "%s (draft rows)", stored.name.c_str());
    pending_.emplace_back(tensor, [stored, &ids](ggml_tensor * t) { set_rows(t, 0, stored, ids.data(), int64_t(ids.size())); });
    gathered_.emplace_back(tensor, stored);
    return tensor;
}

void Weights::replace_rows(int64_t first, const int32_t * ids, int64_t n) {
    for (const auto & [tensor, stored] : gathered_) {
        set_rows(tensor, first, stored, ids, n);
    }
}

ggml_type Weights::embedding_type(const DraftTables & tables, const DraftVocabulary & v, ggml_backend_t backend) {
    const StoredTensor & table = tables.embedding;
    const TensorContext scratch(4);
    ggml_tensor * rows = ggml_new_tensor_2d(scratch.get(), table.type, table.ne[0], 2);
    ggml_tensor * index = ggml_new_tensor_1d(scratch.get(), GGML_TYPE_I32, 1);
    if (ggml_backend_supports_op(backend, ggml_get_rows(scratch.get(), rows, index))) {
        return table.type;
    }
    if (!v.ids.empty()) {
        return GGML_TYPE_F16;
    }
    throw Error(MTP_ERROR_UNSUPPORTED, format("%s: expected a type whose rows %s can read, found %s; draft over a part of "
                                              "the vocabulary, or load the head on another device, such as CPU",
                                              table.name.c_str(), ggml_backend_name(backend), ggml_type_name(table.type)));
}

void Weights::upload() {
    if (pending_.empty()) {
        return;
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(context_.get(), backend_);
    if (buffer == nullptr) {
        throw Error(MTP_ERROR_MEMORY, format("the weights of the MTP head do not fit on %s",
                                             ggml_backend_name(backend_)));
    }
    buffers_.emplace_back(buffer);
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    for (auto & [tensor, fill] : pending_) {
        fill(tensor);
    }
    pending_.clear();
    copied_bytes_ = int64_t(ggml_backend_buffer_get_size(buffer));
}

StoredAttention StoredAttention::find(const GgufFile & head, const HeadConfig & c) {
    const int64_t n_query = c.query_rows();
    const int64_t n_key = c.kv_width();
    if (head.find(c.name("attn_qkv.weight"))) {
        const StoredTensor fused = head.get(c.name("attn_qkv.weight"), {c.n_embd, n_query + 2 * n_key});
        return {fused.rows(0, n_query), fused.rows(n_query, n_key), fused.rows(n_query + n_key, n_key)};
    }
    return {head.get(c.name("attn_q.weight"), {c.n_embd, n_query}), head.get(c.name("attn_k.weight"), {c.n_embd, n_key}),
            head.get(c.name("attn_v.weight"), {c.n_embd, n_key})};
}

// A vector of floats.
static StoredTensor get_vector(const GgufFile & file, const std::string & name, int64_t n) {
    const StoredTensor stored = file.get(name, {n});
    if (stored.type != GGML_TYPE_F32) {
        file.refuse(name + ": expected F32, found " + ggml_type_name(stored.type));
    }
    return stored;
}

BlockTensors Weights::place_block(const GgufFile & head, const GgufFile * trunk, const HeadConfig & c) {
    auto norm = [&](const std::string & suffix, int64_t n) { return place(get_vector(head, c.name(suffix), n)); };
    auto vector_if_any = [&](const std::string & suffix, int64_t n) {
        return head.find(c.name(suffix)) ? norm(suffix, n) : nullptr;
    };
    auto check = [&](const StoredTensor & stored) {
        if (stored.type != GGML_TYPE_F32 && ggml_get_type_traits(stored.type)->to_float == nullptr) {
            head.refuse(stored.name + ": expected a type of floats, found " + ggml_type_name(stored.type));
        }
        return stored;
    };
    auto matrix = [&](const char * suffix, std::initializer_list<int64_t> shape) {
        return place_matrix(check(head.get(c.name(suffix), shape)));
    };
    auto router = [&](const char * suffix, std::initializer_list<int64_t> shape) {
        return place(check(head.get(c.name(suffix), shape)));
    };
    // The file with a tensor of the whole model: the head's, if it has it, or the trunk's.
    auto file_of = [&](const char * name) -> const GgufFile & {
        return head.find(name) || trunk == nullptr ? head : *trunk;
    };

    BlockTensors t = {};
    t.enorm     = norm("nextn.enorm.weight", c.n_embd);
    t.hnorm     = norm("nextn.hnorm.weight", c.n_embd);
    t.eh_proj   = matrix("nextn.eh_proj.weight", {2 * c.n_embd, c.n_embd});
    t.attn_norm = norm("attn_norm.weight", c.n_embd);
    const StoredAttention attention = StoredAttention::find(head, c);
    t.q         = place_matrix(check(attention.q));
    t.k         = place_matrix(check(attention.k));
    t.v         = place_matrix(check(attention.v));
    if (c.gated) {
        t.q_norm = norm("attn_q_norm.weight", c.head_dim);
        t.k_norm = norm("attn_k_norm.weight", c.head_dim);
    } else {
        t.q_norm = vector_if_any("attn_q_norm.weight", c.head_dim);
        t.k_norm = vector_if_any("attn_k_norm.weight", c.head_dim);
    }
    t.q_bias = vector_if_any("attn_q.bias", c.query_rows());
    t.k_bias = vector_if_any("attn_k.bias", c.kv_width());
    t.v_bias = vector_if_any("attn_v.bias", c.kv_width());
    if (c.head_gated && head.find(c.name("attn_gate.weight"))) {
        t.head_gate = matrix("attn_gate.weight", {c.n_embd, c.n_head});
    }
    const char * factors = "rope_freqs.weight";
    if (const auto stored = c.rope_factors ? file_of(factors).find(factors) : nullptr) {
        if (stored->ne[0] < c.n_rot / 2) {
            file_of(factors).refuse(format("%s: expected %d numbers or more, found %s", factors, c.n_rot / 2,
                                           describe(*stored).c_str()));
        }
        t.rope_factors = place(get_vector(file_of(factors), factors, stored->ne[0]));
    }
    t.attn_out = matrix("attn_output.weight", {c.head_dim * c.n_head, c.n_embd});
    t.ffn_norm = norm(c.ffn_norm, c.n_embd);

    if (c.moe) {
        t.router = router("ffn_gate_inp.weight", {c.n_embd, c.n_expert});
        if (c.sigmoid_router) {
            t.router_bias = vector_if_any("exp_probs_b.bias", c.n_expert);
        }
        if (head.find(c.name("ffn_gate_up_exps.weight"))) {
            t.gate_up_exps = matrix("ffn_gate_up_exps.weight", {c.n_embd, 2 * c.n_ff_expert, c.n_expert});
        } else {
            t.gate_exps = matrix("ffn_gate_exps.weight", {c.n_embd, c.n_ff_expert, c.n_expert});
            t.up_exps   = matrix("ffn_up_exps.weight", {c.n_embd, c.n_ff_expert, c.n_expert});
        }
        t.down_exps = matrix("ffn_down_exps.weight", {c.n_ff_expert, c.n_embd, c.n_expert});
        if (const auto up = head.find(c.name("ffn_up_shexp.weight"))) {
            const int64_t n = c.n_ff_shared > 0 ? c.n_ff_shared : up->ne[1];
            if (!c.sigmoid_router) {
                t.shared_router = router("ffn_gate_inp_shexp.weight", {c.n_embd});
            }
            t.shared_gate   = matrix("ffn_gate_shexp.weight", {c.n_embd, n});
            t.shared_up     = matrix("ffn_up_shexp.weight", {c.n_embd, n});
            t.shared_down   = matrix("ffn_down_shexp.weight", {n, c.n_embd});
        }
    } else {
        t.ffn_gate = matrix("ffn_gate.weight", {c.n_embd, c.n_ff});
        t.ffn_up   = matrix("ffn_up.weight", {c.n_embd, c.n_ff});
        t.ffn_down = matrix("ffn_down.weight", {c.n_ff, c.n_embd});
    }

    // llama.cpp falls back to output_norm if the block has no norm of its own.
    const char * last = "output_norm.weight";
    t.head_norm = vector_if_any("nextn.shared_head_norm.weight", c.n_embd);
    if (t.head_norm == nullptr) {
        t.head_norm = place(get_vector(file_of(last), last, c.n_embd));
    }
    return t;
}

void Weights::place_tables(const DraftTables & tables, const DraftVocabulary & v, const GgufFile & model,
                           const Loaded & loaded, BlockTensors & out) {
    const ggml_type type = embedding_type(tables, v, backend_);
    if (v.output_is_short) {
        // Rows of a matrix that is the embedding, too, are gathered on the device, which few types allow.
        out.output = tables.tied ? place(tables.output, v.size()) : place_matrix(tables.output, v.size());
    } else if (v.ids.empty()) {
        out.output = place_whole(tables.output, model, loaded);
    } else {
        out.output = place_rows(tables.output, v.ids, tables.output.type);
    }
    if (tables.tied && type == tables.output.type) {
        out.draft_embedding = out.output;
    } else if (!v.ids.empty()) {
        out.draft_embedding = place_rows(tables.embedding, v.ids, type);
    } else {
        out.draft_embedding = place_whole(tables.embedding, model, loaded);
    }
}

Weights::Weights(const GgufFile & head, const GgufFile * trunk, const std::vector<HeadConfig> & layers,
                 const DraftVocabulary & vocabulary, const Loaded & loaded, ggml_backend_t backend, ggml_type type,
                 int n_threads)
    : backend_(backend), type_(type), n_threads_(n_threads),
      in_place_(ggml_backend_dev_type(ggml_backend_get_device(backend)) == GGML_BACKEND_DEVICE_TYPE_CPU),
      context_(40 * layers.size()) {
    for (size_t i = 0; i < layers.size(); ++i) {
        tensors_.push_back(place_block(head, trunk, layers[i]));
        place_tables(vocabulary.tables[i], vocabulary, trunk != nullptr ? *trunk : head, loaded, tensors_.back());
        // Rejects tensors that the graph would silently ignore, such as NVFP4 scales and biases.
        for (const std::string & name : head.tensor_names()) {
            if (name.rfind(layers[i].name(""), 0) == 0 && ggml_get_tensor(context_.get(), name.c_str()) == nullptr &&
                name != vocabulary.tables[i].embedding.name && name != vocabulary.tables[i].output.name) {
                throw Error(MTP_ERROR_UNSUPPORTED,
                            head.path() + ": " + name + ": expected only tensors that the draft graph uses, found this one");
            }
        }
    }
    upload();
}

} // namespace mtp
