#include "draft_graph.h"

#include "error.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace mtp {

// The number of draft vocabulary entries per block of a two-level cumulative sum. Over this many entries,
// and over as many blocks, F32 is precise enough; over the whole vocabulary, small weights after a large
// one would be lost.
constexpr int64_t DRAW_BLOCK = 512;

// Builds the tensors of one graph. Shapes are in ggml's order; R rows or 1.
class DraftGraph::Builder {
public:
    Builder(DraftGraph & g, const HeadConfig & config, const BlockTensors & weights)
        : g_(g), c_(config), w_(weights), ctx_(g.context_.get()), keys_(g.keys_), values_(g.values_) {}

    void build() {
        const int64_t rows = g_.key_.rows;
        const int64_t depth = g_.key_.depth;
        g_.embedding_ = input(ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, c_.n_embd, rows), "embedding");
        g_.hidden_ = input(ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, c_.n_embd, rows), "hidden");
        g_.feed_positions_ = input(ggml_new_tensor_1d(ctx_, GGML_TYPE_I32, 4 * rows), "feed positions");
        g_.feed_slots_ = input(ggml_new_tensor_1d(ctx_, GGML_TYPE_I64, rows), "feed slots");
        if (depth > 0) {
            g_.step_positions_ = input(ggml_new_tensor_2d(ctx_, GGML_TYPE_I32, 4, depth), "step positions");
            g_.mask_ = input(ggml_new_tensor_2d(ctx_, GGML_TYPE_F16, g_.key_.n_kv, depth), "mask");
        }
        if (depth > 1) { // the first step uses a fed row's slot
            g_.step_slots_ = input(ggml_new_tensor_1d(ctx_, GGML_TYPE_I64, depth), "step slots");
        }

        if (g_.key_.draws) {
            g_.sharpness_ = input(ggml_new_tensor_1d(ctx_, GGML_TYPE_F32, 1), "sharpness");
            g_.cutoff_ = input(ggml_new_tensor_1d(ctx_, GGML_TYPE_F32, 1), "cutoff");
            g_.uniforms_ = input(ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, 4, depth), "uniforms");
        }

        ggml_tensor * x = project(g_.embedding_, g_.hidden_);
        ggml_tensor * normed = norm(x, w_.attn_norm);
        write_cache(normed, g_.feed_positions_, g_.feed_slots_);
        if (depth == 0) {
            return;
        }
        x = last_column(x);
        normed = last_column(normed);
        for (int64_t step = 0; step < depth; ++step) {
            if (step > 0) {
                ggml_tensor * chosen = ggml_get_rows(ctx_, w_.draft_embedding, g_.indices_.back());
                x = project(chosen, hidden_);
                normed = norm(x, w_.attn_norm);
                write_cache(normed, positions(step), ggml_view_1d(ctx_, g_.step_slots_, 1, size_t(step) * sizeof(int64_t)));
            }
            hidden_ = block(x, normed, step);
            draft(hidden_, step);
        }
    }

