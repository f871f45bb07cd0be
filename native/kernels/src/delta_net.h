// One head of a gated delta net, as the kernels take it. The state is stored transposed, so that each of its rows computes
// one element of the output:
//
//     s *= decay;   delta = (v - s.k) * beta;   s += delta * k;   attn = s.q * scale

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace mtp {

// tokens that a kernel takes at a time
constexpr int64_t delta_net_tokens = 32;

struct delta_net_head {
    int64_t S;  // rows of the state, and elements of a row
    int64_t n_tokens;
    bool kda;  // a decay for each element of a row instead of one for all

    // the first token, and bytes from token to token; g is the logarithm of the decay
    const char * q;
    const char * k;
    const char * v;
    const char * g;
    const char * beta;
    size_t nbq, nbk, nbv, nbg, nbb;

    // the state before the first token is this one after n_replay tokens of a log
    const float * state;
    int64_t n_replay;
    const float * log_k;
    const float * log_delta;
    const float * log_decay;
    int64_t log_stride;

    // The state after token `last`, and those of up to n_states - 1 tokens before it at multiples of states_stride. If
    // there are no tokens, last is -1, and the state before the first token is written. A single one may replace `state`.
    float * states;
    int64_t states_stride;
    int64_t n_states;
    int64_t last;

    // the deltas of the tokens after `last`, if not NULL
    float * deltas;
    int64_t deltas_stride;

    float * attn;
    int64_t attn_stride;
    float scale;

    // where to write the state after token t, or NULL
    float * state_of(int64_t t) const {
        return t <= last && last - t < n_states ? states + (last - t) * states_stride : nullptr;
    }

    // where to write the deltas of token t, or NULL
    float * deltas_of(int64_t t) const { return deltas && t > last ? deltas + (t - last - 1) * deltas_stride : nullptr; }

    // the decays of token t: one, or S with kda
    void decay(int64_t t, float * to) const {
        const float * logarithm = (const float *) (g + t * nbg);
        for (int64_t i = 0; i < (kda ? S : 1); i++) {
            to[i] = expf(logarithm[i]);
        }
    }
};

// Floats of memory that a kernel needs: the state; deltas; decays, keys and queries of tokens, with the token before them.
inline int64_t delta_net_work(int64_t S, bool kda) {
    return S * S + S + delta_net_tokens * (kda ? S : 1) + (delta_net_tokens + 1) * 2 * S;
}

}  // namespace mtp
