#include "head/draft_graph.h"

#include "error.h"
#include "head/hidden_rows.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>
#include <utility>

// llama-cpp-python 0.3.35 and older have only the second function, which is deprecated since. A weak symbol may be
// missing when the library is loaded.
#ifdef __ELF__
extern "C" {
bool ggml_prec_set_acc(ggml_tensor * a, ggml_prec precision) __attribute__((weak));
void ggml_flash_attn_ext_set_prec(ggml_tensor * a, ggml_prec precision) __attribute__((weak));
}
#endif

namespace mtp {

// Makes attention add in F32.
static void accumulate_in_f32(ggml_tensor * attention) {
#ifdef __ELF__
    if (ggml_prec_set_acc == nullptr) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
        ggml_flash_attn_ext_set_prec(attention, GGML_PREC_F32);
#pragma GCC diagnostic pop
        return;
    }
#endif
    ggml_prec_set_acc(attention, GGML_PREC_F32);
}

// The number of draft vocabulary entries per block of a two-level cumulative sum. Over this many entries,
// and over as many blocks, F32 is precise enough; over the whole vocabulary, small weights after a large
// one would be lost.
constexpr int64_t DRAW_BLOCK = 512;

// Up to how many tokens' shares are read alone from a device, rather than all weights: graphs are made for
// one of these numbers.
constexpr int64_t FEW_SHARES[] = {64, 1024};

// The mask [n_kv, n] F16 that lets each of n queries see a range of the rows. bounds: twice the first row, of each
// query or one for all, and then how many rows follow it for each; row first + j is visible if |2j - last| <= last.
// Both sides are even, or both are odd.
static ggml_tensor * range_mask(ggml_context * ctx, ggml_tensor * bounds, int64_t n, int64_t n_kv) {
    const int64_t firsts = bounds->ne[0] - n;
    ggml_tensor * first = ggml_view_2d(ctx, bounds, 1, firsts, sizeof(float), 0);
    ggml_tensor * last = ggml_view_2d(ctx, bounds, 1, n, sizeof(float), size_t(firsts) * sizeof(float));
    ggml_tensor * rows = ggml_repeat_4d(ctx, ggml_arange(ctx, 0.0f, float(2 * n_kv), 2.0f), n_kv, n, 1, 1);
    ggml_tensor * away = ggml_abs(ctx, ggml_sub(ctx, ggml_sub(ctx, rows, first), last));
    away = ggml_sub(ctx, away, last);
    // 0, or at least 2 and so minus infinity.
    return ggml_cast(ctx, ggml_scale(ctx, ggml_relu(ctx, away), -FLT_MAX), GGML_TYPE_F16);
}

bool DraftGraph::computes_masks(ggml_backend_t backend) {
    constexpr size_t most = 16; // tensors
    const TensorContext context(most, most);
    ggml_cgraph * graph = ggml_new_graph_custom(context.get(), most, false);
    ggml_build_forward_expand(graph, range_mask(context.get(), ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 4), 2, CACHE_BUCKET));
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        if (!ggml_backend_supports_op(backend, ggml_graph_node(graph, i))) {
            return false;
        }
    }
    return true;
}

int64_t DraftGraph::Key::drafting(int64_t step) const {
    return std::count_if(sequences.begin(), sequences.end(), [&](const Sequence & s) { return s.depth > step; });
}

// Builds the tensors of one layer. Shapes are in ggml's order; n is a number of rows: those that are fed, or one
// for each sequence that drafts.
class DraftGraph::LayerBuilder {
public:
    // keys, values: of each sequence.
    LayerBuilder(ggml_context * ctx, ggml_cgraph * graph, const HeadConfig & config, const BlockTensors & weights,
                 const std::vector<ggml_tensor *> & keys, const std::vector<ggml_tensor *> & values)
        : ctx_(ctx), graph_(graph), c_(config), w_(weights), keys_(keys), values_(values) {}

    ggml_tensor * draft_embedding() const { return w_.draft_embedding; }

    // What the block takes, [n_embd, n], from embeddings and hidden states of the same shape.
    ggml_tensor * project(ggml_tensor * embedding, ggml_tensor * hidden) {
        ggml_tensor * both = ggml_concat(ctx_, norm(embedding, w_.enorm), norm(hidden, w_.hnorm), 0);
        return ggml_mul_mat(ctx_, w_.eh_proj, both);
    }

    ggml_tensor * attention_norm(ggml_tensor * x) { return norm(x, w_.attn_norm); }

    // Writes the keys and values of normed rows, `each` for the first `n` sequences, at their positions. Later
    // reads use the tensors that set_rows returns, so that they depend on the write.
    void write_cache(ggml_tensor * normed, ggml_tensor * at, int64_t n, int64_t each) {
        const int64_t rows = n * each;
        ggml_tensor * k = ggml_reshape_3d(ctx_, linear(w_.k, w_.k_bias, normed), c_.head_dim, c_.n_head_kv, rows);
        k = rope(head_norm(k, w_.k_norm), at);
        k = ggml_reshape_2d(ctx_, k, c_.kv_width(), rows);
        ggml_tensor * v = linear(w_.v, w_.v_bias, normed);
        for (int64_t i = 0; i < n; ++i) {
            ggml_tensor * to = at->ne[0] == each ? at : ggml_view_1d(ctx_, at, each, size_t(i * each) * sizeof(int32_t));
            for (auto [cache, all] : {std::pair(&keys_[size_t(i)], k), std::pair(&values_[size_t(i)], v)}) {
                ggml_tensor * own =
                    n == 1 ? all : ggml_view_2d(ctx_, all, all->ne[0], each, all->nb[1], size_t(i * each) * all->nb[1]);
                *cache = ggml_set_rows(ctx_, *cache, own, to);
                ggml_build_forward_expand(graph_, *cache);
            }
        }
    }

