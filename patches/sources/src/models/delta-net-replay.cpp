#include "models.h"

#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

// the linear attention of layers that roll back by replay (llama-memory-replay.h)

class llm_graph_input_replay : public llm_graph_input_i {
public:
    llm_graph_input_replay(const llama_memory_recurrent_context * mctx, ggml_tensor * s_copy) : mctx(mctx), s_copy(s_copy) {}

    void set_input(const llama_ubatch * ubatch) override {
        GGML_UNUSED(ubatch);

        const auto * mem   = mctx->get_mem();
        const auto * cells = &mem->cells[mctx->get_head()];

        const auto host_data = [](const ggml_tensor * t) {
            GGML_ASSERT(ggml_backend_buffer_is_host(t->buffer));
            return (int32_t *) t->data;
        };

        if (rows != s_copy) {
            for (int64_t i = 0; i < rows->ne[0]; ++i) {
                host_data(rows)[i] = cells[i].src0.row;
            }
        }

        const int64_t n_conv = mem->replay.n_conv;

        for (int64_t i = 0; i < n_replay->ne[0]; ++i) {
            const auto & src = cells[i].src0;

            host_data(n_replay)[i] = src.n_log;
            for (int64_t t = 0; t < n_conv; ++t) {
                host_data(conv_ids)[i*n_conv + t] = src.row*(n_conv + mem->replay.n_log) + src.n_log + t;
            }
        }
    }

    // llm_graph_input_mem_hybrid compares what the shapes depend on
    bool can_reuse(const llm_graph_params & params) override {
        mctx = static_cast<const llama_memory_hybrid_context *>(params.mctx)->get_recr();
        return true;
    }

    const llama_memory_recurrent_context * mctx;

    ggml_tensor * s_copy;

    // the rows of the same cells as in s_copy, which has those of snapshots; s_copy itself if no layer has any
    ggml_tensor * rows       = nullptr; // I32 [n_rs]
    ggml_tensor * rows_main  = nullptr; // I32 [n_seqs]
    ggml_tensor * rows_extra = nullptr; // I32 [n_rs - n_seqs]

    ggml_tensor * n_replay = nullptr; // I32 [n_seqs] tokens of the log that were kept
    ggml_tensor * conv_ids = nullptr; // I32 [n_conv*n_seqs] their predecessors for the convolution, a token's inputs each
};

llm_graph_input_replay * llm_build_delta_net_base::build_inp_replay(llm_graph_input_rs * inp_rs) {
    if (inp_rs->replay) {
        return inp_rs->replay;
    }

    const auto & replay = inp_rs->mctx->get_mem()->replay;
    const int64_t n_rs   = inp_rs->mctx->get_n_rs();
    const int64_t n_seqs = ubatch.n_seqs;

    auto inp = std::make_unique<llm_graph_input_replay>(inp_rs->mctx, inp_rs->s_copy);

    inp->rows = inp->s_copy;
    if (replay.has_snapshots()) {
        inp->rows = ggml_new_tensor_1d(ctx0, GGML_TYPE_I32, n_rs);
        ggml_set_input(inp->rows);
        ggml_set_name(inp->rows, "rs_rows");
    }

    inp->rows_main  = ggml_view_1d(ctx0, inp->rows, n_seqs, 0);
    inp->rows_extra = ggml_view_1d(ctx0, inp->rows, n_rs - n_seqs, n_seqs*inp->rows->nb[0]);

    inp->n_replay = ggml_new_tensor_1d(ctx0, GGML_TYPE_I32, n_seqs);
    ggml_set_input(inp->n_replay);
    ggml_set_name(inp->n_replay, "rs_n_replay");

    inp->conv_ids = ggml_new_tensor_1d(ctx0, GGML_TYPE_I32, replay.n_conv*n_seqs);
    ggml_set_input(inp->conv_ids);
    ggml_set_name(inp->conv_ids, "rs_conv_ids");

    inp_rs->replay = static_cast<llm_graph_input_replay *>(res->add_input(std::move(inp)));

    return inp_rs->replay;
}

