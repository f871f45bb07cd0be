#include "session/trunk.h"

#include "error.h"
#include "fingerprint.h"
#include "lookup/corpus.h"
#include "session/nextn.h"
#include "session/runtime.h"
#include "session/trunk_state.h"

#include <algorithm>
#include <atomic>

namespace mtp {

static std::atomic<bool> decoding_aborted = false;

void Trunk::abort_decoding() {
    decoding_aborted = true;
}

Trunk::Trunk(llama_context * context, int64_t min_rows) : context_(context) {
    const llama_model * model = llama_get_model(context);
    llama_set_abort_callback(context, [](void *) { return decoding_aborted.load(); }, nullptr);
    n_ctx_ = int64_t(llama_n_ctx_seq(context)) - (min_rows - 1);
    n_batch_ = std::min(llama_n_batch(context), llama_n_ubatch(context));
    n_embd_ = llama_model_n_embd(model);
    n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model));
    n_seq_max_ = llama_n_seq_max(context);
    n_snapshots_ = llama_n_rs_seq(context);
    stamps_.assign(size_t(n_seq_max_), 0);
    unified_ = n_seq_max_ > 1 && llama_n_ctx_seq(context) == llama_n_ctx(context);
    window_ = llama_model_n_swa(model);
    if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        layout_.memory = StateLayout::HYBRID;
    } else if (window_ > 0) {
        layout_.memory = StateLayout::WINDOWED;
    }
    const llama_rope_type rope = llama_model_rope_type(model);
    state_version_ = state_version(context);
    layout_.mrope = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE;
}

StateLayout Trunk::state_layout() const {
    if (state_version_ < FIRST_STATE_VERSION || state_version_ > LAST_STATE_VERSION) {
        throw Error(MTP_ERROR_VERSION, format("checkpoint: expected a llama.cpp whose sequence files have version %u to %u, "
                                              "found version %u", FIRST_STATE_VERSION, LAST_STATE_VERSION,
                                              state_version_));
    }
    StateLayout out = layout_;
    out.rotations = state_version_ >= ROTATIONS_STATE_VERSION;
    return out;
}

void Trunk::want_hidden() {
    nextn().set(context_, true, /*masked*/ false);
    wants_hidden_ = true;
}

void Trunk::keep_on_device() {
    keeps_on_device_ = device_outputs() != nullptr && device_outputs()->set(context_, true);
}

Trunk::~Trunk() {
    if (wants_hidden_) {
        nextn().set(context_, false, false);
    }
    if (keeps_on_device_) {
        device_outputs()->set(context_, false);
    }
}

void Trunk::decode(int32_t seq, int64_t first, const int32_t * tokens, int64_t n, bool all_logits, int64_t min_rows) {
    const size_t rows = size_t(std::max(n, min_rows));
    seq_ = seq;
    n_tokens_ = n;
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
        throw Error(MTP_ERROR_BACKEND, format("llama.cpp could not roll back a padding token at position %lld",
                                              (long long) (first + n)));
    }
}

const float * Trunk::hidden() const {
    const float * out = nextn().get(context_);
    if (out == nullptr) {
        throw Error(MTP_ERROR_BACKEND, "llama.cpp returned no hidden states");
    }
    return out;
}

const float * Trunk::hidden_of(int32_t row) const {
    const int64_t at = row_of(row);
    const bool known = wants_hidden_ && at >= 0 && at < n_tokens_ && hidden_on_device().tensor == nullptr;
    return known ? hidden() + at * n_embd_ : nullptr;
}

DeviceRows Trunk::hidden_on_device() const {
    DeviceRows out;
    if (keeps_on_device_) {
        out.tensor = device_outputs()->hidden(context_, &out.backend);
    }
    const ggml_tensor * t = out.tensor;
    const bool fits = t != nullptr && t->type == GGML_TYPE_F32 && t->ne[0] == n_embd_ && ggml_is_contiguous(t);
    return fits ? out : DeviceRows();
}

void Trunk::wait() {
    llama_synchronize(context_);
}

// llama.cpp's last row is that of the padding, if there is one.
int32_t Trunk::row_of(int32_t row) const {
    return row == -1 && n_tokens_ > 0 ? int32_t(n_tokens_ - 1) : row;
}

int32_t Trunk::largest(int32_t row) const {
    return keeps_on_device_ ? device_outputs()->largest(context_, row_of(row)) : -1;
}

bool Trunk::candidates(int32_t row, int64_t k, RowCandidates & out) const {
    if (!keeps_on_device_) {
        return false;
    }
    out.tokens.resize(size_t(k));
    out.logits.resize(size_t(k));
    float share = 1;
    if (!device_outputs()->top(context_, row_of(row), int32_t(k), out.tokens.data(), out.logits.data(), &share)) {
        return false;
    }
    out.total = 1.0 / double(share);
    return true;
}

const float * Trunk::logits(int32_t row) const {
    const float * out = llama_get_logits_ith(context_, row_of(row));
    if (out == nullptr) {
        throw Error(MTP_ERROR_STATE, format("row %d of the last decode has no logits", row));
    }
    return out;
}

bool Trunk::remove_tail(int32_t seq, int64_t first) {
    return llama_memory_seq_rm(llama_get_memory(context_), seq, llama_pos(first), -1);
}