    // n rows through the block, one of each sequence: [n_embd, n]. masks: of each sequence, [n_kv, steps].
    ggml_tensor * block(ggml_tensor * x, ggml_tensor * normed, ggml_tensor * positions,
                        const std::vector<ggml_tensor *> & masks, int64_t step) {
        const int64_t n = normed->ne[1];
        const size_t head = size_t(c_.head_dim) * sizeof(float);
        const size_t stride = (c_.gated ? 2 : 1) * head; // of a head: the query, then its gate
        ggml_tensor * both = linear(w_.q, w_.q_bias, normed);
        ggml_tensor * q = ggml_view_3d(ctx_, both, c_.head_dim, c_.n_head, n, stride, both->nb[1], 0);
        q = rope(head_norm(q, w_.q_norm), positions);
        ggml_tensor * attention = attend_all(q, 0, n, masks, step);
        if (c_.gated) {
            ggml_tensor * gate = ggml_view_3d(ctx_, both, c_.head_dim, c_.n_head, n, stride, both->nb[1], head);
            gate = ggml_cont_2d(ctx_, gate, c_.head_dim * c_.n_head, n);
            attention = ggml_mul(ctx_, attention, ggml_sigmoid(ctx_, gate));
        }
        if (w_.head_gate != nullptr) {
            ggml_tensor * gate = ggml_sigmoid(ctx_, ggml_mul_mat(ctx_, w_.head_gate, normed)); // [n_head, n]
            attention = ggml_mul(ctx_, ggml_reshape_3d(ctx_, attention, c_.head_dim, c_.n_head, n),
                                 ggml_reshape_3d(ctx_, gate, 1, c_.n_head, n));
            attention = ggml_reshape_2d(ctx_, attention, c_.head_dim * c_.n_head, n);
        }
        x = ggml_add(ctx_, ggml_mul_mat(ctx_, w_.attn_out, attention), x);

        normed = norm(x, w_.ffn_norm);
        return ggml_add(ctx_, c_.moe ? mixture(normed) : feed_forward(normed, w_.ffn_gate, w_.ffn_up, w_.ffn_down), x);
    }

    ggml_tensor * last_norm(ggml_tensor * x) { return norm(x, w_.head_norm); }

    // [draft vocabulary, n]
    ggml_tensor * logits(ggml_tensor * normed) { return ggml_mul_mat(ctx_, w_.output, normed); }

private:
    ggml_tensor * norm(ggml_tensor * x, ggml_tensor * weight) {
        return ggml_mul(ctx_, ggml_rms_norm(ctx_, x, c_.norm_eps), weight);
    }

    // A product of a matrix with rows of x, with the bias that some models have.
    ggml_tensor * linear(ggml_tensor * weight, ggml_tensor * bias, ggml_tensor * x) {
        ggml_tensor * out = ggml_mul_mat(ctx_, weight, x);
        return bias == nullptr ? out : ggml_add(ctx_, out, bias);
    }

    // A norm of each head [head_dim, heads, n], if the model has one.
    ggml_tensor * head_norm(ggml_tensor * x, ggml_tensor * weight) { return weight == nullptr ? x : norm(x, weight); }

    // x: [head_dim, heads, n].
    ggml_tensor * rope(ggml_tensor * x, ggml_tensor * positions) {
        if (!c_.mrope) {
            return ggml_rope_ext(ctx_, x, positions, w_.rope_factors, c_.n_rot, GGML_ROPE_TYPE_NEOX, c_.n_ctx_orig,
                                 c_.freq_base, c_.freq_scale, c_.ext_factor, c_.attn_factor, c_.beta_fast,
                                 c_.beta_slow);
        }
        int sections[4] = {c_.rope_sections[0], c_.rope_sections[1], c_.rope_sections[2], c_.rope_sections[3]};
        return ggml_rope_multi(ctx_, x, positions, nullptr, c_.n_rot, sections, GGML_ROPE_TYPE_IMROPE, c_.n_ctx_orig,
                               c_.freq_base, c_.freq_scale, c_.ext_factor, c_.attn_factor, c_.beta_fast,
                               c_.beta_slow);
    }

    // [head_dim, n_kv, n_head_kv]
    ggml_tensor * readable(ggml_tensor * rows, int64_t n_kv) {
        ggml_tensor * view = ggml_view_3d(ctx_, rows, c_.head_dim, c_.n_head_kv, n_kv,
                                          ggml_row_size(rows->type, c_.head_dim), rows->nb[1], 0);
        return ggml_permute(ctx_, view, 0, 2, 1, 3);
    }

    // Attention of sequence i's query, the i-th of q [head_dim, n_head, n]: [head_dim * n_head, 1].
    ggml_tensor * attend(ggml_tensor * q, int64_t i, const std::vector<ggml_tensor *> & masks, int64_t step) {
        ggml_tensor * own = ggml_view_3d(ctx_, q, c_.head_dim, c_.n_head, 1, q->nb[1], q->nb[2], size_t(i) * q->nb[2]);
        ggml_tensor * all = masks[size_t(i)];
        const int64_t n_kv = all->ne[0];
        ggml_tensor * mask = ggml_view_2d(ctx_, all, n_kv, 1, all->nb[1], size_t(step) * all->nb[1]);
        ggml_tensor * out =
            ggml_flash_attn_ext(ctx_, ggml_permute(ctx_, own, 0, 2, 1, 3), readable(keys_[size_t(i)], n_kv),
                                readable(values_[size_t(i)], n_kv), mask, 1.0f / std::sqrt(float(c_.head_dim)), 0.0f, 0.0f);
        accumulate_in_f32(out);
        return ggml_reshape_2d(ctx_, out, c_.head_dim * c_.n_head, 1);
    }

    // The attention of sequences first .. last - 1, side by side.
    ggml_tensor * attend_all(ggml_tensor * q, int64_t first, int64_t last, const std::vector<ggml_tensor *> & masks,
                             int64_t step) {
        if (last - first == 1) {
            return attend(q, first, masks, step);
        }
        const int64_t middle = (first + last) / 2;
        ggml_tensor * left = attend_all(q, first, middle, masks, step);
        return ggml_concat(ctx_, left, attend_all(q, middle, last, masks, step), 1);
    }

    ggml_tensor * feed_forward(ggml_tensor * x, ggml_tensor * gate, ggml_tensor * up, ggml_tensor * down) {
        ggml_tensor * both = activate(ggml_mul_mat(ctx_, gate, x), ggml_mul_mat(ctx_, up, x), c_.ffn_limit);
        return ggml_mul_mat(ctx_, down, both);
    }

