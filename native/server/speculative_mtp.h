#pragma once
// The MTP head's driver as one of llama.cpp's implementations of speculative decoding: patches/ includes this
// file in common/speculative.cpp, behind the base class. It translates between llama-server's slots and
// mtp::Drafter, which is also the driver of sessions, and chooses the device of the head.

#include "../src/lookup/corpus.h"
#include "../src/drafter.h"
#include "../src/error.h"
#include "../src/head/head.h"
#include "../src/sequence_state.h"

struct common_speculative_impl_mtp : public common_speculative_impl {
    common_params_speculative_draft params;

    // The index of --spec-lookup-index, which all sequences draft from.
    std::unique_ptr<mtp_corpus, void (*)(mtp_corpus *)> corpus = { nullptr, mtp_corpus_free };

    std::unique_ptr<mtp::Drafter> drafter;

    // The tokens of one sequence in a batch.
    struct part_data {
        llama_seq_id seq_id;
        int32_t first; // the index of the first one in the batch
        int32_t n;
        bool on_device; // their hidden states are on the head's device
    };

    std::vector<part_data> parts; // of the submitted batch

    std::vector<llama_pos> verify_pos; // the position of the first token of each sequence's last batch

    int64_t t_drafted_us = 0; // when the last drafts were finished; 0 once their batch was processed

    common_speculative_impl_mtp(const common_params_speculative & spec, uint32_t n_seq, bool lookup)
        : common_speculative_impl(spec.draft.head ? COMMON_SPECULATIVE_TYPE_DRAFT_MTP : COMMON_SPECULATIVE_TYPE_LOOKUP, n_seq, 0)
        , params(spec.draft)
        , drafter(new mtp::Drafter(params.head, (int32_t) n_seq, std::min(params.n_max, MTP_MAX_DEPTH), lookup ? COMMON_SPECULATIVE_LOOKUP_N_MAX : 0))
        , verify_pos(n_seq, 0)
    {
        n_max = std::max(drafter->max_depth(), lookup ? COMMON_SPECULATIVE_LOOKUP_N_MAX : 0);

        SPC_TRC("adding speculative implementation '%s', fused: n_max=%d, n_min=%d, p_min=%.2f, from the text=%d\n",
                common_speculative_type_to_str(type).c_str(), drafter->max_depth(), params.n_min, params.p_min, lookup);
        if (params.head) {
            if (drafter->max_depth() < params.n_max) {
                SPC_WRN("drafts are limited to %d tokens, as many as the head can draft in one graph\n", drafter->max_depth());
            }
            llama_set_embeddings_nextn(params.ctx_tgt, true, /*masked*/ false);
            llama_set_outputs_on_device(params.ctx_tgt, true);
        }
        const char * remembered = getenv("MTP_GGUF_DEPTH_FILE"); // "0": nothing is kept
        if (remembered && *remembered && strcmp(remembered, "0") && params.n_auto) {
            drafter->remember_depth(remembered);
        }
        if (lookup && !spec.lookup_index.empty()) {
            init_corpus(spec.lookup_index);
        }
    }

    // Tokens decoded since the last call belong to a prompt, not to a generated text.
    void begin(llama_seq_id seq_id, const llama_tokens & prompt) override {
        if (seq_id >= 0 && seq_id < (llama_seq_id) n_seq) {
            set_text(seq_id, prompt, /*generated*/ false);
        }
    }

    // Keeps the hidden states of verified drafts where they were computed, if that is the head's device.
    void submitted(const common_batch & batch) override {
        parts.clear();
        if (!is_text(batch)) {
            return;
        }
        for (int32_t i = 0; i < batch.size(); ++i) {
            const llama_seq_id seq_id = batch.tokens[i].seq_id;
            if (!parts.empty() && parts.back().seq_id == seq_id && parts.back().first + parts.back().n == i) {
                ++parts.back().n;
            } else if (seq_id >= 0 && seq_id < (llama_seq_id) n_seq) {
                parts.push_back({ seq_id, i, 1, false });
            }
        }
        const bool drafts = std::all_of(parts.begin(), parts.end(), [&](const part_data & part) {
            const auto & token = batch.tokens[part.first];
            return drafter->continues(part.seq_id, token.pos[0], token.id);
        });
        ggml_backend_t backend = nullptr;
        ggml_tensor  * rows    = params.head && drafts ? llama_get_embeddings_nextn_tensor(params.ctx_tgt, &backend) : nullptr;
        if (rows == nullptr) {
            return;
        }
        for (auto & part : parts) {
            const auto & token = batch.tokens[part.first];
            attempt(part.seq_id, [&] {
                part.on_device = drafter->keep_on_device(part.seq_id, token.pos[0], token.id, part.n, { backend, rows, part.first });
            });
        }
        SPC_DBG(" - hidden states of %d of %zu sequences stay on the device\n",
                (int) std::count_if(parts.begin(), parts.end(), [](const part_data & part) { return part.on_device; }), parts.size());
    }