void Trunk::clear() {
    llama_memory_clear(llama_get_memory(context_), /*data*/ true);
}

int64_t Trunk::shortest(int32_t seq) const {
    const int64_t first = window_ > 0 ? llama_memory_seq_pos_min(llama_get_memory(context_), seq) : 0;
    return first > 0 ? first + window_ - 1 : 0;
}

int64_t Trunk::length(int32_t seq) const {
    return int64_t(llama_memory_seq_pos_max(llama_get_memory(context_), seq)) + 1;
}

static llama_state_seq_flags partial(bool on_device) {
    return LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY | (on_device ? LLAMA_STATE_SEQ_FLAGS_ON_DEVICE : 0);
}

static std::vector<uint8_t> get_state(llama_context * context, int32_t seq, llama_state_seq_flags flags) {
    std::vector<uint8_t> out(llama_state_seq_get_size_ext(context, seq, flags));
    const size_t size = llama_state_seq_get_data_ext(context, out.data(), out.size(), seq, flags);
    if (size == 0 || size > out.size()) {
        throw Error(MTP_ERROR_BACKEND, format("llama.cpp could not copy the state of sequence %d", seq));
    }
    out.resize(size);
    return out;
}

static void set_state(llama_context * context, int32_t seq, const Blob & state, llama_state_seq_flags flags) {
    if (llama_state_seq_set_data_ext(context, state.data(), state.size(), seq, flags) != state.size()) {
        throw Error(MTP_ERROR_BACKEND, format("llama.cpp could not restore the state of sequence %d", seq));
    }
}

void Trunk::save(int32_t seq, bool on_device, Copy & out) {
    out.bytes = get_state(context_, seq, partial(on_device));
    out.on_device = on_device;
    out.seq = seq;
    out.stamp = on_device ? next_stamp() : 0;
    if (on_device) {
        stamps_[size_t(seq)] = out.stamp;
    }
}

void Trunk::check(const Copy & saved) const {
    if (saved.on_device && (size_t(saved.seq) >= stamps_.size() || stamps_[size_t(saved.seq)] != saved.stamp)) {
        throw Error(MTP_ERROR_STATE, format("the device copy of sequence %d is gone: a newer one has overwritten it; "
                                            "save it in host memory instead", saved.seq));
    }
}

void Trunk::restore(int32_t seq, const Copy & saved) {
    check(saved);
    set_state(context_, seq, saved.bytes, partial(saved.on_device));
}

std::vector<uint8_t> Trunk::save_whole(int32_t seq, int64_t length) {
    std::vector<uint8_t> state = get_state(context_, seq, 0);
    const Blob view = Blob::borrow(state.data(), state.size());
    return count_streams(view) == 1 ? std::move(state) : to_one_stream(view, length, state_layout());
}

void Trunk::restore_whole(int32_t seq, int64_t length, const Blob & state) {
    const uint32_t streams = empty(seq);
    if (streams == 1) {
        set_state(context_, seq, state, 0); // the layout of the checkpoint
    } else {
        set_state(context_, seq, to_streams(state, length, state_layout(), streams), 0);
    }
}

uint32_t Trunk::empty(int32_t seq) {
    remove_tail(seq, 0);
    const uint32_t streams = count_streams(get_state(context_, seq, 0)); // an empty state is only a few bytes
    if (streams == 0) {
        throw Error(MTP_ERROR_BACKEND, "llama.cpp wrote a state without streams");
    }
    return streams;
}

void Trunk::copy(int32_t from, int32_t to, int64_t length) {
    if (empty(to) == 1) {
        llama_memory_seq_cp(llama_get_memory(context_), from, to, -1, -1);
        if (recurrent()) {
            // Both sequences now share one recurrent cell, and a rollback of one would affect the other.
            set_state(context_, to, get_state(context_, from, partial(false)), partial(false));
        }
    } else {
        // Between streams llama_memory_seq_cp copies the data only at the next decode: until then a saved
        // state would be wrong, and a restored one would be overwritten.
        restore_whole(to, length, save_whole(from, length));
    }
}

uint64_t Trunk::tokenizer() const {
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(context_));
    std::vector<const char *> texts(size_t(n_vocab_), "");
    for (size_t i = 0; i < texts.size() && llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE; ++i) {
        texts[i] = llama_vocab_get_text(vocab, int32_t(i));
    }
    return Corpus::tokenizer(texts.data(), int32_t(texts.size()));
}

uint64_t Trunk::fingerprint() const {
    const llama_model * model = llama_get_model(context_);
    Fingerprint out;
    out.add(llama_model_n_params(model));
    out.add(llama_model_size(model));
    std::vector<char> text(1 << 12);
    const auto add_text = [&](auto read, int32_t i) {
        int32_t n = read(model, i, text.data(), text.size());
        if (n >= int32_t(text.size())) {
            text.resize(size_t(n) + 1);
            n = read(model, i, text.data(), text.size());
        }
        out.add(text.data(), size_t(std::max(n, 0)));
    };
    for (int32_t i = 0; i < llama_model_meta_count(model); ++i) {
        add_text(llama_model_meta_key_by_index, i);
        add_text(llama_model_meta_val_str_by_index, i);
    }
    return out.value();
}

} // namespace mtp