    // SwiGLU, with a limit as in llama.cpp's build_ffn.
    ggml_tensor * activate(ggml_tensor * gate, ggml_tensor * up, float limit) {
        if (limit <= 1e-6f) {
            return ggml_swiglu_split(ctx_, gate, up);
        }
        gate = ggml_clamp(ctx_, ggml_silu(ctx_, gate), -INFINITY, limit);
        return ggml_mul(ctx_, gate, ggml_clamp(ctx_, up, -limit, limit));
    }

    // The selected experts, weighted by their probabilities, and the shared expert.
    ggml_tensor * mixture(ggml_tensor * x) {
        const int64_t used = c_.n_expert_used;
        const int64_t n = x->ne[1];
        ggml_tensor * logits = ggml_mul_mat(ctx_, w_.router, x); // [n_expert, n]
        ggml_tensor * probabilities = c_.sigmoid_router ? ggml_sigmoid(ctx_, logits) : ggml_soft_max(ctx_, logits);
        ggml_tensor * ranked = w_.router_bias ? ggml_add(ctx_, probabilities, w_.router_bias) : probabilities;
        ggml_tensor * chosen = ggml_argsort_top_k(ctx_, ranked, int(used)); // [used, n]
        ggml_tensor * shares = ggml_get_rows(ctx_, ggml_reshape_3d(ctx_, probabilities, 1, c_.n_expert, n), chosen);
        shares = ggml_reshape_2d(ctx_, shares, used, n);
        if (c_.normed_shares) {
            // Clamping to the smallest normal F16 avoids a division by zero, as in llama.cpp's build_moe_ffn.
            ggml_tensor * sum = ggml_clamp(ctx_, ggml_sum_rows(ctx_, shares), 6.103515625e-5f, INFINITY);
            shares = ggml_div(ctx_, shares, sum);
        }
        shares = ggml_reshape_3d(ctx_, shares, 1, used, n);
        if (c_.expert_scale != 1.0f) {
            shares = ggml_scale(ctx_, shares, c_.expert_scale);
        }

        ggml_tensor * rows = ggml_reshape_3d(ctx_, x, c_.n_embd, 1, n);
        ggml_tensor * gate;
        ggml_tensor * up;
        if (w_.gate_up_exps != nullptr) {
            ggml_tensor * both = ggml_mul_mat_id(ctx_, w_.gate_up_exps, rows, chosen); // [2 n_ff, used, n]
            const size_t half = size_t(c_.n_ff_expert) * sizeof(float);
            gate = ggml_view_3d(ctx_, both, c_.n_ff_expert, used, n, both->nb[1], both->nb[2], 0);
            up = ggml_view_3d(ctx_, both, c_.n_ff_expert, used, n, both->nb[1], both->nb[2], half);
        } else {
            gate = ggml_mul_mat_id(ctx_, w_.gate_exps, rows, chosen);
            up = ggml_mul_mat_id(ctx_, w_.up_exps, rows, chosen);
        }
        ggml_tensor * experts = ggml_mul_mat_id(ctx_, w_.down_exps, activate(gate, up, c_.expert_limit), chosen);
        experts = ggml_mul(ctx_, experts, shares); // [n_embd, used, n]
        ggml_tensor * out = nullptr;
        for (int64_t i = 0; i < used; ++i) {
            ggml_tensor * one = ggml_view_2d(ctx_, experts, c_.n_embd, n, experts->nb[2], size_t(i) * experts->nb[1]);
            out = out == nullptr ? one : ggml_add(ctx_, out, one);
        }
        if (used == 1) {
            out = ggml_cont(ctx_, out); // the caller adds to it
        }
        if (w_.shared_up != nullptr) {
            ggml_tensor * shared = feed_forward(x, w_.shared_gate, w_.shared_up, w_.shared_down);
            if (w_.shared_router != nullptr) {
                ggml_tensor * share = ggml_sigmoid(ctx_, ggml_mul_mat(ctx_, w_.shared_router, x)); // [1, n]
                shared = ggml_mul(ctx_, shared, share);
            }
            out = ggml_add(ctx_, out, shared);
        }
        return out;
    }

    ggml_context * ctx_;
    ggml_cgraph * graph_;
    const HeadConfig & c_;
    const BlockTensors & w_;
    std::vector<ggml_tensor *> keys_;   // each sequence's rows after the last write
    std::vector<ggml_tensor *> values_; // likewise
};

// Writes the index of the first maximum of each column, 0 if there is none. The loop uses lanes that compilers
// vectorize.
static void find_largest(ggml_tensor * indices, int thread, int n_threads, void *) {
    constexpr int64_t n_lanes = 32;
    const ggml_tensor * columns = indices->src[0];
    const int64_t n = columns->ne[0];
    for (int64_t i = thread; i < indices->ne[0]; i += n_threads) {
        const float * column = reinterpret_cast<const float *>(static_cast<const char *>(columns->data) + size_t(i) * columns->nb[1]);
        float lanes[n_lanes];
        std::fill_n(lanes, n_lanes, -INFINITY);
        int64_t at = 0;
        for (; at + n_lanes <= n; at += n_lanes) {
            for (int64_t lane = 0; lane < n_lanes; ++lane) {
                lanes[lane] = column[at + lane] > lanes[lane] ? column[at + lane] : lanes[lane];
            }
        }
        float largest = *std::max_element(lanes, lanes + n_lanes);
        for (; at < n; ++at) {
            largest = column[at] > largest ? column[at] : largest;
        }
        const int64_t found = std::find(column, column + n, largest) - column;
        static_cast<int32_t *>(indices->data)[i] = int32_t(found < n ? found : 0);
    }
}

// Builds the tensors of one graph.
class DraftGraph::Builder {
public:
    Builder(DraftGraph & g, const std::vector<BlockTensors> & weights)
        : g_(g), config_(g.layers_.front()), ctx_(g.context_.get()) {
        for (size_t i = 0; i < g.layers_.size(); ++i) {
            layers_.emplace_back(ctx_, g.graph_, g.layers_[i], weights[i], g.keys_[i], g.values_[i]);
        }
    }

