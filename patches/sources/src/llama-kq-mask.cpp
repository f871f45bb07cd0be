#include "llama-graph.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid.h"

#include "ggml-cpp.h"

#include <cfloat>

// The mask of a few tokens that see each a range of cells, computed from the ends of these ranges: with a large context, masks
// are most of what a small batch uploads.

llama_kv_cache::kq_bounds llama_kv_cache::get_kq_bounds(const llama_ubatch & ubatch, uint32_t n_kv) const {
    // numbers up to twice this are exact in F32
    if (swa_type != LLAMA_SWA_TYPE_NONE || hparams.use_alibi || n_kv > (1u << 23)) {
        return {};
    }

    kq_bounds res;

    const uint32_t n_tps = ubatch.n_tokens/(n_stream == 1 ? 1 : ubatch.n_seqs_unq);

    for (uint32_t i0 = 0; i0 < ubatch.n_tokens; i0 += n_tps) {
        const llama_seq_id seq_id = ubatch.seq_id[i0][0];
        const auto & cells = v_cells.at(seq_to_stream[seq_id]);

        // the cells of the sequence, whose positions must not decrease
        uint32_t first = n_kv;
        uint32_t last  = 0;
        for (uint32_t j = 0; j < n_kv; ++j) {
            if (cells.is_empty(j) || !cells.seq_has(j, seq_id)) {
                continue;
            }
            if (first == n_kv) {
                first = j;
            } else if (j != last + 1 || cells.pos_get(j) < cells.pos_get(last)) {
                return {};
            }
            last = j;
        }
        res.first.push_back(2.0f*first);

        for (uint32_t i = i0; i < i0 + n_tps; ++i) {
            uint32_t own = last;
            while (own > first && cells.pos_get(own) > ubatch.pos[i]) {
                --own;
            }

            // the last visible cell must be the token's own, and no other cell have its position, as in a picture
            if (ubatch.seq_id[i][0] != seq_id || first == n_kv || cells.pos_get(own) != ubatch.pos[i] ||
                    (own > first && cells.pos_get(own - 1) == ubatch.pos[i])) {
                return {};
            }
            res.last.push_back((float) (own - first));
        }
    }

    return res;
}

llama_kv_cache::kq_bounds llama_kv_cache_context::get_kq_bounds(const llama_cparams & cparams) const {
    // the computation is in F32, so a larger batch takes more memory than its mask
    constexpr uint32_t max_tokens = 32;

    // a context that reserves memory has no ubatches
    const bool usable = cparams.masks_on_device && cparams.flash_attn && cparams.causal_attn &&
        !ubatches.empty() && ubatches[i_cur].token && ubatches[i_cur].n_tokens <= max_tokens;

    return usable ? kv->get_kq_bounds(ubatches[i_cur], n_kv) : llama_kv_cache::kq_bounds();
}

// first: F32 [1, 1, 1, n_stream], last: F32 [1, n_batch/n_stream, 1, n_stream]; see llama_kv_cache::kq_bounds
static ggml_tensor * build_kq_mask(ggml_context * ctx, ggml_tensor * first, ggml_tensor * last, int64_t n_kv) {
    // cell first + j is visible if |2j - last| <= last. Both sides are even or both are odd
    ggml_tensor * cur = ggml_arange(ctx, 0.0f, 2.0f*n_kv, 2.0f);
    cur = ggml_repeat_4d(ctx, cur, n_kv, last->ne[1], 1, last->ne[3]);
    cur = ggml_sub(ctx, cur, first);
    cur = ggml_abs(ctx, ggml_sub(ctx, cur, last));
    cur = ggml_relu(ctx, ggml_sub(ctx, cur, last));

    // 0, or 2 or more: -INFINITY
    cur = ggml_scale(ctx, cur, -FLT_MAX);

    return ggml_cast(ctx, cur, GGML_TYPE_F16); // as flash attention requires
}

bool llama_kv_cache_context::can_compute_kq_mask(ggml_backend_dev_t dev) {
    ggml_init_params params = {
        /*.mem_size   =*/ 32*ggml_tensor_overhead() + ggml_graph_overhead(),
        /*.mem_buffer =*/ NULL,
        /*.no_alloc   =*/ true,
    };
    ggml_context_ptr ctx { ggml_init(params) };

    ggml_cgraph * gf = ggml_new_graph(ctx.get());
    ggml_tensor * first = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, 1, 1, 1, 2);
    ggml_tensor * last  = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, 1, 2, 1, 2);
    ggml_build_forward_expand(gf, build_kq_mask(ctx.get(), first, last, 256));

    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        if (!ggml_backend_dev_supports_op(dev, ggml_graph_node(gf, i))) {
            return false;
        }
    }

    return true;
}

// the ends of the ranges, if the mask of this graph is computed
class llm_graph_input_kq_bounds : public llm_graph_input_i {
public:
    void set_input(const llama_ubatch * ubatch) override {
        GGML_UNUSED(ubatch);

        // left unallocated when the graph only stores K/V without attending
        if (first && first->buffer) {
            ggml_backend_tensor_set(first, bounds.first.data(), 0, ggml_nbytes(first));
            ggml_backend_tensor_set(last,  bounds.last.data(),  0, ggml_nbytes(last));
        }
    }

    // the attention's own input compares the shapes
    bool can_reuse(const llm_graph_params & params) override {
        const auto * hybrid = dynamic_cast<const llama_memory_hybrid_context *>(params.mctx);
        const auto * mctx   = hybrid ? hybrid->get_attn() : static_cast<const llama_kv_cache_context *>(params.mctx);

        bounds = mctx->get_kq_bounds(params.cparams);

        return (first != nullptr) == !bounds.last.empty();
    }

    llama_kv_cache::kq_bounds bounds;

    ggml_tensor * first = nullptr;
    ggml_tensor * last  = nullptr;
};

void llama_kv_cache_context::compute_kq_mask(
        ggml_context * ctx, llm_graph_result * res, const llama_cparams & cparams, ggml_tensor * & kq_mask) const {
    if (!cparams.masks_on_device) {
        return;
    }

    auto inp = std::make_unique<llm_graph_input_kq_bounds>();

    inp->bounds = get_kq_bounds(cparams);
    if (!inp->bounds.last.empty()) {
        inp->first = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 1, 1,              1, kq_mask->ne[3]);
        inp->last  = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 1, kq_mask->ne[1], 1, kq_mask->ne[3]);
        ggml_set_input(inp->first);
        ggml_set_input(inp->last);
        ggml_set_name(inp->first, "attn_inp_kq_first");
        ggml_set_name(inp->last,  "attn_inp_kq_last");

        kq_mask = build_kq_mask(ctx, inp->first, inp->last, kq_mask->ne[0]);
    }

    res->add_input(std::move(inp));
}