    bool process(const common_batch & batch) override {
        if (!is_text(batch)) { // the head has no rows of vision tokens
            return true;
        }
        if (parts.empty()) {
            submitted(batch);
        }
        if (std::any_of(parts.begin(), parts.end(), [](const part_data & part) { return part.on_device; })) {
            llama_synchronize(params.ctx_tgt);
        }
        report_batch(batch);

        const bool    all   = std::all_of(parts.begin(), parts.end(), [](const part_data & part) { return part.on_device; });
        const float * h_tgt = params.head && !all ? llama_get_embeddings_nextn(params.ctx_tgt) : nullptr;
        for (const auto & part : parts) {
            llama_tokens ids;
            for (int32_t i = 0; i < part.n; ++i) {
                ids.push_back(batch.tokens[part.first + i].id);
            }
            verify_pos[part.seq_id] = batch.tokens[part.first].pos[0];
            attempt(part.seq_id, [&] {
                const float * hidden = !h_tgt || part.on_device ? nullptr : h_tgt + (size_t) part.first*params.head->width();
                drafter->decoded(part.seq_id, verify_pos[part.seq_id], ids.data(), part.n, hidden);
            });
        }
        parts.clear();

        return true;
    }

    void draft(common_speculative_draft_params_vec & dparams) override {
        std::vector<mtp::DraftRequest> requests;
        for (llama_seq_id seq_id = 0; seq_id < (llama_seq_id) n_seq; ++seq_id) {
            const auto & dp = dparams[seq_id];

            mtp::DraftRequest request;
            request.seq      = seq_id;
            request.position = dp.pos0;
            request.token    = dp.id_last;
            request.depth    = params.n_auto ? MTP_DEPTH_AUTO : drafter->max_depth();
            request.room     = dp.n_max > 0 ? std::min(n_max, dp.n_max) : n_max;
            if (dp.drafting && request.room > 0) {
                set_text(seq_id, *dp.prompt, /*generated*/ true);
                requests.push_back(request);
            }
        }
        if (mtp::guard([&] { drafter->draft(requests, { params.p_min, params.n_min }); }) != MTP_OK) {
            SPC_WRN("nothing is drafted: %s\n", mtp_last_error());
            return;
        }
        SPC_DBG(" - drafting for %d sequences in one graph\n",
                (int) std::count_if(requests.begin(), requests.end(), [](const auto & request) { return request.n_drafted > 0; }));

        for (const auto & request : requests) {
            attempt(request.seq, [&] {
                if (request.failure) {
                    std::rethrow_exception(request.failure);
                }
            });
            for (int32_t i = 0; i < std::max(request.n, request.n_drafted); ++i) {
                SPC_DBG(" - seq_id %d, draft candidate %3d, pos %3d: %6d (%8.3f) '%s'\n", request.seq, 0, i, request.tokens[i],
                        request.probabilities[i], common_token_to_piece(params.ctx_tgt, request.tokens[i]).c_str());
            }
            SPC_DBG(" - seq_id %d, chosen depth %d, offered %d\n", request.seq, request.n_drafted, request.n);

            dparams[request.seq].result->assign(request.tokens.begin(), request.tokens.begin() + request.n);
        }
        t_drafted_us = ggml_time_us();
    }

    void accept(llama_seq_id seq_id, uint16_t n_accepted, bool is_other) override {
        if (seq_id >= 0 && seq_id < (llama_seq_id) n_seq) {
            drafter->accepted(seq_id, verify_pos[seq_id] + 1 + n_accepted, is_other ? -1 : n_accepted);
        }
    }

    // What a checkpoint in this context needs, whose end the head's rows and the text reach.
    bool get_state(llama_seq_id seq_id, std::vector<uint8_t> & data) const override {
        mtp::SequenceState state = known(seq_id, /*all*/ false);
        return !state.head.hidden.empty() && write(state, data);
    }