    void build() {
        const Key & key = g_.key_;
        const int64_t rows = key.rows * key.n();
        const int64_t depth = key.depth();
        if (key.indexed) {
            g_.fed_indices_ = input(ggml_new_tensor_1d(ctx_, GGML_TYPE_I32, rows), "fed indices", sizeof(int32_t));
        }
        ggml_tensor * hidden = fed_hidden(rows);
        g_.feed_positions_ = positions(rows, "feed positions");
        for (int64_t step = 0; step < depth; ++step) {
            g_.step_positions_.push_back(positions(key.drafting(step), "step positions"));
        }
        for (const Key::Sequence & sequence : key.sequences) {
            if (depth == 0) {
                g_.masks_.push_back(nullptr);
            } else if (key.masks_on_device) {
                const int64_t firsts = config_.window > 0 || layers_.size() > 1 ? sequence.depth : 1;
                ggml_tensor * bounds = ggml_new_tensor_1d(ctx_, GGML_TYPE_F32, firsts + sequence.depth);
                g_.bounds_.push_back(input(bounds, "bounds", sizeof(float)));
                g_.masks_.push_back(range_mask(ctx_, bounds, sequence.depth, sequence.n_kv));
            } else {
                g_.masks_.push_back(input(ggml_new_tensor_2d(ctx_, GGML_TYPE_F16, sequence.n_kv, sequence.depth), "mask"));
            }
        }
        if (key.draws) {
            g_.sharpness_ = input(ggml_new_tensor_1d(ctx_, GGML_TYPE_F32, 1), "sharpness");
            g_.cutoff_ = input(ggml_new_tensor_1d(ctx_, GGML_TYPE_F32, 1), "cutoff");
            g_.uniforms_ = input(ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, 4, depth), "uniforms");
        }

        ggml_tensor * x = nullptr; // what the next block takes, before and after its first norm
        ggml_tensor * normed = nullptr;
        for (size_t i = 0; i < layers_.size(); ++i) {
            ggml_tensor * fed = layers_[i].project(fed_embedding(i, rows), hidden);
            ggml_tensor * fed_normed = layers_[i].attention_norm(fed);
            layers_[i].write_cache(fed_normed, g_.feed_positions_, key.n(), key.rows);
            if (i == 0 && depth > 0) {
                x = last_columns(fed);
                normed = last_columns(fed_normed);
            }
        }
        for (int64_t step = 0; step < depth; ++step) {
            LayerBuilder & layer = layers_.size() == 1 ? layers_.front() : layers_[size_t(step)];
            const int64_t n = key.drafting(step);
            // The drafted tokens that the layer has not seen.
            for (int64_t i = layers_.size() == 1 ? std::max<int64_t>(step, 1) : 1; i <= step; ++i) {
                ggml_tensor * chosen = ggml_get_rows(ctx_, layer.draft_embedding(), first(g_.indices_[size_t(i - 1)], n));
                x = layer.project(chosen, first_columns(hidden_[size_t(i - 1)], n));
                normed = layer.attention_norm(x);
                layer.write_cache(normed, step_positions(i, n), n, 1);
            }
            x = layer.block(x, normed, step_positions(step, n), g_.masks_, step);
            normed = layer.last_norm(x);
            draft(layer.logits(normed), step);
            hidden_.push_back(config_.passes_norm ? normed : x);
        }
    }

