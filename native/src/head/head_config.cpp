#include "head/head_config.h"

#include "error.h"

#include <cmath>

namespace mtp {

// Far above any real model; they keep every product of two far below 2^63.
static const int64_t MOST_WIDTH = 1 << 20;
static const int64_t MOST_COUNT = 1 << 14;

std::string HeadConfig::name(const std::string & suffix) const {
    return "blk." + std::to_string(block) + "." + suffix;
}

// Which models' attention and experts an architecture has.
enum class Family { QWEN, GLM, STEP };

// An architecture whose blocks the draft graph computes.
struct Kind {
    const char * arch;
    Family family;
    bool moe;   // of Step, a block has experts if it has their router
    bool mrope; // rotates by sections; the others as NeoX
};

static const Kind KINDS[] = {
    {"qwen35", Family::QWEN, false, true},
    {"qwen35moe", Family::QWEN, true, true},
    {"qwen3next", Family::QWEN, true, false},
    {"glm4moe", Family::GLM, true, false},
    {"step35", Family::STEP, false, false},
};

static const Kind & find_kind(const GgufFile & file) {
    const std::string arch = file.text("general.architecture");
    std::string known;
    for (const Kind & kind : KINDS) {
        if (arch == kind.arch) {
            return kind;
        }
        known += (known.empty() ? "" : ", ") + std::string(kind.arch);
    }
    throw Error(MTP_ERROR_UNSUPPORTED, format("%s: general.architecture: expected one of %s, found %s",
                                              file.path().c_str(), known.c_str(), arch.c_str()));
}

static void read_sections(const GgufFile & file, const std::string & key, HeadConfig & c) {
    const std::vector<int32_t> found = file.integers(key, 4, 0, c.n_rot);
    if (found.size() < 3) {
        file.refuse(format("%s: expected 3 or 4 values, found %zu", key.c_str(), found.size()));
    }
    int sum = 0;
    for (size_t i = 0; i < found.size(); ++i) {
        c.rope_sections[i] = found[i];
        sum += found[i];
    }
    if (sum == 0) {
        file.refuse(key + ": expected a sum above 0, found 0");
    }
    // Sections alternate. A pair outside of the first three has the fourth position, which is 0 for text; the
    // others have the same position, so that without such a pair the rotation is that of NeoX, to the bit.
    bool outside = false;
    for (int pair = 0; pair < c.n_rot / 2; ++pair) {
        const int sector = pair % sum;
        outside = outside || sector >= 3 * c.rope_sections[sector % 3];
    }
    c.mrope = outside;
}

// How many dimensions of a head are rotated.
static int read_n_rot(const GgufFile & file, const std::string & key, int64_t head_dim, int otherwise) {
    const int n_rot = int(file.integer_or(key, 2, head_dim, otherwise));
    if (n_rot % 2 != 0) {
        file.refuse(format("%s: expected an even number, found %d", key.c_str(), n_rot));
    }
    return n_rot;
}

static float read_freq_base(const GgufFile & file, const std::string & key) {
    const float base = file.number_or(key, 10000.0f);
    if (base <= 0) {
        file.refuse(format("%s: expected more than 0, found %g", key.c_str(), double(base)));
    }
    return base;
}

// Experts chosen by the sigmoid of the router and a bias.
static void read_sigmoid_experts(const GgufFile & file, const std::string & prefix, HeadConfig & c) {
    const int64_t sigmoid = 2; // llama_expert_gating_func_type
    const int64_t gating = file.integer_or(prefix + "expert_gating_func", 0, 16, 0);
    if ((gating != 0 && gating != sigmoid) || file.integer_or(prefix + "expert_group_count", 0, MOST_COUNT, 0) > 1) {
        throw Error(MTP_ERROR_UNSUPPORTED, file.path() + ": expected experts of one group chosen by a sigmoid, found others");
    }
    c.sigmoid_router = true;
    c.normed_shares = file.flag_or(prefix + "expert_weights_norm", false);
}

static void read_glm(const GgufFile & file, const std::string & prefix, HeadConfig & c) {
    for (const int32_t section : file.has_key(prefix + "rope.dimension_sections")
                                     ? file.integers(prefix + "rope.dimension_sections", 4, 0, MOST_COUNT)
                                     : std::vector<int32_t>()) {
        if (section != 0) {
            throw Error(MTP_ERROR_UNSUPPORTED, file.path() + ": " + prefix +
                                                   "rope.dimension_sections: expected none, as llama.cpp's draft graph, found some");
        }
    }
    read_sigmoid_experts(file, prefix, c);
    c.n_ff_shared = c.n_ff_expert * file.integer_or(prefix + "expert_shared_count", 0, 64, 0);
}

// After read_rope(). Blocks with a window have their own rotation, others rotate half as many dimensions.
static void read_step(const GgufFile & file, const std::string & prefix, HeadConfig & c) {
    if (c.ext_factor != 0) {
        throw Error(MTP_ERROR_UNSUPPORTED, file.path() + ": " + prefix + "rope.scaling.type: expected none or linear, found yarn");
    }
    if (c.moe) {
        read_sigmoid_experts(file, prefix, c);
    }
    c.expert_limit = file.number_or(prefix + "swiglu_clamp_exp", 0.0f, c.block);
    c.ffn_limit = file.number_or(prefix + "swiglu_clamp_shexp", 0.0f, c.block);
    if (file.flag_of(prefix + "attention.sliding_window_pattern", c.block)) {
        c.window = file.integer(prefix + "attention.sliding_window", 1, 1 << 30);
        c.n_rot = read_n_rot(file, prefix + "rope.dimension_count_swa", c.head_dim, c.n_rot);
        c.freq_base = read_freq_base(file, prefix + "rope.freq_base_swa");
        c.freq_scale = 1.0f;
        return;
    }
    c.rope_factors = true;
    c.n_rot /= 2;
    if (c.n_rot % 2 != 0) {
        file.refuse(format("%srope.dimension_count: expected a multiple of 4, found %d", prefix.c_str(), 2 * c.n_rot));
    }
}

static void read_rope(const GgufFile & file, const std::string & arch, HeadConfig & c) {
    c.n_rot = read_n_rot(file, arch + ".rope.dimension_count", c.head_dim, int(c.head_dim));
    if (c.mrope) {
        read_sections(file, arch + ".rope.dimension_sections", c);
    }
    c.freq_base = read_freq_base(file, arch + ".rope.freq_base");

    // Derived as in llama_context: with YaRN its magnitude factor cancels the one that ggml's rope
    // applies, and only the file's additional factor remains.
    const std::string scaling = arch + ".rope.scaling.";
    const std::string kind = file.has_key(scaling + "type") ? file.text(scaling + "type") : "linear";
    if (kind != "none" && kind != "linear" && kind != "yarn") {
        throw Error(MTP_ERROR_UNSUPPORTED, format("%s: %stype: expected none, linear or yarn, found %s",
                                                  file.path().c_str(), scaling.c_str(), kind.c_str()));
    }
    const float factor = file.number_or(scaling + "factor", 0.0f);
    c.freq_scale = factor == 0.0f || kind == "none" ? 1.0f : 1.0f / factor;
    c.ext_factor = kind == "yarn" ? 1.0f : 0.0f;
    c.attn_factor = file.number_or(scaling + "attn_factor", 1.0f);
    c.beta_fast = file.number_or(scaling + "yarn_beta_fast", 32.0f);
    c.beta_slow = file.number_or(scaling + "yarn_beta_slow", 1.0f);
    const int64_t trained = file.integer_or(arch + ".context_length", 1, 1 << 30, 1 << 18);
    c.n_ctx_orig = int(file.integer_or(scaling + "original_context_length", 1, 1 << 30, trained));
}

static HeadConfig read_block(const GgufFile & file, const Kind & kind, int block) {
    HeadConfig c = {};
    c.arch = kind.arch;
    c.block = block;
    c.mrope = kind.mrope;
    c.gated = kind.family == Family::QWEN;
    c.head_gated = kind.family == Family::STEP;
    c.passes_norm = kind.family != Family::STEP;
    c.ffn_norm = kind.family == Family::STEP ? "ffn_norm.weight" : "post_attention_norm.weight";
    c.moe = kind.family == Family::STEP ? file.find(c.name("ffn_gate_inp.weight")) != nullptr : kind.moe;
    const std::string prefix = c.arch + ".";
    if (!file.find(c.name("nextn.eh_proj.weight"))) {
        throw Error(MTP_ERROR_NO_HEAD,
                    file.path() + ": the metadata promise an MTP head, but " +
                        c.name("nextn.eh_proj.weight") + " is missing; graft a head with mtp-gguf graft");
    }
    c.n_embd = file.integer(prefix + "embedding_length", 1, MOST_WIDTH);
    c.n_head = file.integer(prefix + "attention.head_count", 1, MOST_COUNT, c.block);
    c.n_head_kv = file.integer(prefix + "attention.head_count_kv", 1, c.n_head, c.block);
    if (c.n_head % c.n_head_kv != 0) {
        file.refuse(format("%sattention.head_count: expected a multiple of %lld KV heads, found %lld",
                           prefix.c_str(), (long long) c.n_head_kv, (long long) c.n_head));
    }
    c.head_dim = file.integer_or(prefix + "attention.key_length", 1, MOST_COUNT, c.n_embd / c.n_head);
    const int64_t value_dim = file.integer_or(prefix + "attention.value_length", 1, MOST_COUNT, c.head_dim);
    if (c.head_dim < 1 || value_dim != c.head_dim) {
        file.refuse(format("%sattention.value_length: expected the key length %lld, found %lld",
                           prefix.c_str(), (long long) c.head_dim, (long long) value_dim));
    }
    c.norm_eps = file.number(prefix + "attention.layer_norm_rms_epsilon");
    if (c.norm_eps < 0) {
        file.refuse(format("%sattention.layer_norm_rms_epsilon: expected 0 or more, found %g",
                           prefix.c_str(), double(c.norm_eps)));
    }
    if (c.moe) {
        c.n_expert = file.integer(prefix + "expert_count", 1, MOST_COUNT);
        c.n_expert_used = file.integer(prefix + "expert_used_count", 1, c.n_expert, c.block);
        c.n_ff_expert = file.integer(prefix + "expert_feed_forward_length", 1, MOST_WIDTH, c.block);
        c.n_ff_shared = file.integer_or(prefix + "expert_shared_feed_forward_length", 0, MOST_WIDTH, 0);
        c.normed_shares = true;
        const float scale = file.number_or(prefix + "expert_weights_scale", 0.0f);
        c.expert_scale = scale == 0.0f ? 1.0f : scale;
    } else {
        c.n_ff = file.integer(prefix + "feed_forward_length", 1, MOST_WIDTH, c.block);
    }
    read_rope(file, c.arch, c);
    if (kind.family == Family::GLM) {
        read_glm(file, prefix, c);
    } else if (kind.family == Family::STEP) {
        read_step(file, prefix, c);
    }
    return c;
}

std::vector<HeadConfig> HeadConfig::read(const GgufFile & file) {
    const Kind & kind = find_kind(file);
    const std::string prefix = std::string(kind.arch) + ".";
    const int64_t n_mtp = file.integer_or(prefix + "nextn_predict_layers", 0, MOST_COUNT, 0);
    if (n_mtp == 0) {
        throw Error(MTP_ERROR_NO_HEAD,
                    file.path() + ": the model has no MTP head (" + prefix +
                        "nextn_predict_layers is 0 or absent); convert it with its head, or graft one "
                        "with mtp-gguf graft");
    }
    const int64_t most = kind.family == Family::STEP ? MTP_MAX_DEPTH : 1;
    if (n_mtp > most) {
        throw Error(MTP_ERROR_UNSUPPORTED,
                    format("%s: %snextn_predict_layers: expected %s, found %lld", file.path().c_str(), prefix.c_str(),
                           most == 1 ? "1" : format("1 to %lld", (long long) most).c_str(), (long long) n_mtp));
    }
    const int64_t blocks = file.integer(prefix + "block_count", n_mtp, MOST_COUNT);
    std::vector<HeadConfig> out;
    for (int64_t block = blocks - n_mtp; block < blocks; ++block) {
        out.push_back(read_block(file, kind, int(block)));
    }
    return out;
}

} // namespace mtp