    void set_state(llama_seq_id seq_id, const std::vector<uint8_t> & data) override {
        if (data.empty()) {
            return;
        }
        attempt(seq_id, [&] {
            const mtp::SequenceState state = mtp::SequenceState::read(data.data(), data.size(), /*borrow*/ true);
            check_fits(state);
            drafter->restore(seq_id, state.length, state.head);
            if (drafter->reads_text() && !state.text.empty()) {
                drafter->restore_text(seq_id, state.length, state.text);
            }
        });
    }

    void get_seq_state(llama_seq_id seq_id, std::vector<uint8_t> & data) override {
        mtp::SequenceState state = known(seq_id, /*all*/ true);
        if (state.length > 0) {
            write(state, data);
        }
    }

    void set_seq_state(llama_seq_id seq_id, const std::vector<uint8_t> & data) override {
        drafter->clear(seq_id);
        set_state(seq_id, data);
    }

private:
    static bool is_text(const common_batch & batch) {
        return batch.size() > 0 && batch.has_token() && !batch.has_embd();
    }

    // Runs a call of the driver. If it fails, the sequence goes on without drafts, or with worse ones.
    template <typename Body>
    static bool attempt(llama_seq_id seq_id, Body && body) {
        if (mtp::guard(body) != MTP_OK) {
            SPC_WRN("seq_id %d goes on without a draft: %s\n", seq_id, mtp_last_error());
            return false;
        }
        return true;
    }

    // The state of a sequence; all: with the head's rows, the text and what was learned of it. Of length 0 if nothing is
    // known.
    mtp::SequenceState known(llama_seq_id seq_id, bool all) const {
        mtp::SequenceState state;
        attempt(seq_id, [&] {
            state.head = drafter->save(seq_id, all);
            state.length = drafter->end(seq_id);
            if (params.head) {
                state.head_fingerprint = params.head->fingerprint();
            }
            if (!all) {
                state.head.depth.clear();
            } else if (drafter->reads_text()) {
                state.text = drafter->save_text(seq_id, /*with_tokens*/ true);
                const int64_t n = mtp::TextDrafts::count_saved(state.text);
                state.length = params.head ? state.length : n;
                if (n > state.length) { // its last token is not decoded yet
                    state.text.clear();
                }
            }
        });
        return state;
    }

    static bool write(const mtp::SequenceState & state, std::vector<uint8_t> & data) {
        data.resize(state.written_size());
        state.write(data.data());
        return true;
    }

    // Throws if a state, which may come from a file, is not one of this head and vocabulary.
    void check_fits(const mtp::SequenceState & state) const {
        const int64_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(params.ctx_tgt)));
        if (!state.text.empty()) {
            mtp::TextDrafts::check_saved(state.text, state.length, n_vocab);
        }
        const auto & head = state.head;
        const size_t rows = params.head ? params.head->cache().rows_bytes(state.length - head.first) : 0;
        if (params.head && state.length > params.head->cache().most_rows()) {
            throw std::runtime_error("expected a state that fits into the context, found a longer one");
        }
        if (state.head_fingerprint != (params.head ? params.head->fingerprint() : 0) || head.token >= n_vocab ||
                (!head.hidden.empty() && head.hidden.size() != (size_t) params.head->width()) ||
                (!head.rows.empty() && (head.hidden.empty() || head.rows.size() != rows))) {
            throw std::runtime_error("expected the state of this head, found another's");
        }
    }

    void set_text(llama_seq_id seq_id, const llama_tokens & tokens, bool generated) {
        if (drafter->reads_text()) {
            attempt(seq_id, [&] { drafter->set_text(seq_id, tokens.data(), (int64_t) tokens.size(), generated); });
        }
    }

    void init_corpus(const std::string & path) {
        const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(params.ctx_tgt));

        std::vector<const char *> words(llama_vocab_n_tokens(vocab), "");
        for (size_t id = 0; id < words.size() && llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE; ++id) {
            words[id] = llama_vocab_get_text(vocab, (llama_token) id);
        }

        uint64_t     tokenizer = 0;
        mtp_corpus * opened    = nullptr;
        if (mtp_tokenizer_fingerprint(words.data(), (int32_t) words.size(), &tokenizer) != MTP_OK ||
                mtp_corpus_open(path.c_str(), (int32_t) words.size(), tokenizer, &opened) != MTP_OK) {
            throw std::runtime_error(mtp_last_error());
        }
        corpus.reset(opened);
        drafter->set_corpus(corpus.get());
    }

    // Reports the time to verify the last drafts, if nothing else was decoded with them and llama.cpp computed the
    // batch in one graph.
    void report_batch(const common_batch & batch) {
        const double ms = (ggml_time_us() - t_drafted_us)/1000.0;

        std::map<llama_seq_id, int32_t> n_tokens;
        for (const auto & token : batch.tokens) {
            ++n_tokens[token.seq_id];
        }
        const bool even      = std::all_of(n_tokens.begin(), n_tokens.end(), [&](const auto & n) { return n.second == n_tokens.begin()->second; });
        const bool generated = std::all_of(batch.tokens.begin(), batch.tokens.end(), [](const auto & token) { return token.output; });
        if (t_drafted_us > 0 && generated && even) {
            drafter->verified(batch.size(), ms);
        }
        t_drafted_us = 0;
    }
};