private:
    // alignment: 0 for that of the device. Less is enough for what is only used as indices of rows, or by
    // operations on elements.
    ggml_tensor * input(ggml_tensor * tensor, const char * name, size_t alignment = 0) {
        ggml_set_input(tensor);
        ggml_set_name(tensor, name);
        g_.inputs_->add(tensor, alignment > 0 ? alignment : g_.alignment_);
        return tensor;
    }

    ggml_tensor * positions(int64_t n, const char * name) {
        return input(ggml_new_tensor_1d(ctx_, GGML_TYPE_I32, (config_.mrope ? 4 : 1) * n), name);
    }

    // Those of a step's first n sequences, which are all of them if there is one layer.
    ggml_tensor * step_positions(int64_t step, int64_t n) {
        ggml_tensor * all = g_.step_positions_[size_t(step)];
        return n == g_.key_.drafting(step) ? all : first(all, n);
    }

    // The embeddings of the fed tokens for a layer, [n_embd, rows].
    ggml_tensor * fed_embedding(size_t layer, int64_t rows) {
        if (g_.key_.indexed) {
            return ggml_get_rows(ctx_, layers_[layer].draft_embedding(), g_.fed_indices_);
        }
        for (size_t other = 0; other < layer; ++other) {
            if (layers_[other].draft_embedding() == layers_[layer].draft_embedding()) {
                g_.fed_embeddings_.push_back(g_.fed_embeddings_[other]);
                return g_.fed_embeddings_.back();
            }
        }
        g_.fed_embeddings_.push_back(input(ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, config_.n_embd, rows), "embedding"));
        return g_.fed_embeddings_.back();
    }

    // The hidden states before the fed tokens, [n_embd, rows].
    ggml_tensor * fed_hidden(int64_t rows) {
        if (!g_.key_.hidden_on_device) {
            return g_.hidden_ = input(ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, config_.n_embd, rows), "hidden");
        }
        g_.hidden_rows_ = input(ggml_new_tensor_1d(ctx_, GGML_TYPE_I32, rows), "hidden rows", sizeof(int32_t));
        return ggml_get_rows(ctx_, g_.hidden_, g_.hidden_rows_);
    }

    // A tensor that is read after the run. packed: in every run.
    void output(ggml_tensor * tensor, bool packed) {
        ggml_set_output(tensor);
        if (packed) {
            g_.outputs_->add(tensor, sizeof(float));
        }
        ggml_build_forward_expand(g_.graph_, tensor);
    }

    // [ne[0], sequences]: each sequence's last row of R.
    ggml_tensor * last_columns(ggml_tensor * x) {
        const int64_t rows = g_.key_.rows;
        const int64_t n = g_.key_.n();
        ggml_tensor * last = ggml_view_2d(ctx_, x, x->ne[0], n, size_t(rows) * x->nb[1], size_t(rows - 1) * x->nb[1]);
        return n == 1 || rows == 1 ? last : ggml_cont(ctx_, last);
    }

    ggml_tensor * first(ggml_tensor * x, int64_t n) {
        return n == x->ne[0] ? x : ggml_view_1d(ctx_, x, n, 0);
    }

    ggml_tensor * first_columns(ggml_tensor * x, int64_t n) {
        return n == x->ne[1] ? x : ggml_view_2d(ctx_, x, x->ne[0], n, x->nb[1], 0);
    }

    // [1, 1, n]: of each column [m, n] the element at its index [n]
    ggml_tensor * element(ggml_tensor * columns, ggml_tensor * indices) {
        const int64_t n = columns->ne[1];
        return ggml_get_rows(ctx_, ggml_reshape_3d(ctx_, columns, 1, columns->ne[0], n),
                             ggml_reshape_2d(ctx_, indices, 1, n));
    }

    // The indices [n] of the maxima of columns [m, n], the lowest index if there are several. ggml's argmax returns
    // one of them that depends on the device: on a CPU the highest.
    ggml_tensor * largest(ggml_tensor * columns) {
        const int64_t n = columns->ne[1];
        if (ggml_backend_dev_type(ggml_backend_get_device(g_.backend_)) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            return ggml_custom_4d(ctx_, GGML_TYPE_I32, n, 1, 1, 1, &columns, 1, find_largest, GGML_N_TASKS_MAX, nullptr);
        }
        ggml_tensor * maxima = ggml_reshape_2d(ctx_, element(columns, any_largest(columns)), 1, n);
        // 0 at a maximum, far below anywhere else.
        ggml_tensor * away = ggml_scale(ctx_, ggml_sub(ctx_, columns, maxima), FLT_MAX);
        return any_largest(ggml_sub(ctx_, away, ggml_arange(ctx_, 0.0f, float(columns->ne[0]), 1.0f)));
    }

    // The index of one of the maxima. If a column has none, as with NaNs, GPU kernels return -1, which would lead
    // to a read outside the table.
    ggml_tensor * any_largest(ggml_tensor * columns) {
        ggml_tensor * index = ggml_cast(ctx_, ggml_argmax(ctx_, columns), GGML_TYPE_F32); // exact below 2^24
        return ggml_cast(ctx_, ggml_clamp(ctx_, index, 0.0f, float(columns->ne[0] - 1)), GGML_TYPE_I32);
    }

    // Running sums of parts [n], as shares of the last of them.
    ggml_tensor * running_shares(ggml_tensor * parts) {
        ggml_tensor * sums = ggml_cumsum(ctx_, parts);
        ggml_tensor * total = ggml_view_1d(ctx_, sums, 1, size_t(sums->ne[0] - 1) * sizeof(float));
        return ggml_div(ctx_, sums, total);
    }

    // The index, [1] F32, of the first cumulative share [n] that exceeds a uniform of this step. It is n
    // minus the number of shares that exceed it. The uniform's two parts are subtracted one after the
    // other, so that no bit is lost.
    ggml_tensor * first_to_pass(ggml_tensor * shares, int64_t step, int64_t uniform) {
        const auto part = [&](int64_t i) {
            const size_t at = size_t(step) * g_.uniforms_->nb[1] + size_t(2 * uniform + i) * sizeof(float);
            return ggml_view_1d(ctx_, g_.uniforms_, 1, at);
        };
        const float n = float(shares->ne[0]);
        ggml_tensor * passed = ggml_step(ctx_, ggml_sub(ctx_, ggml_sub(ctx_, shares, part(0)), part(1)));
        ggml_tensor * index = ggml_scale_bias(ctx_, ggml_sum_rows(ctx_, passed), -1.0f, n);
        return ggml_clamp(ctx_, index, 0.0f, n - 1); // with NaNs no share exceeds it
    }

    // Samples an index [1] with the weights [n, 1]: first a block, then an entry in it. The exact
    // probability of a token, rounding included, is the product of the two increments of the cumulative
    // shares, which are kept for drawn_from().
    ggml_tensor * draw(ggml_tensor * weights, int64_t step) {
        const int64_t n = weights->ne[0];
        const int64_t blocks = (n + DRAW_BLOCK - 1) / DRAW_BLOCK;
        if (blocks * DRAW_BLOCK > n) {
            weights = ggml_pad(ctx_, weights, int(blocks * DRAW_BLOCK - n), 0, 0, 0);
        }
        ggml_tensor * rows = ggml_reshape_2d(ctx_, weights, DRAW_BLOCK, blocks);
        ggml_tensor * block_shares = running_shares(ggml_reshape_1d(ctx_, ggml_sum_rows(ctx_, rows), blocks));
        ggml_tensor * block = first_to_pass(block_shares, step, 0);
        ggml_tensor * row = ggml_get_rows(ctx_, rows, ggml_cast(ctx_, block, GGML_TYPE_I32));
        ggml_tensor * inner_shares = running_shares(ggml_reshape_1d(ctx_, row, DRAW_BLOCK));
        ggml_tensor * inner = first_to_pass(inner_shares, step, 1);
        ggml_tensor * index = ggml_add(ctx_, ggml_scale(ctx_, block, float(DRAW_BLOCK)), inner);
        index = ggml_clamp(ctx_, index, 0.0f, float(n - 1)); // exclude the padding of the last block
        output(weights, /*packed*/ false);
        output(block_shares, /*packed*/ true);
        output(inner_shares, /*packed*/ true);
        g_.weights_.push_back(weights);
        g_.block_shares_.push_back(block_shares);
        g_.inner_shares_.push_back(inner_shares);
        return ggml_cast(ctx_, index, GGML_TYPE_I32); // exact below 2^24
    }

    // The chosen tokens of logits [draft vocabulary, n], and their probabilities.
    void draft(ggml_tensor * logits, int64_t step) {
        ggml_tensor * index; // [n]
        if (g_.key_.draws) {
            ggml_tensor * lowest = ggml_add(ctx_, element(logits, any_largest(logits)), g_.cutoff_);
            ggml_tensor * kept = ggml_step(ctx_, ggml_sub(ctx_, logits, lowest));
            ggml_tensor * likely = ggml_soft_max(ctx_, ggml_mul(ctx_, logits, g_.sharpness_));
            index = draw(ggml_mul(ctx_, likely, kept), step);
        } else {
            index = largest(logits);
            ggml_tensor * probability = element(ggml_soft_max(ctx_, logits), index);
            output(probability, /*packed*/ true);
            g_.probabilities_.push_back(probability);
        }
        output(logits, /*packed*/ false);
        output(index, /*packed*/ true);
        g_.logits_.push_back(logits);
        g_.indices_.push_back(index);
    }

    DraftGraph & g_;
    const HeadConfig & config_; // of the first layer; what is used of it is the same for all
    ggml_context * ctx_;
    std::vector<LayerBuilder> layers_;
    std::vector<ggml_tensor *> hidden_; // the hidden states that each step gives out, [n_embd, n]
};

