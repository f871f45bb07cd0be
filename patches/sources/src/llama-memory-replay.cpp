#include "llama-memory-replay.h"

#include "ggml-backend.h"
#include "llama-ext.h"
#include "llama-impl.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

//
// llama_memory_replay
//

// the op for one sequence; without new tokens it replays the log
static ggml_tensor * build_replay(
        ggml_context * ctx, int64_t S_v, int64_t H_k, int64_t H_v, ggml_tensor * mem, int64_t n_log, int64_t n_tokens) {
    ggml_tensor * qk  = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, S_v, H_k, n_tokens, 1);
    ggml_tensor * v   = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, S_v, H_v, n_tokens, 1);
    ggml_tensor * gb  = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 1,   H_v, n_tokens, 1);
    ggml_tensor * ids = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 1);
    ggml_tensor * n   = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 1);

    return ggml_gated_delta_net_replay(ctx, qk, qk, v, gb, gb, mem, ids, n, n_log);
}

static ggml_context_ptr init_replay_ctx() {
    ggml_init_params params = {
        /*.mem_size   =*/ 16*ggml_tensor_overhead() + ggml_graph_overhead(),
        /*.mem_buffer =*/ NULL,
        /*.no_alloc   =*/ true,
    };

    ggml_context_ptr ctx(ggml_init(params));
    if (!ctx) {
        throw std::runtime_error("failed to create ggml context for the replay of recurrent states");
    }

    return ctx;
}

static bool dev_can_replay(ggml_backend_dev_t dev, int64_t S_v, int64_t H_k, int64_t H_v, int64_t n_log) {
    ggml_context_ptr ctx = init_replay_ctx();

    ggml_tensor * mem = ggml_new_tensor_2d(
            ctx.get(), GGML_TYPE_F32, S_v*S_v*H_v + n_log*ggml_gated_delta_net_log_size(S_v, H_k, H_v), 1);

    // a device that stands for several would have to know how the op is divided among them
    return ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_META &&
        ggml_backend_dev_supports_op(dev, build_replay(ctx.get(), S_v, H_k, H_v, mem, n_log, 1));
}

bool llama_dev_can_replay(ggml_backend_dev_t dev) {
    try {
        return dev_can_replay(dev, 128, 1, 1, 1);
    } catch (const std::exception &) {
        return false;
    }
}

bool llama_memory_replay::add_layer(
        const llama_model & model, int32_t il, ggml_type type_r, ggml_type type_s, bool offload, uint32_t n_rs_seq) {
    const auto & hparams = model.hparams;

    n_layer++;
    layers.resize(hparams.n_layer());

    // LLAMA_RS_REPLAY=0: snapshots in all layers; LLAMA_RS_REPLAY=cpu: in those of other devices
    const char * env = getenv("LLAMA_RS_REPLAY");
    if ((env && strcmp(env, "0") == 0) || (model.arch != LLM_ARCH_QWEN35 && model.arch != LLM_ARCH_QWEN35MOE)) {
        return false;
    }
    if (type_r != GGML_TYPE_F32 || type_s != GGML_TYPE_F32) {
        return false;
    }

    // shapes that the op or the log of the convolution does not support
    if (hparams.ssm_d_conv < 2 || hparams.ssm_n_group == 0 || hparams.ssm_dt_rank % hparams.ssm_n_group != 0 ||
            hparams.ssm_d_inner != hparams.ssm_d_state*hparams.ssm_dt_rank) {
        return false;
    }

    n_log    = n_rs_seq;
    n_conv   = hparams.ssm_d_conv - 1;
    n_embd_r = hparams.n_embd_r();
    n_embd_s = hparams.n_embd_s();
    S_v      = hparams.ssm_d_state;
    H_k      = hparams.ssm_n_group;
    H_v      = hparams.ssm_dt_rank;

    // other devices gain nothing without a log, and the graph with a memory on the host is not theirs. CPUs replay without
    // one, too: states are read where they are instead of being gathered.
    const bool only_cpu = (env && strcmp(env, "cpu") == 0) || n_rs_seq == 0 || !offload;

    ggml_backend_dev_t dev = model.dev_layer(il);

    layers[il] = (!only_cpu || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) &&
        dev_can_replay(dev, S_v, H_k, H_v, n_log);
    n_replay += layers[il];

    return layers[il];
}