void common_mtp_head_deleter::operator()(struct mtp_head * head) const {
    mtp_head_free(head);
}

// Returns the device that gets the last layers of the target, as llama_model_load_from_file() will choose it; nullptr
// is the CPU.
static ggml_backend_dev_t common_speculative_last_device(const common_params & params) {
    if (params.n_gpu_layers == 0) {
        return nullptr;
    }

    std::vector<ggml_backend_dev_t> devices; // RPC servers, GPUs
    if (!params.devices.empty()) {
        devices.assign(params.devices.begin(), std::find(params.devices.begin(), params.devices.end(), nullptr));
    } else {
        std::vector<ggml_backend_dev_t> gpus;
        std::vector<ggml_backend_dev_t> igpus;
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            ggml_backend_dev_t dev = ggml_backend_dev_get(i);
            if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_IGPU) {
                igpus.push_back(dev);
            } else if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU) {
                const bool rpc = std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "RPC") == 0;
                (rpc ? devices : gpus).push_back(dev);
            }
        }
        gpus = gpus.empty() ? igpus : gpus;
        devices.insert(devices.end(), gpus.begin(), gpus.end());
    }

    if (params.split_mode == LLAMA_SPLIT_MODE_NONE) {
        return params.main_gpu >= 0 && params.main_gpu < (int) devices.size() ? devices[params.main_gpu] : nullptr;
    }
    for (size_t i = std::size(params.tensor_split); i-- > 0;) {
        if (params.tensor_split[i] > 0.0f) { // the last one that gets layers
            return i < devices.size() ? devices[i] : nullptr;
        }
    }
    return devices.empty() ? nullptr : devices.back();
}