private:
    ggml_tensor * input(ggml_tensor * tensor, const char * name) {
        ggml_set_input(tensor);
        ggml_set_name(tensor, name);
        return tensor;
    }

    void output(ggml_tensor * tensor) {
        ggml_set_output(tensor);
        ggml_build_forward_expand(g_.graph_, tensor);
    }

    ggml_tensor * last_column(ggml_tensor * x) {
        return ggml_view_2d(ctx_, x, x->ne[0], 1, x->nb[1], size_t(x->ne[1] - 1) * x->nb[1]);
    }

    ggml_tensor * positions(int64_t step) {
        return ggml_view_1d(ctx_, g_.step_positions_, 4, size_t(step) * g_.step_positions_->nb[1]);
    }

    ggml_tensor * norm(ggml_tensor * x, ggml_tensor * weight) {
        return ggml_mul(ctx_, ggml_rms_norm(ctx_, x, c_.norm_eps), weight);
    }

    // x: [head_dim, heads, n]. positions: [4 n], of which only M-RoPE uses more than the first n.
    ggml_tensor * rope(ggml_tensor * x, ggml_tensor * positions) {
        if (!c_.mrope) {
            positions = ggml_view_1d(ctx_, positions, x->ne[2], 0);
            return ggml_rope_ext(ctx_, x, positions, nullptr, c_.n_rot, GGML_ROPE_TYPE_NEOX, c_.n_ctx_orig,
                                 c_.freq_base, c_.freq_scale, c_.ext_factor, c_.attn_factor, c_.beta_fast,
                                 c_.beta_slow);
        }
        int sections[4] = {c_.rope_sections[0], c_.rope_sections[1], c_.rope_sections[2], c_.rope_sections[3]};
        return ggml_rope_multi(ctx_, x, positions, nullptr, c_.n_rot, sections, GGML_ROPE_TYPE_IMROPE, c_.n_ctx_orig,
                               c_.freq_base, c_.freq_scale, c_.ext_factor, c_.attn_factor, c_.beta_fast,
                               c_.beta_slow);
    }

    // [n_embd, n] from embeddings and hidden states of the same shape
    ggml_tensor * project(ggml_tensor * embedding, ggml_tensor * hidden) {
        ggml_tensor * both = ggml_concat(ctx_, norm(embedding, w_.enorm), norm(hidden, w_.hnorm), 0);
        return ggml_mul_mat(ctx_, w_.eh_proj, both);
    }

    // Writes the keys and values of n normed rows. Later reads use the tensors that set_rows returns, so
    // that they depend on the write.
    void write_cache(ggml_tensor * normed, ggml_tensor * at, ggml_tensor * slots) {
        const int64_t n = normed->ne[1];
        ggml_tensor * k = ggml_reshape_3d(ctx_, ggml_mul_mat(ctx_, w_.k, normed), c_.head_dim, c_.n_head_kv, n);
        k = rope(norm(k, w_.k_norm), at);
        k = ggml_reshape_2d(ctx_, k, c_.kv_width(), n);
        ggml_tensor * v = ggml_mul_mat(ctx_, w_.v, normed);
        keys_ = ggml_set_rows(ctx_, keys_, k, slots);
        values_ = ggml_set_rows(ctx_, values_, v, slots);
        ggml_build_forward_expand(g_.graph_, keys_);
        ggml_build_forward_expand(g_.graph_, values_);
    }

    // [head_dim, n_kv, n_head_kv]
    ggml_tensor * readable(ggml_tensor * rows) {
        ggml_tensor * view = ggml_view_3d(ctx_, rows, c_.head_dim, c_.n_head_kv, g_.key_.n_kv,
                                          ggml_row_size(rows->type, c_.head_dim), rows->nb[1], 0);
        return ggml_permute(ctx_, view, 0, 2, 1, 3);
    }

    // One row through the block: [n_embd, 1] after the head's norm.
    ggml_tensor * block(ggml_tensor * x, ggml_tensor * normed, int64_t step) {
        const size_t element = sizeof(float);
        const size_t head = size_t(c_.head_dim) * element;
        ggml_tensor * both = ggml_mul_mat(ctx_, w_.q, normed); // per head query then gate
        ggml_tensor * q = ggml_view_3d(ctx_, both, c_.head_dim, c_.n_head, 1, 2 * head, 2 * head * size_t(c_.n_head), 0);
        ggml_tensor * gate =
            ggml_view_3d(ctx_, both, c_.head_dim, c_.n_head, 1, 2 * head, 2 * head * size_t(c_.n_head), head);
        gate = ggml_cont_2d(ctx_, gate, c_.head_dim * c_.n_head, 1);

        q = ggml_permute(ctx_, rope(norm(q, w_.q_norm), positions(step)), 0, 2, 1, 3);
        ggml_tensor * mask = ggml_view_2d(ctx_, g_.mask_, g_.key_.n_kv, 1, g_.mask_->nb[1], size_t(step) * g_.mask_->nb[1]);
        ggml_tensor * attention = ggml_flash_attn_ext(ctx_, q, readable(keys_), readable(values_), mask,
                                                      1.0f / std::sqrt(float(c_.head_dim)), 0.0f, 0.0f);
        ggml_prec_set_acc(attention, GGML_PREC_F32);
        attention = ggml_reshape_2d(ctx_, attention, c_.head_dim * c_.n_head, 1);
        attention = ggml_mul(ctx_, attention, ggml_sigmoid(ctx_, gate));
        x = ggml_add(ctx_, ggml_mul_mat(ctx_, w_.attn_out, attention), x);

        normed = norm(x, w_.post_norm);
        x = ggml_add(ctx_, c_.moe ? mixture(normed) : feed_forward(normed, w_.ffn_gate, w_.ffn_up, w_.ffn_down), x);
        return norm(x, w_.head_norm);
    }

    ggml_tensor * feed_forward(ggml_tensor * x, ggml_tensor * gate, ggml_tensor * up, ggml_tensor * down) {
        ggml_tensor * both = ggml_swiglu_split(ctx_, ggml_mul_mat(ctx_, gate, x), ggml_mul_mat(ctx_, up, x));
        return ggml_mul_mat(ctx_, down, both);
    }

    // The selected experts, weighted by their renormalized probabilities, and the gated shared expert.
    ggml_tensor * mixture(ggml_tensor * x) {
        const int64_t used = c_.n_expert_used;
        ggml_tensor * probabilities = ggml_soft_max(ctx_, ggml_mul_mat(ctx_, w_.router, x)); // [n_expert, 1]
        ggml_tensor * chosen = ggml_argsort_top_k(ctx_, probabilities, int(used));           // [used, 1]
        ggml_tensor * shares = ggml_get_rows(ctx_, ggml_reshape_3d(ctx_, probabilities, 1, c_.n_expert, 1), chosen);
        shares = ggml_reshape_2d(ctx_, shares, used, 1);
        // Clamping to the smallest normal F16 avoids a division by zero, as in llama.cpp's build_moe_ffn.
        ggml_tensor * sum = ggml_clamp(ctx_, ggml_sum_rows(ctx_, shares), 6.103515625e-5f, INFINITY);
        shares = ggml_reshape_3d(ctx_, ggml_div(ctx_, shares, sum), 1, used, 1);
        if (c_.expert_scale != 1.0f) {
            shares = ggml_scale(ctx_, shares, c_.expert_scale);
        }

        ggml_tensor * row = ggml_reshape_3d(ctx_, x, c_.n_embd, 1, 1);
        ggml_tensor * gate;
        ggml_tensor * up;
        if (w_.gate_up_exps != nullptr) {
            ggml_tensor * both = ggml_mul_mat_id(ctx_, w_.gate_up_exps, row, chosen); // [2 n_ff, used, 1]
            const size_t half = size_t(c_.n_ff_expert) * sizeof(float);
            gate = ggml_view_3d(ctx_, both, c_.n_ff_expert, used, 1, both->nb[1], both->nb[2], 0);
            up = ggml_view_3d(ctx_, both, c_.n_ff_expert, used, 1, both->nb[1], both->nb[2], half);
        } else {
            gate = ggml_mul_mat_id(ctx_, w_.gate_exps, row, chosen);
            up = ggml_mul_mat_id(ctx_, w_.up_exps, row, chosen);
        }
        ggml_tensor * experts = ggml_mul_mat_id(ctx_, w_.down_exps, ggml_swiglu_split(ctx_, gate, up), chosen);
        experts = ggml_mul(ctx_, experts, shares); // [n_embd, used, 1]
        ggml_tensor * out = nullptr;
        for (int64_t i = 0; i < used; ++i) {
            ggml_tensor * one = ggml_view_2d(ctx_, experts, c_.n_embd, 1, experts->nb[2], size_t(i) * experts->nb[1]);
            out = out == nullptr ? one : ggml_add(ctx_, out, one);
        }
        if (used == 1) {
            out = ggml_cont(ctx_, out); // the caller adds to it
        }
        if (w_.shared_up != nullptr) {
            ggml_tensor * shared = feed_forward(x, w_.shared_gate, w_.shared_up, w_.shared_down);
            ggml_tensor * share = ggml_sigmoid(ctx_, ggml_mul_mat(ctx_, w_.shared_router, x)); // [1, 1]
            out = ggml_add(ctx_, out, ggml_mul(ctx_, shared, share));
        }
        return out;
    }

    // [1, 1]: the element of a column [n, 1] at an index [1]
    ggml_tensor * element(ggml_tensor * column, ggml_tensor * index) {
        return ggml_get_rows(ctx_, ggml_reshape_2d(ctx_, column, 1, column->ne[0]), index);
    }

    // The index [1] of the maximum of a column [n, 1]. If there is none, as with NaNs, GPU kernels return
    // -1, which would lead to a read outside the table.
    ggml_tensor * largest(ggml_tensor * column) {
        ggml_tensor * index = ggml_cast(ctx_, ggml_argmax(ctx_, column), GGML_TYPE_F32); // exact below 2^24
        return ggml_cast(ctx_, ggml_clamp(ctx_, index, 0.0f, float(column->ne[0] - 1)), GGML_TYPE_I32);
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
        for (ggml_tensor * tensor : {weights, block_shares, inner_shares}) {
            output(tensor);
        }
        g_.weights_.push_back(weights);
        g_.block_shares_.push_back(block_shares);
        g_.inner_shares_.push_back(inner_shares);
        return ggml_cast(ctx_, index, GGML_TYPE_I32); // exact below 2^24
    }

    // Computes the logits of a hidden state, the chosen token and its probability.
    void draft(ggml_tensor * hidden, int64_t step) {
        ggml_tensor * logits = ggml_mul_mat(ctx_, w_.output, hidden); // [draft vocabulary, 1]
        ggml_tensor * index = largest(logits);                        // [1]
        if (g_.key_.draws) {
            ggml_tensor * lowest = ggml_add(ctx_, element(logits, index), g_.cutoff_);
            ggml_tensor * kept = ggml_step(ctx_, ggml_sub(ctx_, logits, lowest));
            ggml_tensor * likely = ggml_soft_max(ctx_, ggml_mul(ctx_, logits, g_.sharpness_));
            index = draw(ggml_mul(ctx_, likely, kept), step);
        } else {
            ggml_tensor * probability = element(ggml_soft_max(ctx_, logits), index);
            output(probability);
            g_.probabilities_.push_back(probability);
        }
        output(logits);
        output(index);
        g_.logits_.push_back(logits);
        g_.indices_.push_back(index);
    }

    DraftGraph & g_;
    const HeadConfig & c_;
    const BlockTensors & w_;
    ggml_context * ctx_;
    ggml_tensor * keys_;             // the sequence's rows after the last write
    ggml_tensor * values_;           // likewise
    ggml_tensor * hidden_ = nullptr; // the last step's hidden state, after the head's norm
};

