#include "head/imatrix.h"

#include "error.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>

namespace mtp {

// The name in the file: ggml's scheduler copies weights to other devices as "CUDA0#blk.0.attn_k.weight#0".
static std::string stored_name(const ggml_tensor * weights) {
    const std::string name = weights->name;
    const size_t first = name.find('#');
    return first == std::string::npos ? name : name.substr(first + 1, name.find('#', first + 1) - first - 1);
}

static bool multiplies(const ggml_tensor * node) {
    const bool product = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
    return product && node->src[1]->type == GGML_TYPE_F32;
}

bool Imatrix::multiplies_block(const ggml_tensor * node) {
    return multiplies(node) && stored_name(node->src[0]).rfind("blk.", 0) == 0;
}

bool Imatrix::wants(const ggml_tensor * node) const {
    return multiplies_block(node) || (with_output_ && multiplies(node) && stored_name(node->src[0]) == "output.weight");
}

static void add_squares(const float * from, int64_t n, float * to) {
    for (int64_t i = 0; i < n; ++i) {
        to[i] += from[i] * from[i];
    }
}

void Imatrix::add(const ggml_tensor * node) {
    const ggml_tensor * inputs = node->src[1];
    const bool on_host = ggml_backend_buffer_is_host(inputs->buffer);
    if (!on_host) {
        copy_.resize(ggml_nbytes(inputs));
        ggml_backend_tensor_get(inputs, copy_.data(), 0, copy_.size());
    }
    const char * data = on_host ? static_cast<const char *>(inputs->data) : copy_.data();
    const std::string name = stored_name(node->src[0]);
    const bool experts = node->op == GGML_OP_MUL_MAT_ID;
    const size_t matrices = size_t(node->src[0]->ne[2] * node->src[0]->ne[3]);
    Entry & entry = entries_[name];
    if (entry.sums.empty()) {
        entry.sums.assign(size_t(inputs->ne[0]) * matrices, 0.0f);
        entry.counts.assign(experts ? matrices : 1, 0);
    } else if (entry.sums.size() != size_t(inputs->ne[0]) * matrices || entry.counts.size() != (experts ? matrices : 1)) {
        throw Error(MTP_ERROR_STATE, name + ": expected inputs of one shape, found two");
    }
    (this->*(experts ? &Imatrix::add_experts : &Imatrix::add_rows))(node, data, entry);
    if (!std::all_of(entry.sums.begin(), entry.sums.end(), [](float sum) { return std::isfinite(sum); })) {
        throw Error(MTP_ERROR_BACKEND, name + ": expected finite inputs, found NaN or infinity; the model's file may be "
                                              "damaged");
    }
}

void Imatrix::add_experts(const ggml_tensor * node, const char * inputs, Entry & entry) {
    const ggml_tensor * x = node->src[1];   // [columns, 1 or chosen, tokens]
    const ggml_tensor * ids = node->src[2]; // [chosen, tokens], not contiguous
    std::vector<char> chosen(ggml_nbytes(ids));
    ggml_backend_tensor_get(ids, chosen.data(), 0, chosen.size());
    for (int64_t token = 0; token < ids->ne[1]; ++token) {
        for (int64_t i = 0; i < ids->ne[0]; ++i) {
            const int32_t expert =
                *reinterpret_cast<const int32_t *>(chosen.data() + size_t(token) * ids->nb[1] + size_t(i) * ids->nb[0]);
            if (expert < 0 || size_t(expert) >= entry.counts.size()) {
                throw Error(MTP_ERROR_BACKEND, format("%s: expected an expert below %zu, found %d", node->src[0]->name,
                                                      entry.counts.size(), expert));
            }
            const char * row = inputs + size_t(i % x->ne[1]) * x->nb[1] + size_t(token) * x->nb[2];
            add_squares(reinterpret_cast<const float *>(row), x->ne[0], entry.sums.data() + expert * x->ne[0]);
            ++entry.counts[size_t(expert)];
        }
    }
}

void Imatrix::add_rows(const ggml_tensor * node, const char * inputs, Entry & entry) {
    const ggml_tensor * weights = node->src[0];
    const ggml_tensor * x = node->src[1];
    for (int64_t i3 = 0; i3 < x->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < x->ne[2]; ++i2) {
            const int64_t matrix = (i3 % weights->ne[3]) * weights->ne[2] + i2 % weights->ne[2];
            for (int64_t i1 = 0; i1 < x->ne[1]; ++i1) {
                const char * row = inputs + size_t(i1) * x->nb[1] + size_t(i2) * x->nb[2] + size_t(i3) * x->nb[3];
                add_squares(reinterpret_cast<const float *>(row), x->ne[0], entry.sums.data() + matrix * x->ne[0]);
            }
        }
    }
    entry.counts[0] += ggml_nrows(x) / (weights->ne[2] * weights->ne[3]);
}

bool Imatrix::evaluate(ggml_tensor * node, bool ask) noexcept {
    if (!error_.empty()) {
        return !ask; // not interested in any more of them
    }
    bool wanted = false;
    const mtp_status status = guard([&] {
        wanted = wants(node);
        if (!ask) {
            add(node);
        }
    });
    if (status != MTP_OK) {
        error_ = mtp_last_error();
    }
    return !ask || wanted;
}

void Imatrix::check() const {
    if (!error_.empty()) {
        throw Error(MTP_ERROR_BACKEND, error_);
    }
}

} // namespace mtp