ggml_tensor * llm_build_delta_net_base::build_rs_replay(
        llm_graph_input_rs *          inp,
        ggml_tensor *                 s,
        const llm_graph_get_rows_fn & get_state_rows) {
    const auto * mctx_cur = inp->mctx;
    const auto * rows     = build_inp_replay(inp);

    // as in build_rs, but none of the ubatch's own rows is gathered
    const int64_t n_extra = rows->rows_extra->ne[0];
    const int32_t rs_zero = mctx_cur->get_rs_z();

    ggml_tensor * state_zero = ggml_view_1d(ctx0, s, s->ne[0]*(rs_zero >= 0), rs_zero*s->nb[1]*(rs_zero >= 0));
    ggml_build_forward_expand(gf, ggml_scale_inplace(ctx0, state_zero, 0));

    ggml_tensor * output_states = get_state_rows(ctx0, s, rows->rows_main);
    ggml_build_forward_expand(gf, output_states);

    ggml_tensor * states_extra = ggml_get_rows(ctx0, s, rows->rows_extra);
    ggml_build_forward_expand(gf,
        ggml_cpy(ctx0,
            states_extra,
            ggml_view_2d(ctx0, s, s->ne[0], n_extra, s->nb[1], (mctx_cur->get_head() + ubatch.n_seqs)*s->nb[1])));

    return output_states;
}

// a row of the memory holds the inputs of the last tokens, oldest first: as many as the convolution looks back to from
// the token after the state, then those in the log
ggml_tensor * llm_build_delta_net_base::build_conv_state_replay(
        llm_graph_input_rs * inp,
        ggml_tensor *        conv_states_all,
        ggml_tensor *        qkv_mixed,
        int64_t              conv_kernel_size,
        int64_t              conv_channels,
        int                  il) {
    const auto kv_head = inp->mctx->get_head();

    const int64_t n_seqs       = ubatch.n_seqs;
    const int64_t n_seq_tokens = ubatch.n_seq_tokens;

    const int64_t n_back   = conv_kernel_size - 1;
    const int64_t n_logged = ggml_gated_delta_net_n_logged(n_seq_tokens, cparams.n_rs_seq);

    const size_t nb_token = ggml_row_size(conv_states_all->type, conv_channels);
    const size_t nb_row   = conv_states_all->nb[1];

    GGML_ASSERT(conv_states_all->ne[0] == conv_channels*(n_back + cparams.n_rs_seq));

    // {channels, n_back, n_seqs}: the n_back tokens that end with the last one kept
    ggml_tensor * conv_states = build_rs_replay(inp, conv_states_all,
        [&](ggml_context * ctx, ggml_tensor * states, ggml_tensor * /* ids */) {
            ggml_tensor * tokens = ggml_reshape_2d(ctx, states, conv_channels, ggml_nelements(states)/conv_channels);

            return ggml_get_rows(ctx, tokens, inp->replay->conv_ids);
        });
    conv_states = ggml_reshape_3d(ctx0, conv_states, conv_channels, n_back, n_seqs);
    cb(conv_states, "conv_states", il);

    ggml_tensor * conv_input = ggml_concat(ctx0, ggml_transpose(ctx0, conv_states), ggml_transpose(ctx0, qkv_mixed), 0);
    cb(conv_input, "conv_input", il);

    // store the last n_back + n_logged tokens
    const int64_t n_new = std::min(n_seq_tokens, n_back + n_logged);
    const int64_t n_old = n_back + n_logged - n_new;

    const auto store = [&](ggml_tensor * src, int64_t n, int64_t i_dst) {
        ggml_tensor * tokens = ggml_view_3d(ctx0, src, conv_channels, n, n_seqs,
            src->nb[1], src->nb[2], (src->ne[1] - n)*src->nb[1]);

        ggml_tensor * update = ggml_view_3d(ctx0, conv_states_all, conv_channels, n, n_seqs,
            nb_token, nb_row, kv_head*nb_row + i_dst*nb_token);

        ggml_build_forward_expand(gf, ggml_cpy(ctx0, tokens, update));
    };

    if (n_old > 0) {
        store(conv_states, n_old, 0);
    }
    store(qkv_mixed, n_new, n_old);

    return conv_input;
}