static std::string op_name(const ggml_tensor * node) {
    const std::string name = ggml_op_name(node->op);
    return node->op == GGML_OP_UNARY || node->op == GGML_OP_GLU ? name + ":" + ggml_op_desc(node) : name;
}

DraftGraph::DraftGraph(const Key & key, const HeadConfig & config, const BlockTensors & weights,
                       const HeadCache & cache, int seq, ggml_backend_t backend)
    : key_(key), backend_(backend) {
    // A step has some 70 tensors, an expert adds two; counted once, doubled.
    const size_t most = size_t(160 + 4 * config.n_expert_used) * size_t(key.depth + 1);
    context_.reset(ggml_init({most * ggml_tensor_overhead() + ggml_graph_overhead_custom(most, false), nullptr, true}));
    if (!context_) {
        throw std::bad_alloc();
    }
    graph_ = ggml_new_graph_custom(context_.get(), most, false);
    keys_ = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F16, config.kv_width(), key.capacity);
    values_ = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F16, config.kv_width(), key.capacity);
    bind(cache.keys(seq), cache.values(seq));
    Builder(*this, config, weights).build();
    for (ggml_tensor * t = ggml_get_first_tensor(context_.get()); t != nullptr;
         t = ggml_get_next_tensor(context_.get(), t)) {
        if (t->view_src == keys_ || t->view_src == values_) {
            cache_views_.push_back(t);
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
    allocator_.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)));
    if (!allocator_ || !ggml_gallocr_alloc_graph(allocator_.get(), graph_)) {
        throw Error(MTP_ERROR_MEMORY, format("the draft graph for %lld rows and depth %lld does not fit on %s",
                                             (long long) key.rows, (long long) key.depth, ggml_backend_name(backend)));
    }
}

