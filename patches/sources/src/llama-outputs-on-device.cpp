#include "ggml-backend.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>

// outputs that stay on the device that computed them, until they are asked for

// whether a device can number the tokens, which tells those with the same logit apart
static bool can_compute_lowest(ggml_backend_dev_t dev) {
    ggml_context_ptr ctx { ggml_init({ 2*ggml_tensor_overhead(), nullptr, true }) };

    return ggml_backend_dev_supports_op(dev, ggml_arange(ctx.get(), 0.0f, 2.0f, 1.0f));
}

bool llama_context::set_outputs_on_device(bool value) {
    LLAMA_LOG_DEBUG("%s: value = %d\n", __func__, value);

    ggml_backend_dev_t dev = model.dev_output();

    const bool possible = dev != nullptr && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU &&
        model.split_mode() != LLAMA_SPLIT_MODE_TENSOR;

    cparams.outputs_on_device = value && possible;

    // masks are computed only if all layers use them on this device
    bool masks = cparams.outputs_on_device && cparams.offload_kqv && llama_kv_cache_context::can_compute_kq_mask(dev);
    for (uint32_t il = 0; il < model.hparams.n_layer(); ++il) {
        masks = masks && model.dev_layer(il) == dev;
    }
    cparams.masks_on_device = masks;

    cparams.lowest_on_device = cparams.outputs_on_device && can_compute_lowest(dev);

    sched_need_reserve = true; // graphs differ

    return possible;
}

// in the graph: result_largest [2, n_outputs], of each output the token with the largest logit, the lowest one if there are
// several, and the sum of the logits
void llm_graph_result::build_largest(const llm_graph_params & params) {
    t_largest = nullptr;

    if (!params.cparams.outputs_on_device || t_logits == nullptr || t_logits->type != GGML_TYPE_F32) {
        return;
    }

    ggml_context * ctx0 = get_ctx();

    const int64_t n_vocab = t_logits->ne[0];
    const int64_t n_rows  = t_logits->ne[1];

    // as floats, which represent a token exactly, so that one transfer reads both
    ggml_tensor * token = ggml_cast(ctx0, ggml_argmax(ctx0, t_logits), GGML_TYPE_F32);

    // Of several tokens with the largest logit, argmax returns one that depends on the device: the lowest has the lowest
    // number among those that are not far below. More outputs than drafts need, as of a prompt, would need much memory.
    if (params.cparams.lowest_on_device && n_rows <= 128) {
        ggml_tensor * index   = ggml_cast(ctx0, ggml_clamp(ctx0, token, 0.0f, (float) (n_vocab - 1)), GGML_TYPE_I32);
        ggml_tensor * largest = ggml_get_rows(ctx0, ggml_reshape_3d(ctx0, t_logits, 1, n_vocab, n_rows),
                                              ggml_reshape_2d(ctx0, index, 1, n_rows));
        ggml_tensor * below   = ggml_sub(ctx0, t_logits, ggml_reshape_2d(ctx0, largest, 1, n_rows));
        ggml_tensor * ranks   = ggml_sub(ctx0, ggml_scale(ctx0, below, FLT_MAX), ggml_arange(ctx0, 0.0f, (float) n_vocab, 1.0f));
        token = ggml_cast(ctx0, ggml_argmax(ctx0, ranks), GGML_TYPE_F32);
    }
    token = ggml_reshape_2d(ctx0, token, 1, n_rows);

    // the sum is finite only if all logits are: argmax alone would not tell
    t_largest = ggml_concat(ctx0, token, ggml_sum_rows(ctx0, t_logits), 0);
    ggml_set_name(t_largest, "result_largest");
    ggml_set_output(t_largest);

    ggml_build_forward_expand(get_gf(), t_largest);
}

void llama_context::output_stay(ggml_tensor * t_logits, ggml_tensor * t_h_nextn, ggml_tensor * t_largest) {
    on_device.logits  = t_logits;
    on_device.nextn   = cparams.embeddings_nextn_masked ? nullptr : t_h_nextn;
    on_device.largest = logits.data; // which the logits themselves need only if they are asked for

    GGML_ASSERT(ggml_nelements(t_largest) <= (int64_t) logits.size);
    ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(sched.get(), t_largest);
    ggml_backend_tensor_get_async(backend, t_largest, on_device.largest, 0, ggml_nbytes(t_largest));
}

void llama_context::output_fetch(ggml_tensor * & tensor, buffer_view<float> & to) {
    if (tensor == nullptr) {
        return;
    }

    GGML_ASSERT(ggml_nelements(tensor) <= (int64_t) to.size);

    if (tensor == on_device.logits) {
        on_device.largest = nullptr;
    }

    ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(sched.get(), tensor);
    ggml_backend_tensor_get_async(backend, tensor, to.data, 0, ggml_nbytes(tensor));
    ggml_backend_sched_synchronize(sched.get());

    tensor = nullptr;
}

void llama_context::output_fetch_all() {
    output_fetch(on_device.logits, logits);
    output_fetch(on_device.nextn,  embd_nextn);
}

ggml_tensor * llama_context::get_embeddings_nextn_tensor(ggml_backend_t * backend) {
    if (on_device.nextn != nullptr) {
        *backend = ggml_backend_sched_get_tensor_backend(sched.get(), on_device.nextn);
        is_busy  = true; // the caller may add work to the backend
    }

    return on_device.nextn;
}