static std::string op_name(const ggml_tensor * node) {
    const std::string name = ggml_op_name(node->op);
    return node->op == GGML_OP_UNARY || node->op == GGML_OP_GLU ? name + ":" + ggml_op_desc(node) : name;
}

// Keeps the memory of what a matrix of a block is multiplied by until the end of the run.
static void keep_inputs(const ggml_tensor * node) {
    if (!Imatrix::multiplies_block(node)) {
        return;
    }
    for (ggml_tensor * input : {node->src[1], node->src[2]}) {
        for (ggml_tensor * t : {input, input != nullptr ? input->view_src : nullptr}) {
            if (t != nullptr) {
                ggml_set_output(t);
            }
        }
    }
}

DraftGraph::DraftGraph(const Key & key, const std::vector<HeadConfig> & layers, const std::vector<BlockTensors> & weights,
                       const HeadCache & cache, const std::vector<int> & seqs, ggml_tensor * hidden,
                       ggml_backend_t backend)
    : key_(key), layers_(layers), backend_(backend), hidden_(hidden) {
    // A step has some 70 tensors, an expert adds two and a sequence 16; counted once, doubled. Of several
    // layers, each computes all tokens drafted before its step.
    const size_t depth = size_t(key.depth());
    const size_t parts = layers.size() == 1 ? depth + 1 : layers.size() + depth * (depth + 1) / 2;
    int64_t most_experts = 0;
    for (const HeadConfig & layer : layers) {
        most_experts = std::max(most_experts, layer.n_expert_used);
    }
    const size_t most = size_t(160 + 4 * most_experts + 32 * key.n()) * parts;
    context_ = TensorContext(most, most);
    graph_ = ggml_new_graph_custom(context_.get(), most, false);
    for (const HeadConfig & layer : layers) {
        for (std::vector<std::vector<ggml_tensor *>> * tensors : {&keys_, &values_}) {
            tensors->emplace_back();
            for (const Key::Sequence & sequence : key.sequences) {
                tensors->back().push_back(
                    ggml_new_tensor_2d(context_.get(), GGML_TYPE_F16, layer.kv_width(), sequence.n_kv));
            }
        }
    }
    for (size_t i = 0; i < seqs.size(); ++i) {
        bind(i, cache, seqs[i]);
    }
    alignment_ = ggml_backend_buft_get_alignment(ggml_backend_get_default_buffer_type(backend));
    inputs_ = std::make_unique<PackedTensors>(context_.get());
    outputs_ = std::make_unique<PackedTensors>(context_.get());
    Builder(*this, weights).build();
    if (key.collects) {
        for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
            keep_inputs(ggml_graph_node(graph_, i));
        }
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph_, i);
        if (!ggml_backend_supports_op(backend, node)) {
            const char * type = ggml_type_name(node->src[0] != nullptr ? node->src[0]->type : node->type);
            throw Error(MTP_ERROR_UNSUPPORTED, format("%s cannot run the draft graph: it has no %s for %s; load the head on "
                                                       "another device, such as CPU",
                                                      ggml_backend_name(backend), op_name(node).c_str(), type));
        }
    }
    inputs_->allocate(backend);
    outputs_->allocate(backend);
    allocator_.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)));
    if (!allocator_ || !ggml_gallocr_alloc_graph(allocator_.get(), graph_)) {
        throw Error(MTP_ERROR_MEMORY, format("the draft graph for %lld rows and depth %lld does not fit on %s",
                                             (long long) (key.rows * key.n()), (long long) key.depth(),
                                             ggml_backend_name(backend)));
    }
}

size_t DraftGraph::bytes() const {
    return ggml_gallocr_get_buffer_size(allocator_.get(), 0) + ggml_used_mem(context_.get()) + inputs_->bytes() +
           outputs_->bytes();
}

// Makes the graph use the cache of `seq`, which has as many rows or more, for sequence i.
void DraftGraph::bind(size_t i, const HeadCache & cache, int seq) {
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
        for (auto [own, other] : {std::pair(keys_[layer][i], cache.keys(seq, layer)),
                                  std::pair(values_[layer][i], cache.values(seq, layer))}) {
            if (own->data == other->data && own->buffer == other->buffer) {
                continue;
            }
            own->buffer = nullptr;
            own->data = nullptr;
            ggml_backend_tensor_alloc(other->buffer, own, other->data);
            for (ggml_tensor * t = own; t != nullptr; t = ggml_get_next_tensor(context_.get(), t)) {
                if (t->view_src == own) {
                    t->buffer = nullptr;
                    t->data = nullptr;
                    ggml_backend_view_init(t);
                }
            }
        }
    }
}

// Splits each number in [0, 1) into a multiple of 2^-24 and a smaller multiple of 2^-48, which floats
// represent exactly.
static std::vector<float> in_two_parts(const std::vector<double> & numbers) {
    std::vector<float> out;
    for (const double number : numbers) {
        const double first = std::floor(number * 0x1p24) * 0x1p-24;
        out.push_back(float(first));
        out.push_back(float(std::floor((number - first) * 0x1p48) * 0x1p-48));
    }
    return out;
}