void llama_memory_replay::log_layers() const {
    if (has_replay() && n_log > 0) {
        LLAMA_LOG_INFO("%s: rs_seq by replay in %d of %d layers\n", __func__, n_replay, n_layer);
    }
}

bool llama_memory_replay::replays(int32_t il) const {
    return (size_t) il < layers.size() && layers[il];
}

int64_t llama_memory_replay::n_embd_log_r(int32_t il) const {
    return replays(il) ? n_log*(n_embd_r/n_conv) : 0;
}

int64_t llama_memory_replay::n_embd_log_s(int32_t il) const {
    return replays(il) ? n_log*ggml_gated_delta_net_log_size(S_v, H_k, H_v) : 0;
}

bool llama_memory_replay::roll_back(llama_replay_src & src, llama_pos n) {
    if (n > (llama_pos) src.n_log || src.no_snapshots) {
        return false;
    }
    src.n_log -= n;
    return true;
}

// a row of r_l holds the inputs of tokens, one after the other; without replay, the tokens of one channel after the other
static std::vector<float> transposed(const std::vector<float> & data, int64_t n_rows) {
    const int64_t n_cols = data.size()/n_rows;

    std::vector<float> res(data.size());
    for (int64_t i = 0; i < n_rows; ++i) {
        for (int64_t j = 0; j < n_cols; ++j) {
            res[j*n_rows + i] = data[i*n_cols + j];
        }
    }

    return res;
}

std::vector<float> llama_memory_replay::replay_r(const ggml_tensor * r, uint32_t row, uint32_t n_log) const {
    std::vector<float> tokens(n_embd_r);
    ggml_backend_tensor_get(r, tokens.data(), row*r->nb[1] + n_log*(n_embd_r/n_conv)*sizeof(float), n_embd_r*sizeof(float));

    return transposed(tokens, n_conv);
}

void llama_memory_replay::set_r(ggml_tensor * r, uint32_t row, const std::vector<float> & data) const {
    const std::vector<float> tokens = transposed(data, n_embd_r/n_conv);

    ggml_backend_tensor_set(r, tokens.data(), row*r->nb[1], n_embd_r*sizeof(float));
}

std::vector<float> llama_memory_replay::replay_s(ggml_tensor * s, uint32_t row, uint32_t n_log) const {
    ggml_context_ptr ctx = init_replay_ctx();

    // on the CPU, from a copy of the row if it is on another device
    const bool host = ggml_backend_buffer_is_host(s->buffer);

    ggml_tensor * mem = host ? s : ggml_new_tensor_2d(ctx.get(), s->type, s->ne[0], 1);
    ggml_tensor * op  = build_replay(ctx.get(), S_v, H_k, H_v, mem, this->n_log, 0);

    ggml_cgraph * gf = ggml_new_graph_custom(ctx.get(), 16, false);
    ggml_build_forward_expand(gf, op);

    ggml_backend_ptr        backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ggml_backend_buffer_ptr buf(backend ? ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()) : nullptr);
    if (!buf) {
        throw std::runtime_error("failed to allocate the replay of a recurrent state");
    }

    if (!host) {
        ggml_backend_tensor_get(s, mem->data, row*s->nb[1], s->nb[1]);
    }

    const int32_t id       = host ? row : 0;
    const int32_t n_replay = n_log;
    ggml_backend_tensor_set(op->src[6], &id,       0, sizeof(id));
    ggml_backend_tensor_set(op->src[7], &n_replay, 0, sizeof(n_replay));

    if (ggml_backend_graph_compute(backend.get(), gf) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("failed to compute the replay of a recurrent state");
    }

    std::vector<float> res(n_embd_s);
    ggml_backend_tensor_get(op, res.data(), 0, res.size()*sizeof(float));

    return res;
}

//
// llama_io_write_replay, llama_io_read_replay
//

// rows [first, first + n) of a tensor that a layer with replay has in the memory
struct replay_rows {
    bool   is_r  = false;
    bool   is_s  = false;
    size_t first = 0;
    size_t n     = 0;
    size_t size  = 0; // bytes of a row without its log

