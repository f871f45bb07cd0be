#include "trunk.h"

#include "error.h"

#include <algorithm>

// llama.cpp's staging API (its src/llama-ext.h, not installed): hidden states for the MTP block.
void    llama_set_embeddings_nextn(llama_context * ctx, bool value, bool masked);
float * llama_get_embeddings_nextn(llama_context * ctx);

namespace mtp {

Trunk::Trunk(llama_context * context, bool wants_hidden, int64_t min_rows)
    : context_(context), wants_hidden_(wants_hidden) {
    const llama_model * model = llama_get_model(context);
    n_ctx_ = int64_t(llama_n_ctx_seq(context)) - (min_rows - 1);
    n_batch_ = std::min(llama_n_batch(context), llama_n_ubatch(context));
    n_embd_ = llama_model_n_embd(model);
    n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model));
    n_seq_max_ = llama_n_seq_max(context);
    n_snapshots_ = llama_n_rs_seq(context);
    recurrent_ = llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
    if (wants_hidden_) {
        llama_set_embeddings_nextn(context_, true, /*masked*/ false);
    }
}

Trunk::~Trunk() {
    if (wants_hidden_) {
        llama_set_embeddings_nextn(context_, false, false);
    }
}

void Trunk::decode(int32_t seq, int64_t first, const int32_t * tokens, int64_t n, bool all_logits, int64_t min_rows) {
    const size_t rows = size_t(std::max(n, min_rows));
    seq_ = seq;
    tokens_.assign(tokens, tokens + n);
    tokens_.resize(rows, tokens[n - 1]);
    positions_.resize(rows);
    for (size_t i = 0; i < rows; ++i) {
        positions_[i] = llama_pos(first + int64_t(i));
    }
    n_seq_ids_.assign(rows, 1);
    seq_ids_.assign(rows, &seq_);
    outputs_.assign(rows, all_logits);
    outputs_[size_t(n - 1)] = 1;
    llama_batch batch = {};
    batch.n_tokens = int32_t(rows);
    batch.token = tokens_.data();
    batch.pos = positions_.data();
    batch.n_seq_id = n_seq_ids_.data();
    batch.seq_id = seq_ids_.data();
    batch.logits = outputs_.data();
    const int32_t status = llama_decode(context_, batch);
    if (status == 1) {
        throw Error(MTP_ERROR_FULL, format("the context has no room for %lld more tokens at position %lld",
                                           (long long) n, (long long) first));
    }
    if (status != 0) {
        throw Error(MTP_ERROR_BACKEND, format("llama_decode returned %d for %lld tokens at position %lld", status,
                                              (long long) n, (long long) first));
    }
    if (n < min_rows && !remove_tail(seq, first + n)) {
        throw Error(MTP_ERROR_BACKEND, format("llama.cpp could not take back a companion at position %lld",
                                              (long long) (first + n)));
    }
}

const float * Trunk::hidden() const {
    const float * out = llama_get_embeddings_nextn(context_);
    if (out == nullptr) {
        throw Error(MTP_ERROR_BACKEND, "llama.cpp handed out no hidden states");
    }
    return out;
}

const float * Trunk::logits(int32_t row) const {
    const float * out = llama_get_logits_ith(context_, row);
    if (out == nullptr) {
        throw Error(MTP_ERROR_STATE, format("row %d of the last decode has no logits", row));
    }
    return out;
}

bool Trunk::remove_tail(int32_t seq, int64_t first) {
    return llama_memory_seq_rm(llama_get_memory(context_), seq, llama_pos(first), -1);
}

int64_t Trunk::length(int32_t seq) const {
    return int64_t(llama_memory_seq_pos_max(llama_get_memory(context_), seq)) + 1;
}

static llama_state_seq_flags flags(bool on_device) {
    return LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY | (on_device ? LLAMA_STATE_SEQ_FLAGS_ON_DEVICE : 0);
}

void Trunk::save(int32_t seq, bool on_device, Checkpoint & out) {
    out.resize(llama_state_seq_get_size_ext(context_, seq, flags(on_device)));
    const size_t size = llama_state_seq_get_data_ext(context_, out.data(), out.size(), seq, flags(on_device));
    if (size == 0 || size > out.size()) {
        throw Error(MTP_ERROR_BACKEND, format("llama.cpp could not copy the recurrent state of sequence %d", seq));
    }
    out.resize(size);
}

void Trunk::restore(int32_t seq, bool on_device, const Checkpoint & saved) {
    if (llama_state_seq_set_data_ext(context_, saved.data(), saved.size(), seq, flags(on_device)) != saved.size()) {
        throw Error(MTP_ERROR_BACKEND, format("llama.cpp could not restore the recurrent state of sequence %d", seq));
    }
}

} // namespace mtp