ggml_tensor * llm_build_delta_net_base::build_delta_net_state(
        llm_graph_input_rs * inp,
        ggml_tensor *        ssm_states_all,
        int64_t              head_v_dim,
        int64_t              num_v_heads,
        int                  il) {
    if (inp->mctx->get_mem()->replay.replays(il)) {
        return nullptr;
    }

    ggml_tensor * state = build_rs(inp, ssm_states_all, hparams.n_embd_s(), ubatch.n_seqs);
    state = ggml_reshape_4d(ctx0, state, head_v_dim, head_v_dim, num_v_heads, ubatch.n_seqs);
    cb(state, "state_predelta", il);

    return state;
}

ggml_tensor * llm_build_delta_net_base::build_recurrent_attn_replay(
        llm_graph_input_rs * inp,
        ggml_tensor *        ssm_states_all,
        ggml_tensor *        q,
        ggml_tensor *        k,
        ggml_tensor *        v,
        ggml_tensor *        g,
        ggml_tensor *        b,
        int                  il) {
    const auto & replay  = inp->mctx->get_mem()->replay;
    const auto   kv_head = inp->mctx->get_head();

    const int64_t S_v          = v->ne[0];
    const int64_t H_v          = v->ne[1];
    const int64_t n_seq_tokens = v->ne[2];
    const int64_t n_seqs       = v->ne[3];
    const int64_t n_log        = cparams.n_rs_seq;

    // the operation needs no repeated heads, which graphs for devices without the fused gated delta net have
    const auto heads = [&](ggml_tensor * t) {
        return t->ne[1] == replay.H_k ? t :
            ggml_view_4d(ctx0, t, t->ne[0], replay.H_k, t->ne[2], t->ne[3], t->nb[1], t->nb[2], t->nb[3], 0);
    };
    q = heads(q);
    k = heads(k);

    ggml_tensor * gdn_out = build_rs_replay(inp, ssm_states_all,
        [&](ggml_context * ctx, ggml_tensor * states, ggml_tensor * ids) {
            return ggml_gated_delta_net_replay(ctx, q, k, v, g, b, states, ids, inp->replay->n_replay, n_log);
        });
    cb(gdn_out, "gdn_replay", il);

    ggml_tensor * output = ggml_view_4d(ctx0, gdn_out,
        S_v, H_v, n_seq_tokens, n_seqs,
        ggml_row_size(gdn_out->type, S_v),
        ggml_row_size(gdn_out->type, S_v * H_v),
        ggml_row_size(gdn_out->type, S_v * H_v * n_seq_tokens),
        0);
    cb(output, "attn_output", il);

    // the state and the part of the log that was written
    const int64_t n_written = S_v * S_v * H_v +
        ggml_gated_delta_net_n_logged(n_seq_tokens, n_log) * ggml_gated_delta_net_log_size(S_v, k->ne[1], H_v);

    ggml_tensor * src = ggml_view_2d(ctx0, gdn_out, n_written, n_seqs,
        ssm_states_all->nb[1], ggml_row_size(gdn_out->type, S_v * H_v * n_seq_tokens * n_seqs));

    ggml_tensor * dst = ggml_view_2d(ctx0, ssm_states_all, n_written, n_seqs,
        ssm_states_all->nb[1], kv_head * ssm_states_all->nb[1]);

    ggml_build_forward_expand(gf, ggml_cpy(ctx0, src, dst));

    return output;
}
