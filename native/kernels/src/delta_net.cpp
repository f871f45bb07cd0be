// GATED_DELTA_NET and GATED_DELTA_NET_REPLAY: the recurrence of Qwen3.5's and Qwen3-Next's linear attention.

#include "delta_net.h"

#include "operation.h"
#include "states.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace mtp {

namespace {

struct sources {
    const ggml_tensor *q, *k, *v, *g, *beta, *state;
    explicit sources(const ggml_tensor * op) :
        q(op->src[0]), k(op->src[1]), v(op->src[2]), g(op->src[3]), beta(op->src[4]), state(op->src[5]) {}

    int64_t S() const { return v->ne[0]; }
    int64_t heads() const { return v->ne[1]; }
    int64_t tokens() const { return v->ne[2]; }
    int64_t sequences() const { return v->ne[3]; }
    bool kda() const { return g->ne[0] == S(); }

    // floats of the output
    int64_t attention() const { return S() * heads() * tokens() * sequences(); }
};

bool inputs_fit(const kernel_set & kernels, const ggml_tensor * op, int n_sources) {
    if (!kernels.delta_net) {
        return false;
    }
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (i < n_sources ? !op->src[i] || (i < 6 && !is_float(op->src[i])) : op->src[i] != nullptr) {
            return false;
        }
    }
    for (int i = 1; i < 16; i++) {  // after the number of states, or of tokens in a log
        if (op->op_params[i] != 0) {
            return false;
        }
    }
    const sources of(op);
    const int64_t S = of.S(), T = of.tokens();
    const auto is_input = [&](const ggml_tensor * t) {
        return t->ne[0] == S && t->ne[1] >= 1 && of.heads() % t->ne[1] == 0 && t->ne[2] == T && t->ne[3] >= 1 &&
               of.sequences() % t->ne[3] == 0;
    };
    return T >= 1 && kernels.delta_net_fits(S) && is_input(of.q) && is_input(of.k) && (of.kda() || of.g->ne[0] == 1) &&
           of.beta->ne[0] == 1 && is_contiguous(of.g, sizeof(float)) && is_contiguous(of.beta, sizeof(float)) &&
           of.g->ne[1] == of.heads() && of.g->ne[2] == T && of.beta->ne[1] == of.heads() && of.beta->ne[2] == T &&
           is_contiguous(op, sizeof(float));
}

// Head h of sequence s, without its states.
delta_net_head head_of(const sources & of, const ggml_tensor * op, int64_t h, int64_t s) {
    const auto at = [&](const ggml_tensor * t) {
        const int64_t sequence = s / (of.sequences() / t->ne[3]);
        return (const char *) t->data + sequence * t->nb[3] + h % t->ne[1] * t->nb[1];
    };
    delta_net_head head = {};
    head.S = of.S();
    head.n_tokens = of.tokens();
    head.kda = of.kda();
    head.q = at(of.q), head.k = at(of.k), head.v = at(of.v), head.g = at(of.g), head.beta = at(of.beta);
    head.nbq = of.q->nb[2], head.nbk = of.k->nb[2], head.nbv = of.v->nb[2], head.nbg = of.g->nb[2], head.nbb = of.beta->nb[2];
    head.attn = (float *) op->data + (s * of.tokens() * of.heads() + h) * of.S();
    head.attn_stride = of.S() * of.heads();
    head.scale = 1.0f / sqrtf((float) of.S());
    return head;
}

// Computes all heads, which the threads share: compute_head(head, sequence, work memory).
template <class F> void each_head(const task & task, const sources & of, F compute_head) {
    const int64_t n = of.heads() * of.sequences();
    float * work = (float *) scratch(delta_net_work(of.S(), of.kda()) * sizeof(float));
    if (task.ith() == 0) {
        task.threads->reset(0);
    }
    task.wait();

    // pieces of some heads, four for each thread
    const int64_t piece = std::max<int64_t>(1, n / (4 * task.nth()));
    for (int64_t first = task.threads->take(0) * piece; first < n; first = task.threads->take(0) * piece) {
        for (int64_t i = first; i < std::min(n, first + piece); i++) {
            compute_head(i % of.heads(), i / of.heads(), work);
        }
    }
}