void DraftGraph::write_inputs(const HeadCache & cache, const DraftVocabulary & vocabulary, const std::vector<Feed> & feeds,
                              const Drawing * drawing) {
    const int64_t rows = key_.rows;
    const int64_t all = rows * key_.n();
    const int64_t n_embd = layers_.front().n_embd;
    int32_t * positions = inputs_->host<int32_t>(feed_positions_);
    const int64_t sections = ggml_nelements(feed_positions_) / all; // 4 with M-RoPE
    for (size_t s = 0; s < feeds.size(); ++s) {
        const Feed & feed = feeds[s];
        const int64_t at = int64_t(s) * rows;
        const int64_t padding = rows - feed.rows;
        const int64_t last = feed.first + feed.rows - 1;
        if (key_.indexed) {
            int32_t * indices = inputs_->host<int32_t>(fed_indices_) + at;
            std::fill_n(indices, padding, 0);
            std::transform(feed.tokens, feed.tokens + feed.rows, indices + padding,
                           [&](int32_t token) { return vocabulary.index_of(token); });
        }
        for (size_t i = 0; i < fed_embeddings_.size(); ++i) {
            const auto end = fed_embeddings_.begin() + int64_t(i);
            if (std::find(fed_embeddings_.begin(), end, fed_embeddings_[i]) != end) {
                continue; // shared
            }
            float * embeddings = inputs_->host<float>(fed_embeddings_[i]) + at * n_embd;
            std::fill_n(embeddings, padding * n_embd, 0.0f);
            read_rows(vocabulary.tables[i].embedding, feed.tokens, size_t(feed.rows), embeddings + padding * n_embd);
        }
        if (key_.hidden_on_device) {
            int32_t * used = inputs_->host<int32_t>(hidden_rows_) + at;
            const int32_t first = int32_t(HiddenRows::index(feed.seq, feed.on_device));
            std::fill_n(used, padding, first);
            std::iota(used + padding, used + rows, first);
        } else {
            float * hidden = inputs_->host<float>(hidden_) + at * n_embd;
            std::fill_n(hidden, padding * n_embd, 0.0f);
            std::copy_n(feed.hidden, feed.rows * n_embd, hidden + padding * n_embd);
        }
        // Of M-RoPE's four positions per row, the first three are the same for text, and the fourth is 0.
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t position = i < padding ? last + 1 + i : feed.first + i - padding;
            for (int64_t section = 0; section < sections; ++section) {
                positions[section * all + at + i] = section < 3 ? int32_t(position) : 0;
            }
        }

        const Key::Sequence & sequence = key_.sequences[s];
        // A sequence without rows sees one row of the cache at least: without any, attention is NaN, which would stay there.
        const int64_t first_kept = std::min(cache.empty(feed.seq) ? feed.first : cache.first(feed.seq), last);
        for (int64_t step = 0; step < sequence.depth; ++step) {
            const int64_t n = key_.drafting(step);
            for (int64_t section = 0; section < sections; ++section) {
                inputs_->host<int32_t>(step_positions_[size_t(step)])[section * n + int64_t(s)] =
                    section < 3 ? int32_t(last + step) : 0;
            }
            const int64_t window = layers_[layers_.size() == 1 ? 0 : size_t(step)].window;
            const int64_t first = window > 0 ? std::max(first_kept, last + step + 1 - window) : first_kept;
            if (key_.masks_on_device) {
                float * bounds = inputs_->host<float>(bounds_[s]);
                const int64_t firsts = bounds_[s]->ne[0] - sequence.depth;
                bounds[std::min(step, firsts - 1)] = float(2 * first);
                bounds[firsts + step] = float(last + step - first);
                continue;
            }
            ggml_fp16_t * mask = inputs_->host<ggml_fp16_t>(masks_[s]) + step * sequence.n_kv;
            std::fill_n(mask, sequence.n_kv, ggml_fp32_to_fp16(-INFINITY));
            std::fill(mask + first, mask + last + step + 1, ggml_fp32_to_fp16(0.0f));
        }
    }
    if (key_.draws) {
        *inputs_->host<float>(sharpness_) = drawing->inverse_temperature;
        *inputs_->host<float>(cutoff_) = drawing->cutoff - 1e-5f; // keeps the token at the cutoff despite rounding
        const std::vector<float> uniforms = in_two_parts(drawing->uniforms);
        std::copy_n(uniforms.begin(), ggml_nelements(uniforms_), inputs_->host<float>(uniforms_)); // of these steps
    }
}

void DraftGraph::run(const HeadCache & cache, const DraftVocabulary & vocabulary, const std::vector<Feed> & feeds,
                     const Drawing * drawing, Transfers & transfers) {
    for (size_t s = 0; s < feeds.size(); ++s) {
        bind(s, cache, feeds[s].seq);
    }
    write_inputs(cache, vocabulary, feeds, drawing);
    inputs_->upload(backend_, transfers);
    const ggml_status status = ggml_backend_graph_compute_async(backend_, graph_);
    outputs_->download(backend_, transfers);
    ggml_backend_synchronize(backend_);
    ++transfers.graphs;
    transfers.syncs += !inputs_->in_host_memory();
    if (status != GGML_STATUS_SUCCESS) {
        throw Error(MTP_ERROR_BACKEND, format("%s: the draft graph failed: %s", ggml_backend_name(backend_),
                                              ggml_status_to_string(status)));
    }
}

int32_t DraftGraph::index(int64_t i, int64_t step) const {
    return outputs_->host<int32_t>(indices_[size_t(step)])[i];
}

// The step up to running share i; 0 where there is none, as between NaNs.
static double share(const float * shares, int64_t i) {
    const double out = double(shares[i]) - (i == 0 ? 0.0 : double(shares[i - 1]));
    return out > 0 ? out : 0;
}

float DraftGraph::probability(int64_t i, int64_t step) const {
    const auto host = [&](const ggml_tensor * tensor) { return outputs_->host<float>(tensor); };
    if (!key_.draws) {
        return host(probabilities_[size_t(step)])[i];
    }
    const int32_t drawn = index(i, step);
    return float(share(host(block_shares_[size_t(step)]), drawn / DRAW_BLOCK) *
                 share(host(inner_shares_[size_t(step)]), drawn % DRAW_BLOCK));
}

void DraftGraph::logits(int64_t i, int64_t step, float * out) const {
    const ggml_tensor * tensor = logits_[size_t(step)];
    ggml_backend_tensor_get(tensor, out, size_t(i) * tensor->nb[1], tensor->nb[1]);
}