size_t DraftGraph::bytes() const {
    return ggml_gallocr_get_buffer_size(allocator_.get(), 0) + ggml_used_mem(context_.get());
}

// Makes the graph use these tensors, which have the shape of its own.
void DraftGraph::bind(const ggml_tensor * keys, const ggml_tensor * values) {
    const auto same = [](const ggml_tensor * a, const ggml_tensor * b) { return a->data == b->data && a->buffer == b->buffer; };
    if (same(keys_, keys) && same(values_, values)) {
        return;
    }
    for (auto [own, other] : {std::pair(keys_, keys), std::pair(values_, values)}) {
        own->buffer = nullptr;
        own->data = nullptr;
        ggml_backend_tensor_alloc(other->buffer, own, other->data);
    }
    for (ggml_tensor * view : cache_views_) {
        view->buffer = nullptr;
        view->data = nullptr;
        ggml_backend_view_init(view);
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

void DraftGraph::run(const HeadCache & cache, int seq, const float * embedding, const float * hidden, int64_t first,
                     const Drawing * drawing) {
    bind(cache.keys(seq), cache.values(seq));
    const int64_t first_kept = cache.empty(seq) ? first : cache.first(seq);
    const int64_t rows = key_.rows;
    const int64_t depth = key_.depth;
    const int64_t last = first + rows - 1;

    ggml_backend_tensor_set(embedding_, embedding, 0, ggml_nbytes(embedding_));
    ggml_backend_tensor_set(hidden_, hidden, 0, ggml_nbytes(hidden_));

    // M-RoPE takes four positions per row. For text the first three are the same, and the fourth has no
    // effect.
    std::vector<int32_t> positions(size_t(4 * rows));
    std::vector<int64_t> slots(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) {
        slots[size_t(i)] = first + i;
        for (int64_t section = 0; section < 4; ++section) {
            positions[size_t(section * rows + i)] = section < 3 ? int32_t(first + i) : 0;
        }
    }
    ggml_backend_tensor_set(feed_positions_, positions.data(), 0, ggml_nbytes(feed_positions_));
    ggml_backend_tensor_set(feed_slots_, slots.data(), 0, ggml_nbytes(feed_slots_));

    if (depth > 0) {
        positions.assign(size_t(4 * depth), 0);
        slots.assign(size_t(depth), 0);
        const ggml_fp16_t shown = ggml_fp32_to_fp16(0.0f);
        const ggml_fp16_t hidden_away = ggml_fp32_to_fp16(-INFINITY);
        std::vector<ggml_fp16_t> mask(size_t(key_.n_kv * depth));
        for (int64_t step = 0; step < depth; ++step) {
            const int64_t at = last + step;
            slots[size_t(step)] = at;
            for (int64_t section = 0; section < 3; ++section) {
                positions[size_t(4 * step + section)] = int32_t(at);
            }
            for (int64_t i = 0; i < key_.n_kv; ++i) {
                mask[size_t(step * key_.n_kv + i)] = i >= first_kept && i <= at ? shown : hidden_away;
            }
        }
        ggml_backend_tensor_set(step_positions_, positions.data(), 0, ggml_nbytes(step_positions_));
        ggml_backend_tensor_set(mask_, mask.data(), 0, ggml_nbytes(mask_));
        if (step_slots_ != nullptr) {
            ggml_backend_tensor_set(step_slots_, slots.data(), 0, ggml_nbytes(step_slots_));
        }
    }

    if (key_.draws) {
        const float cutoff = drawing->cutoff - 1e-5f; // keeps the token at the cutoff despite rounding
        ggml_backend_tensor_set(sharpness_, &drawing->inverse_temperature, 0, sizeof(float));
        ggml_backend_tensor_set(cutoff_, &cutoff, 0, sizeof(float));
        ggml_backend_tensor_set(uniforms_, in_two_parts(drawing->uniforms).data(), 0, ggml_nbytes(uniforms_));
    }

    const ggml_status status = ggml_backend_graph_compute(backend_, graph_);
    if (status != GGML_STATUS_SUCCESS) {
        throw Error(MTP_ERROR_BACKEND, format("%s: the draft graph failed: %s", ggml_backend_name(backend_),
                                              ggml_status_to_string(status)));
    }
}

static std::vector<float> read(const ggml_tensor * tensor) {
    std::vector<float> out(size_t(ggml_nelements(tensor)));
    ggml_backend_tensor_get(tensor, out.data(), 0, ggml_nbytes(tensor));
    return out;
}

int32_t DraftGraph::index(int64_t step) const {
    int32_t out = 0;
    ggml_backend_tensor_get(indices_[size_t(step)], &out, 0, sizeof(out));
    return out;
}

// The step up to running share i; 0 where there is none, as between NaNs.
static double share(const float * shares, int64_t i) {
    const double out = double(shares[i]) - (i == 0 ? 0.0 : double(shares[i - 1]));
    return out > 0 ? out : 0;
}

float DraftGraph::probability(int64_t step) const {
    float out = 0;
    if (!key_.draws) {
        ggml_backend_tensor_get(probabilities_[size_t(step)], &out, 0, sizeof(out));
        return out;
    }
    const int32_t drawn = index(step);
    return float(share(read(block_shares_[size_t(step)]).data(), drawn / DRAW_BLOCK) *
                 share(read(inner_shares_[size_t(step)]).data(), drawn % DRAW_BLOCK));
}

void DraftGraph::logits(int64_t step, float * out) const {
    ggml_tensor * tensor = logits_[size_t(step)];
    ggml_backend_tensor_get(tensor, out, 0, ggml_nbytes(tensor));
}

void DraftGraph::drawn_from(int64_t step, std::vector<double> & out) const {
    const std::vector<float> weights = read(weights_[size_t(step)]);
    const std::vector<float> block_shares = read(block_shares_[size_t(step)]);
    out.resize(weights.size());
    std::vector<float> inner(DRAW_BLOCK);
    for (size_t block = 0; block < block_shares.size(); ++block) {
        const float * row = weights.data() + block * DRAW_BLOCK;
        double * to = out.data() + block * DRAW_BLOCK;
        const double chance = share(block_shares.data(), int64_t(block));
        if (chance == 0) {
            std::fill(to, to + DRAW_BLOCK, 0.0);
            continue;
        }
        std::partial_sum(row, row + DRAW_BLOCK, inner.begin()); // in F32, as ggml's cumsum
        const float total = inner.back();
        for (float & sum : inner) {
            sum /= total;
        }
        for (int64_t i = 0; i < DRAW_BLOCK; ++i) {
            to[i] = chance * share(inner.data(), i);
        }
    }
    out.resize(size_t(logits_[size_t(step)]->ne[0]));
}

void DraftGraph::collect_ops(std::set<std::string> & names) const {
    for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
        names.insert(op_name(ggml_graph_node(graph_, i)));
    }
}

} // namespace mtp