// More tokens than a kernel takes at a time, if there are as many, two sequences, and two heads of keys: ggml takes
// milliseconds for the states of all heads. Returns how many heads of the model there are for one of the small case.
int64_t shrink_inputs(const ggml_tensor * op, small_case & small) {
    const sources of(op);
    const int64_t T = std::min<int64_t>(of.tokens(), delta_net_tokens + 3), sequences = std::min<int64_t>(of.sequences(), 2);
    const int64_t least = std::min(of.q->ne[1], of.k->ne[1]), half = least % 2 == 0 ? least / 2 : least;
    const int64_t times = of.q->ne[1] % half == 0 && of.k->ne[1] % half == 0 ? half : 1;
    for (int i = 0; i < 5; i++) {
        small.src[i].ne[1] /= times;
        small.src[i].ne[2] = T;
        small.src[i].ne[3] = small.src[i].ne[3] == of.sequences() ? sequences : 1;
    }
    small.src[3].low = -1.0f;  // logarithms of decays
    small.src[3].high = 0.0f;
    small.result.ne[0] = of.S() * (of.heads() / times) * T * sequences;
    std::fill(small.result.ne + 1, small.result.ne + 4, 1);
    return times;
}

// GATED_DELTA_NET. The result: a row for each token and head, then K states of each head and sequence, the latest first.

bool fits(const kernel_set & kernels, const ggml_tensor * op) {
    if (!inputs_fit(kernels, op, 6)) {
        return false;
    }
    const sources of(op);
    const int64_t K = op->op_params[0], size = of.S() * of.S() * of.heads() * of.sequences();
    return K >= 1 && is_contiguous(of.state, sizeof(float)) && rows_of(of.state) * of.state->ne[0] == size &&
           of.state->ne[3] == of.sequences() && rows_of(op) * op->ne[0] == of.attention() + size * K;
}

bool compute(const kernel_set & kernels, const task & task, ggml_tensor * op) {
    const sources of(op);
    const int64_t size = of.S() * of.S(), n = of.heads() * of.sequences();
    float * states = (float *) op->data + of.attention();
    float * const * const rows = rows_noted(of.state->data);
    const bool in_place = rows && op->op_params[0] == 1 && replace_rows(task, op, rows, states);
    each_head(task, of, [&](int64_t h, int64_t s, float * work) {
        const int64_t i = s * of.heads() + h;
        delta_net_head head = head_of(of, op, h, s);
        head.state = rows ? rows[s] + h * size : (const float *) of.state->data + i * size;
        head.states = in_place ? rows[s] + h * size : states + i * size;
        head.states_stride = size * n;
        head.n_states = op->op_params[0];
        head.last = of.tokens() - 1;
        kernels.delta_net(head, work);
    });
    return true;
}

void shrink(const ggml_tensor * op, small_case & small) {
    const int64_t times = shrink_inputs(op, small);
    const int64_t S = small.src[2].ne[0], heads = small.src[2].ne[1], sequences = small.src[2].ne[3];
    int64_t * const state = small.src[5].ne;
    state[state[2] % times == 0 ? 2 : state[1] % times == 0 ? 1 : 0] /= times;
    state[3] = sequences;
    small.result.ne[0] += S * S * heads * sequences * op->op_params[0];
}

// GATED_DELTA_NET_REPLAY, an operation of the patched ggml: the states are rows of a memory. A row holds the states of all
// heads, then a log of the tokens after them: their keys, deltas and decays. The first n_replay tokens of the log are
// taken up first. Of the new tokens, those that can be rolled back go to the log. The result: the output, then the new rows.

struct replay {
    const ggml_tensor *memory, *ids, *n_replay;
    int64_t n_log, states, log_size, row, n_logged;

    explicit replay(const ggml_tensor * op) : memory(op->src[5]), ids(op->src[6]), n_replay(op->src[7]), n_log(op->op_params[0]) {
        const sources of(op);
        states = of.S() * of.S() * of.heads();
        log_size = of.S() * (of.k->ne[1] + of.heads()) + of.heads();
        row = states + n_log * log_size;
        n_logged = std::min(of.tokens() - 1, n_log);
    }
    float * old_row(int64_t s) const { return (float *) ((char *) memory->data + ((const int32_t *) ids->data)[s] * memory->nb[1]); }
    float * new_row(const ggml_tensor * op, int64_t s) const { return (float *) op->data + sources(op).attention() + s * row; }
};

bool replay_fits(const kernel_set & kernels, const ggml_tensor * op) {
    if (!inputs_fit(kernels, op, 8) || op->op_params[0] < 0) {
        return false;
    }
    const sources of(op);
    const replay log(op);
    const auto counts = [&](const ggml_tensor * t) {
        return t->type == GGML_TYPE_I32 && is_contiguous(t, sizeof(int32_t)) && rows_of(t) * t->ne[0] == of.sequences();
    };
    return !of.kda() && counts(log.ids) && counts(log.n_replay) && log.memory->ne[0] == log.row &&
           log.memory->ne[2] == 1 && log.memory->ne[3] == 1 && rows_of(op) * op->ne[0] == of.attention() + log.row * of.sequences();
}