// Loads the head if the options allow drafts in one graph. model_tgt: the target once it is loaded, whose vocabulary's
// matrices a head on the same device can read; nullptr before that.
static common_mtp_head_ptr common_speculative_open_mtp_head(const common_params & params, const llama_model * model_tgt) {
    const auto & params_spec = params.speculative.draft;
    const auto & types       = params.speculative.types;

    if (!params_spec.fused || std::find(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_MTP) == types.end()) {
        return nullptr;
    }
    if (params_spec.cache_type_k != GGML_TYPE_F16 || params_spec.cache_type_v != GGML_TYPE_F16) {
        SPC_INF("%s", "drafts are made step by step: those in one graph need a cache of type f16\n");
        return nullptr;
    }
    if (params.n_parallel > MTP_MAX_SEQUENCES) {
        SPC_INF("drafts are made step by step: those in one graph take at most %d slots\n", MTP_MAX_SEQUENCES);
        return nullptr;
    }

    // A head in a file of its own goes where it was asked for, any other with the last layers of the target.
    const bool has_draft = params.speculative.has_dft();

    ggml_backend_dev_t dev = nullptr;
    if (!params_spec.devices.empty()) {
        dev = params_spec.devices[0];
    } else if (!has_draft || params_spec.n_gpu_layers != 0) {
        dev = common_speculative_last_device(params);
    }

    mtp_head_params hparams = mtp_head_default_params();
    hparams.trunk_path   = has_draft ? params.model.path.c_str() : nullptr;
    hparams.device       = dev ? ggml_backend_dev_name(dev) : "CPU";
    hparams.n_threads    = params_spec.cpuparams.n_threads;
    hparams.n_ctx        = params.n_ctx > 0 ? GGML_PAD(params.n_ctx, 256) : 1 << 24; // an upper bound: the cache grows with a sequence
    hparams.n_seq_max    = params.n_parallel;
    hparams.fastmtp_size = params_spec.n_vocab;
    hparams.type         = params_spec.head_type.c_str();
    hparams.embedding    = model_tgt ? llama_model_get_vocab_matrix(model_tgt, /*output*/ false) : nullptr;
    hparams.output       = model_tgt ? llama_model_get_vocab_matrix(model_tgt, /*output*/ true)  : nullptr;
    hparams.n_batch      = 64; // rows of a prompt in one graph; each number of rows has a graph and its memory

    const std::string & path = has_draft ? params_spec.mparams.path : params.model.path;

    struct mtp_head * head = nullptr;
    if (mtp_head_load(path.c_str(), &hparams, &head) != MTP_OK) {
        SPC_INF("drafts are made step by step: %s\n", mtp_last_error());
        return nullptr;
    }

    const mtp_head_info info = head->info();
    SPC_INF("drafts over %d of %d tokens in one graph on %s (weights %.2f MiB)\n",
            info.n_draft_vocab, info.n_vocab, hparams.device, info.weight_bytes/1024.0/1024.0);
    if (info.layout == MTP_DRAFT_MADE) {
        SPC_INF("%s", "the model has no draft vocabulary, so these are its special tokens and then the first ones; "
                "--spec-draft-n-vocab -1 drafts over all\n");
    }
    if (info.n_ring > 0) {
        SPC_INF("the last %d of them follow the text of the slots\n", info.n_ring);
    }

    return common_mtp_head_ptr(head);
}

// Sets the head of the parameters. Without one no length can be chosen, so drafts have one token then. Returns false,
// with the reason in the log, if the options exclude such a head and ask for a chosen length.
static bool common_speculative_settle_mtp_head(common_params & params, const common_mtp_head_ptr & head) {
    auto & draft = params.speculative.draft;
    const auto & types = params.speculative.types;

    draft.head = head.get();
    if (!draft.n_auto || draft.head != nullptr) {
        return true;
    }

    const bool spec_none = types.empty() || types == std::vector<common_speculative_type>{ COMMON_SPECULATIVE_TYPE_NONE };
    const bool spec_mtp  = std::find(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_MTP) != types.end();
    if (spec_none && !params.speculative.has_dft()) {
        return true;
    }
    if (!spec_mtp || !draft.fused || draft.cache_type_k != GGML_TYPE_F16 || draft.cache_type_v != GGML_TYPE_F16) {
        SPC_ERR("%s", "--spec-draft-n-max auto: takes --spec-type draft-mtp with drafts in one graph; give a number instead\n");
        return false;
    }

    draft.n_auto = false;
    draft.n_max  = 1;
    SPC_WRN("%s", "drafts have one token: their length is chosen only where they are made in one graph\n");

    return true;
}

bool common_speculative_load_mtp_head(common_params & params, common_mtp_head_ptr & head) {
    head = common_speculative_open_mtp_head(params, nullptr);

    return common_speculative_settle_mtp_head(params, head);
}

bool common_speculative_fit_mtp_head(common_params & params, const llama_model * model_tgt, common_mtp_head_ptr & head) {
    if (head == nullptr) {
        return true;
    }

    const mtp_head_info info = head->info();

    const int32_t n_embd  = llama_model_n_embd_out(model_tgt);
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model_tgt));
    if (info.n_embd != n_embd || info.n_vocab != n_vocab) {
        SPC_INF("drafts are made step by step: the head has width %d and %d tokens, the model %d and %d\n",
                info.n_embd, info.n_vocab, n_embd, n_vocab);
        head.reset();
    } else {
        const ggml_tensor * output = llama_model_get_vocab_matrix(model_tgt, /*output*/ true);
        if (info.layout == MTP_DRAFT_NONE && output != nullptr && !ggml_backend_buffer_is_host(output->buffer)) {
            if (common_mtp_head_ptr shared = common_speculative_open_mtp_head(params, model_tgt)) {
                head = std::move(shared);
            }
        }
    }

    return common_speculative_settle_mtp_head(params, head);
}