    // offset, size: in bytes, in a tensor whose rows have no log
    replay_rows(const llama_memory_recurrent & mem, const ggml_tensor * tensor, size_t offset, size_t n_bytes) {
        for (size_t il = 0; il < mem.r_l.size(); ++il) {
            if (mem.replay.replays(il)) {
                is_r |= tensor == mem.r_l[il];
                is_s |= tensor == mem.s_l[il];
            }
        }
        if (is_r || is_s) {
            size  = (is_r ? mem.replay.n_embd_r : mem.replay.n_embd_s)*sizeof(float);
            first = offset/size % mem.size; // a log is for all snapshots
            n     = n_bytes/size;
        }
    }
};

llama_io_write_replay::llama_io_write_replay(
        const llama_memory_recurrent & mem, llama_io_write_i & io,
        const std::vector<std::pair<uint32_t, uint32_t>> & rows, llama_state_seq_flags flags) :
        mem(mem), io(io), raw(flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) {
    if (!raw || !mem.replay.has_replay()) {
        return;
    }
    for (const auto & range : rows) {
        for (uint32_t i = range.first; i < range.second; ++i) {
            io.write(&mem.cells[i % mem.size].src.n_log, sizeof(uint32_t));
        }
    }
}

void llama_io_write_replay::write(const void * src, size_t size) {
    io.write(src, size);
}

void llama_io_write_replay::write_tensor(ggml_tensor * tensor, size_t offset, size_t size) {
    const replay_rows rows(mem, tensor, offset, size);

    if (!rows.is_r && !rows.is_s) {
        io.write_tensor(tensor, offset, size);
        return;
    }
    if (raw) {
        io.write_tensor(tensor, rows.first*tensor->nb[1], rows.n*tensor->nb[1]);
        return;
    }
    if (io.only_counts()) {
        io.write(nullptr, size);
        return;
    }
    for (size_t i = rows.first; i < rows.first + rows.n; ++i) {
        const uint32_t n_log = mem.cells[i].src.n_log;

        if (rows.is_s && n_log == 0) {
            io.write_tensor(tensor, i*tensor->nb[1], rows.size);
            continue;
        }
        io.write((rows.is_r ? mem.replay.replay_r(tensor, i, n_log) : mem.replay.replay_s(tensor, i, n_log)).data(), rows.size);
    }
}

size_t llama_io_write_replay::n_bytes() {
    return io.n_bytes();
}

llama_io_read_replay::llama_io_read_replay(llama_memory_recurrent & mem, llama_io_read_i & io, llama_state_seq_flags flags) :
        mem(mem), io(io), raw(flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) {
}

bool llama_io_read_replay::read_logs(uint32_t cell_count) {
    if (!raw || !mem.replay.has_replay()) {
        return true;
    }
    for (uint32_t i = 0; i < cell_count; ++i) {
        uint32_t n_log;
        io.read(&n_log, sizeof(n_log));

        if (n_log > mem.replay.n_log) {
            LLAMA_LOG_ERROR("%s: invalid log of %u tokens in cell %u, expected at most %u\n", __func__, n_log, i, mem.replay.n_log);
            return false;
        }

        auto & src = mem.cells[mem.head + i].src;
        src.n_log        = n_log;
        src.no_snapshots = mem.replay.has_snapshots();
    }
    return true;
}

void llama_io_read_replay::read(void * dst, size_t size) {
    io.read(dst, size);
}

void llama_io_read_replay::read_tensor(ggml_tensor * tensor, size_t offset, size_t size) {
    const replay_rows rows(mem, tensor, offset, size);

    if (!rows.is_r && !rows.is_s) {
        io.read_tensor(tensor, offset, size);
        return;
    }
    if (raw) {
        io.read_tensor(tensor, rows.first*tensor->nb[1], rows.n*tensor->nb[1]);
        return;
    }

    std::vector<float> data(mem.replay.n_embd_r);
    for (size_t i = rows.first; i < rows.first + rows.n; ++i) {
        if (rows.is_r) {
            io.read(data.data(), rows.size);
            mem.replay.set_r(tensor, i, data);
        } else {
            io.read_tensor(tensor, i*tensor->nb[1], rows.size);
        }
    }
}

void llama_io_read_replay::discard() {
    io.discard();
}

size_t llama_io_read_replay::n_bytes() {
    return io.n_bytes();
}