// in_place: the new states replace the old ones, and the new rows have the new log only.
bool compute_replay(const kernel_set & kernels, const task & task, const ggml_tensor * op, bool in_place) {
    const sources of(op);
    const replay log(op);
    const int64_t S = of.S(), H = of.heads(), H_k = of.k->ne[1], T = of.tokens();
    for (int64_t s = 0; s < of.sequences(); s++) {
        const int32_t id = ((const int32_t *) log.ids->data)[s], n = ((const int32_t *) log.n_replay->data)[s];
        if (id < 0 || id >= log.memory->ne[1] || n < 0 || n > log.n_log) {
            return false;  // an error that ggml reports
        }
    }
    each_head(task, of, [&](int64_t h, int64_t s, float * work) {
        float * from = log.old_row(s);
        float * to = log.new_row(op, s);
        const float * old_log = from + log.states;
        float * new_log = to + log.states;
        const int64_t key = h % H_k, deltas = (H_k + h) * S, decay = (H_k + H) * S + h;

        delta_net_head head = head_of(of, op, h, s);
        head.state = from + h * S * S;
        head.n_replay = ((const int32_t *) log.n_replay->data)[s];
        head.log_k = old_log + key * S;
        head.log_delta = old_log + deltas;
        head.log_decay = old_log + decay;
        head.log_stride = log.log_size;
        head.states = (in_place ? from : to) + h * S * S;
        head.n_states = 1;
        head.last = T - log.n_logged - 1;
        head.deltas = new_log + deltas;
        head.deltas_stride = log.log_size;
        kernels.delta_net(head, work);

        for (int64_t t = T - log.n_logged; t < T; t++) {
            float * token = new_log + (t - T + log.n_logged) * log.log_size;
            if (key == h) {  // of the heads that share it, the first one writes it
                memcpy(token + key * S, head.k + t * head.nbk, S * sizeof(float));
            }
            head.decay(t, token + decay);
        }
    });
    return true;
}

bool replay_rows(const kernel_set & kernels, const task & task, ggml_tensor * op) {
    return compute_replay(kernels, task, op, false);
}

void shrink_replay(const ggml_tensor * op, small_case & small) {
    const replay log(op);
    const int64_t row = log.row / shrink_inputs(op, small), sequences = small.src[2].ne[3];
    small.src[5].ne[0] = row;
    small.src[5].ne[1] = small.src[6].below = std::min<int64_t>(log.memory->ne[1], 3);
    small.src[7].below = log.n_log + 1;
    for (int i = 6; i < 8; i++) {
        small.src[i].ne[0] = sequences;
        std::fill(small.src[i].ne + 1, small.src[i].ne + 4, 1);
    }
    small.result.ne[0] += row * sequences;
}

}  // namespace

bool replay_in_place(const kernel_set & kernels, const task & task, const ggml_tensor * op, const ggml_tensor * copy) {
    if (!replay_fits(kernels, op)) {
        return false;
    }
    const sources of(op);
    const replay log(op);
    const ggml_tensor * rows = copy->src[0];
    const int64_t written = log.states + log.n_logged * log.log_size;
    if (rows->data != log.new_row(op, 0) || rows->nb[1] != log.row * sizeof(float) || rows->ne[0] != written ||
        rows->ne[1] != of.sequences() || rows_of(rows) != of.sequences() || !is_float(rows) || !is_float(copy) ||
        !same_shape(copy, rows)) {
        return false;
    }
    for (int64_t s = 0; s < of.sequences(); s++) {
        if ((const char *) copy->data + s * copy->nb[1] != (const char *) log.old_row(s)) {
            return false;
        }
    }
    if (!compute_replay(kernels, task, op, true)) {
        return false;
    }
    if (log.n_logged > 0) {
        task.wait();  // heads share keys of the old log, so the new one replaces it when all have been computed
        const int64_t size = written - log.states, first = task.first(size);
        for (int64_t s = 0; s < of.sequences(); s++) {
            memcpy(log.old_row(s) + log.states + first, log.new_row(op, s) + log.states + first,
                   (task.last(size) - first) * sizeof(float));
        }
    }
    return true;
}

const operation delta_net_operation = { "GATED_DELTA_NET", fits, compute, shrink, 1e-6 };
const operation delta_net_replay_operation = { "GATED_DELTA_NET_REPLAY", replay_fits, replay_rows, shrink_replay, 1e-6 };

}  // namespace mtp