DraftGraph::ShareReader DraftGraph::make_share_reader(const ggml_tensor * weights, int64_t n) const {
    constexpr size_t most = 12; // tensors
    ShareReader out = {};
    out.context = TensorContext(most, most);
    ggml_context * ctx = out.context.get();
    out.places = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 4 * n);
    ggml_set_input(out.places);
    ggml_tensor * blocks = ggml_view_1d(ctx, out.places, n, 0);
    ggml_tensor * entries = ggml_view_2d(ctx, out.places, 3, n, 3 * sizeof(int32_t), size_t(n) * sizeof(int32_t));
    // Not a view, whose graph would contain the draft graph.
    ggml_tensor * rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, DRAW_BLOCK, ggml_nelements(weights) / DRAW_BLOCK);
    ggml_backend_tensor_alloc(weights->buffer, rows, weights->data);
    ggml_tensor * sums = ggml_cumsum(ctx, ggml_get_rows(ctx, rows, blocks)); // [DRAW_BLOCK, n]
    out.sums = ggml_get_rows(ctx, ggml_reshape_3d(ctx, sums, 1, DRAW_BLOCK, n), entries);
    ggml_set_output(out.sums);
    out.graph = ggml_new_graph_custom(ctx, most, false);
    ggml_build_forward_expand(out.graph, out.sums);
    out.allocator.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend_)));
    if (!out.allocator || !ggml_gallocr_alloc_graph(out.allocator.get(), out.graph)) {
        throw Error(MTP_ERROR_MEMORY, format("the shares of %lld tokens do not fit on %s", (long long) n,
                                             ggml_backend_name(backend_)));
    }
    return out;
}

// The share of an entry of a block in the block's weights, from the running sums up to the entry, to the one
// before it and to the last one.
static double share_of(float sum, float before, float total, int64_t entry) {
    const double out = double(sum / total) - (entry == 0 ? 0.0 : double(before / total));
    return out > 0 ? out : 0;
}

// The shares of tokens in their blocks, by the sums that the device has drawn from.
std::vector<double> DraftGraph::shares_on_device(int64_t step, const std::vector<int32_t> & indices, Transfers & transfers) {
    const int64_t n = indices.size() <= size_t(FEW_SHARES[0]) ? FEW_SHARES[0] : FEW_SHARES[1];
    auto found = share_readers_.find({step, n});
    if (found == share_readers_.end()) {
        found = share_readers_.emplace(std::pair(step, n), make_share_reader(weights_[size_t(step)], n)).first;
    }
    const ShareReader & reader = found->second;
    std::vector<int32_t> places(size_t(4 * n), 0);
    for (size_t i = 0; i < indices.size(); ++i) {
        const int32_t entry = indices[i] % int32_t(DRAW_BLOCK);
        places[i] = indices[i] / int32_t(DRAW_BLOCK);
        int32_t * entries = places.data() + size_t(n) + 3 * i;
        entries[0] = entry;
        entries[1] = std::max(entry - 1, 0);
        entries[2] = DRAW_BLOCK - 1;
    }
    std::vector<float> sums(size_t(3 * n));
    ggml_backend_tensor_set_async(backend_, reader.places, places.data(), 0, ggml_nbytes(reader.places));
    const ggml_status status = ggml_backend_graph_compute_async(backend_, reader.graph);
    ggml_backend_tensor_get_async(backend_, reader.sums, sums.data(), 0, ggml_nbytes(reader.sums));
    ggml_backend_synchronize(backend_);
    ++transfers.graphs;
    ++transfers.syncs;
    transfers.bytes_up += int64_t(ggml_nbytes(reader.places));
    transfers.bytes_down += int64_t(ggml_nbytes(reader.sums));
    if (status != GGML_STATUS_SUCCESS) {
        throw Error(MTP_ERROR_BACKEND, format("%s: the weights of a draft could not be read: %s",
                                              ggml_backend_name(backend_), ggml_status_to_string(status)));
    }
    std::vector<double> out;
    for (size_t i = 0; i < indices.size(); ++i) {
        out.push_back(share_of(sums[3 * i], sums[3 * i + 1], sums[3 * i + 2], indices[i] % DRAW_BLOCK));
    }
    return out;
}

std::vector<double> DraftGraph::shares_on_host(int64_t step, const std::vector<int32_t> & indices, Transfers & transfers) const {
    const ggml_tensor * tensor = weights_[size_t(step)];
    const bool on_host = ggml_backend_buffer_is_host(tensor->buffer);
    std::vector<float> copy(on_host ? 0 : size_t(ggml_nelements(tensor)));
    if (!on_host) {
        ggml_backend_tensor_get(tensor, copy.data(), 0, ggml_nbytes(tensor));
        ++transfers.syncs;
        transfers.bytes_down += int64_t(ggml_nbytes(tensor));
    }
    const float * weights = on_host ? static_cast<const float *>(tensor->data) : copy.data();
    std::map<int64_t, std::vector<float>> sums; // by block
    std::vector<double> out;
    for (const int32_t index : indices) {
        std::vector<float> & block = sums[index / DRAW_BLOCK];
        if (block.empty()) {
            block.resize(DRAW_BLOCK);
            const float * row = weights + index / DRAW_BLOCK * DRAW_BLOCK;
            std::partial_sum(row, row + DRAW_BLOCK, block.begin()); // in F32, as ggml's cumsum
        }
        const int64_t entry = index % DRAW_BLOCK;
        out.push_back(share_of(block[size_t(entry)], block[size_t(std::max<int64_t>(entry - 1, 0))], block.back(), entry));
    }
    return out;
}

std::vector<double> DraftGraph::drawn_from(int64_t step, const std::vector<int32_t> & indices, Transfers & transfers) {
    const bool on_host = ggml_backend_buffer_is_host(weights_[size_t(step)]->buffer);
    const bool few = indices.size() <= size_t(FEW_SHARES[1]);
    std::vector<double> out = !on_host && few ? shares_on_device(step, indices, transfers)
                                              : shares_on_host(step, indices, transfers);
    const float * block_shares = outputs_->host<float>(block_shares_[size_t(step)]);
    for (size_t i = 0; i < indices.size(); ++i) {
        const double chance = share(block_shares, indices[i] / DRAW_BLOCK);
        out[i] = chance == 0 ? 0.0 : chance * out[i]; // a block without a chance has no shares
    }
    return out;
}

void DraftGraph::collect(Imatrix & imatrix) const {
    for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph_, i);
        if (Imatrix::multiplies_block(node)) {
            imatrix.add(node);
        }
    }
}

void DraftGraph::collect_ops(std::set<std::string> & names) const {
    for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
        names.insert(op_name(ggml_graph_node(graph_, i)));
    }
}

} // namespace mtp