llama_token llama_context::get_largest_token_ith(int32_t i) {
    if (on_device.largest == nullptr) {
        return LLAMA_TOKEN_NULL;
    }

    try {
        const int64_t j = output_resolve_row(i);
        const float token = on_device.largest[2*j];
        const bool valid = std::isfinite(on_device.largest[2*j + 1]) && token >= 0 && token < (float) model.vocab.n_tokens();
        return valid ? (llama_token) token : LLAMA_TOKEN_NULL;
    } catch (const std::exception &) {
        return LLAMA_TOKEN_NULL; // get_logits_ith says why
    }
}

bool llama_context::get_largest_logits_ith(int32_t i, int32_t k, llama_token * tokens, float * logits, float * share) {
    if (on_device.logits == nullptr || k < 1 || k > on_device.logits->ne[0] || !output_find_top(k)) {
        return false;
    }

    try {
        // more than k may have been found
        const int64_t n = top_logits.k;
        const float * data = on_device.top_data.data() + output_resolve_row(i)*(2*n + 1);

        if (!std::isfinite(data[2*n])) {
            return false; // a logit is infinite or NaN
        }

        std::vector<int64_t> order(n);
        std::iota(order.begin(), order.end(), 0);
        // of tokens with the same logit the lowest comes first, as in a list of all
        std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int64_t a, int64_t b) {
            return data[n + a] != data[n + b] ? data[n + a] > data[n + b] : data[a] < data[b];
        });

        for (int32_t j = 0; j < k; ++j) {
            tokens[j] = (llama_token) data[order[j]];
            logits[j] = data[n + order[j]];
        }
        if (share != nullptr) {
            *share = data[2*n];
        }
        return true;
    } catch (const std::exception &) {
        return false; // get_logits_ith says why
    }
}

bool llama_context::output_find_top(int32_t k) {
    auto & top = top_logits;
    const ggml_tensor * logits = on_device.logits;

    if (!on_device.top_data.empty() && k <= top.k) {
        return true;
    }
    if (!ggml_is_contiguous(logits)) {
        return false;
    }

    ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(sched.get(), on_device.logits);

    const bool same = top.logits != nullptr && top.logits->buffer == logits->buffer && top.logits->data == logits->data &&
        ggml_are_same_shape(top.logits, logits);

    if (!same || (top.supported ? k > top.k : k != top.k)) {
        const int64_t n_vocab = logits->ne[0];
        const int64_t n_rows  = logits->ne[1];
        const size_t  n_max   = 32; // tensors

        // the memory is kept
        top.k = k;
        top.ctx.reset(ggml_init({ n_max*ggml_tensor_overhead() + ggml_graph_overhead_custom(n_max, false), nullptr, true }));

        ggml_context * ctx0 = top.ctx.get();

        top.gf     = ggml_new_graph_custom(ctx0, n_max, false);
        top.logits = ggml_new_tensor_2d(ctx0, GGML_TYPE_F32, n_vocab, n_rows);
        ggml_backend_tensor_alloc(logits->buffer, top.logits, logits->data);

        // of each row [n_vocab, n_rows] the elements with the indices [n, n_rows]
        const auto elements = [&](ggml_tensor * rows, ggml_tensor * indices) {
            ggml_tensor * out = ggml_get_rows(ctx0, ggml_reshape_3d(ctx0, rows, 1, n_vocab, n_rows), indices);
            return ggml_reshape_2d(ctx0, out, indices->ne[0], n_rows);
        };

        ggml_tensor * tokens  = ggml_top_k(ctx0, top.logits, k);
        ggml_tensor * largest = ggml_reshape_2d(ctx0, ggml_argmax(ctx0, top.logits), 1, n_rows);
        ggml_tensor * share   = elements(ggml_soft_max(ctx0, top.logits), largest);

        // as floats, which represent a token exactly, so that one transfer reads all
        top.found = ggml_concat(ctx0, ggml_cast(ctx0, tokens, GGML_TYPE_F32), elements(top.logits, tokens), 0);
        top.found = ggml_concat(ctx0, top.found, share, 0);
        ggml_set_output(top.found);
        ggml_build_forward_expand(top.gf, top.found);

        top.supported = true;
        for (int i = 0; i < ggml_graph_n_nodes(top.gf); ++i) {
            top.supported = top.supported && ggml_backend_supports_op(backend, ggml_graph_node(top.gf, i));
        }
        if (top.supported) {
            if (!top.galloc) {
                top.galloc.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)));
            }
            top.supported = ggml_gallocr_alloc_graph(top.galloc.get(), top.gf);
        }
    }
    if (!top.supported) {
        return false;
    }

    std::vector<float> read(ggml_nelements(top.found));
    const ggml_status status = ggml_backend_graph_compute_async(backend, top.gf);
    ggml_backend_tensor_get_async(backend, top.found, read.data(), 0, ggml_nbytes(top.found));
    ggml_backend_synchronize(backend);
    if (status != GGML_STATUS_SUCCESS) {
        return false;
    }

    on_device.top_data = std::move(read);
    return true;
}

bool llama_set_outputs_on_device(llama_context * ctx, bool value) {
    return ctx->set_outputs_on_device(value);
}

llama_token llama_get_largest_token_ith(llama_context * ctx, int32_t i) {
    ctx->synchronize();

    return ctx->get_largest_token_ith(i);
}

bool llama_get_largest_logits_ith(llama_context * ctx, int32_t i, int32_t k, llama_token * tokens, float * logits, float * share) {
    return ctx->get_largest_logits_ith(i, k, tokens, logits, share);
}

ggml_tensor * llama_get_embeddings_nextn_tensor(llama_context * ctx, ggml_backend_t * backend) {
    return ctx->get_embeddings_nextn_tensor(backend);
}

ggml_tensor * llama_model_get_vocab_matrix(const llama_model * model, bool output) {
    return output ? model->output : model->tok_embd;
}
