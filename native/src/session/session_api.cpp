// The C functions of the session: they check arguments that need no object, then call it.

#include "error.h"
#include "session/nextn.h"
#include "session/session.h"

using mtp::guard;
using mtp::require;

mtp_status mtp_model_matrix(const llama_model * model, bool output, const ggml_tensor ** out) {
    return guard([&] { *require(out, "out") = mtp::model_matrix(require(model, "model"), output); });
}

mtp_status mtp_session_new(llama_context * context, mtp_head * head, const mtp_session_params * params,
                           mtp_session ** out) {
    return guard([&] {
        *require(out, "out") = nullptr;
        *out = new mtp_session(require(context, "context"), head, *require(params, "params"));
    });
}

void mtp_session_free(mtp_session * session) {
    delete session;
}

mtp_status mtp_session_get_stats(const mtp_session * session, mtp_session_stats * out) {
    return guard([&] { *require(out, "out") = require(session, "session")->stats(); });
}

mtp_status mtp_session_reset_stats(mtp_session * session) {
    return guard([&] { require(session, "session")->reset_stats(); });
}

mtp_status mtp_session_length(const mtp_session * session, int32_t seq, int32_t * out) {
    return guard([&] { *require(out, "out") = int32_t(require(session, "session")->length(seq)); });
}

void mtp_abort_decoding(void) {
    mtp::Trunk::abort_decoding();
}

mtp_status mtp_session_decode(mtp_session * session, int32_t seq, const int32_t * tokens, int32_t n, bool all_logits) {
    return guard([&] { require(session, "session")->decode(seq, tokens, n, all_logits); });
}

mtp_status mtp_session_want_hidden(mtp_session * session) {
    return guard([&] { require(session, "session")->want_hidden(); });
}

mtp_status mtp_session_get_hidden(mtp_session * session, int32_t n, float * out, size_t size) {
    return guard([&] { require(session, "session")->get_hidden(n, require(out, "out"), size); });
}

mtp_status mtp_context_hidden(llama_context * context, const float ** out) {
    return guard([&] { *require(out, "out") = mtp::nextn().get(require(context, "context")); });
}

mtp_status mtp_cycle_begin(mtp_session * session, int32_t seq, int32_t token, int32_t depth, int32_t * out_tokens,
                           float * out_probs, int32_t * out_n) {
    return guard([&] {
        require(out_n, "out_n");
        *out_n = require(session, "session")->begin(seq, token, depth, out_tokens, out_probs);
    });
}

mtp_status mtp_cycle_row(mtp_session * session, int32_t row, int32_t * out) {
    return guard([&] { *require(out, "out") = require(session, "session")->row(row); });
}

mtp_status mtp_cycle_end(mtp_session * session, int32_t n_accepted) {
    return guard([&] { require(session, "session")->end(n_accepted); });
}

mtp_status mtp_cycle_from_text(const mtp_session * session, bool * out) {
    return guard([&] { *require(out, "out") = require(session, "session")->from_text(); });
}

mtp_status mtp_session_step(mtp_session * session, int32_t seq, int32_t token, int32_t depth, llama_sampler * sampler,
                            int32_t * out, int32_t * out_n) {
    return guard([&] {
        require(out_n, "out_n");
        *out_n = require(session, "session")->step(seq, token, depth, sampler, out);
    });
}

mtp_status mtp_session_set_sampling(mtp_session * session, const mtp_sampling * sampling) {
    return guard([&] { require(session, "session")->set_sampling(*require(sampling, "sampling")); });
}

mtp_status mtp_session_sample(mtp_session * session, int32_t row, int32_t * out) {
    return guard([&] { *require(out, "out") = require(session, "session")->sample(row); });
}

mtp_status mtp_session_step_sampled(mtp_session * session, int32_t seq, int32_t token, int32_t depth, int32_t * out,
                                    int32_t * out_n) {
    return guard([&] {
        require(out_n, "out_n");
        *out_n = require(session, "session")->step_sampled(seq, token, depth, out);
    });
}

mtp_status mtp_session_argmax(mtp_session * session, int32_t row, int32_t * out) {
    return guard([&] { *require(out, "out") = require(session, "session")->argmax(row); });
}

mtp_status mtp_session_choose(mtp_session * session, int32_t row, llama_sampler * sampler, int32_t * out) {
    return guard([&] {
        *require(out, "out") = require(session, "session")->choose(row, require(sampler, "sampler"));
    });
}

mtp_status mtp_seq_rm(mtp_session * session, int32_t seq, int32_t p0, int32_t p1) {
    return guard([&] { require(session, "session")->remove(seq, p0, p1); });
}

mtp_status mtp_session_sync(mtp_session * session, int32_t seq) {
    return guard([&] { require(session, "session")->sync(seq); });
}

mtp_status mtp_session_skip(mtp_session * session, int32_t seq, int64_t length) {
    return guard([&] { require(session, "session")->skip(seq, length); });
}

mtp_status mtp_session_set_corpus(mtp_session * session, const mtp_corpus * corpus) {
    return guard([&] { require(session, "session")->set_corpus(corpus); });
}

mtp_status mtp_session_tokenizer(const mtp_session * session, uint64_t * out) {
    return guard([&] { *require(out, "out") = require(session, "session")->tokenizer(); });
}

mtp_status mtp_session_set_costs(mtp_session * session, const double * verify_ms, int32_t n_verify,
                                 const double * draft_ms, int32_t n_draft) {
    return guard([&] { require(session, "session")->set_costs(verify_ms, n_verify, draft_ms, n_draft); });
}

mtp_status mtp_session_remember_depth(mtp_session * session, const char * path) {
    return guard([&] { require(session, "session")->remember_depth(require(path, "path")); });
}

// Waits for the context here, where an exception can be caught, before something that cannot throw does.
bool mtp_context_has_failed(llama_context * context) {
    if (context == nullptr) {
        return false;
    }
    return mtp::guard([&] { llama_synchronize(context); }) != MTP_OK;
}
