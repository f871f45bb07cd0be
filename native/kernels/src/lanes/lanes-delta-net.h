// The gated delta net of one head, see ../delta_net.h.
//
// Rows do not depend on each other. So a block of rows, which stays in the L1 cache, processes some tokens before the next
// one, and the end of a token and the beginning of the next are one pass over it. Keys and queries are gathered first: those
// of one head are far apart in memory, where many of them would share few lines of a cache. A token's result does not depend
// on the tokens of its batch.

#pragma once

#include "../delta_net.h"
#include "lanes-kernels.h"

namespace mtp {
namespace {

constexpr int64_t state_block = 32;  // rows that stay in the L1 cache

template <class V> bool delta_net_fits(int64_t S) {
    return S % V::floats == 0 && S % V::state_rows == 0;
}

// The part of a token after its deltas are known, and the part of the next token before its deltas. END, BEGIN: whether there
// are these tokens. OUT: write the state between them to s_out. N: S where it is known when this is compiled, or 0.
template <class V, bool END, bool BEGIN, bool OUT, bool KDA, int64_t N>
LANES_INLINE void delta_net_pass(int64_t n, const float * s_in, float * s_out, float * s_next, const float * k, const float * q,
                                 const float * delta, float * sums_q, const float * k_next, const float * decay, float * sums_k) {
    const int64_t S = N > 0 ? N : n;
    constexpr int R = V::state_rows;

    typename V::F acc_q[R], acc_k[R], vdelta[R];
    LANES_UNROLL
    for (int r = 0; r < R; r++) {
        acc_q[r]  = V::zerof();
        acc_k[r]  = V::zerof();
        vdelta[r] = V::setf(END ? delta[r] : 0.0f);
    }
    auto vdecay = V::setf(BEGIN && !KDA ? decay[0] : 0.0f);

    for (int64_t i = 0; i < S; i += V::floats) {
        const auto vk = END ? V::load_f32(k + i) : V::zerof();
        const auto vq = END ? V::load_f32(q + i) : V::zerof();
        const auto vn = BEGIN ? V::load_f32(k_next + i) : V::zerof();
        if (BEGIN && KDA) {
            vdecay = V::load_f32(decay + i);
        }
        LANES_UNROLL
        for (int r = 0; r < R; r++) {
            auto s = V::load_f32(s_in + r * S + i);
            if (END) {
                s = V::fma(vk, vdelta[r], s);
                acc_q[r] = V::fma(vq, s, acc_q[r]);
            }
            if (OUT) {
                V::store_f32(s_out + r * S + i, s);
            }
            if (BEGIN) {
                s = V::mul(s, vdecay);
                acc_k[r] = V::fma(vn, s, acc_k[r]);
                V::store_f32(s_next + r * S + i, s);
            }
        }
    }
    if (END) {
        V::row_sums(acc_q, sums_q);
    }
    if (BEGIN) {
        V::row_sums(acc_k, sums_k);
    }
}

// As a function with an address, which delta_net_rows chooses once for some rows
template <class V, bool END, bool BEGIN, bool OUT, bool KDA, int64_t N>
void delta_net_step(int64_t n, const float * s_in, float * s_out, float * s_next, const float * k, const float * q,
                    const float * delta, float * sums_q, const float * k_next, const float * decay, float * sums_k) {
    delta_net_pass<V, END, BEGIN, OUT, KDA, N>(n, s_in, s_out, s_next, k, q, delta, sums_q, k_next, decay, sums_k);
}

// Rows j0 to j1 of the state before the first token, with the roundings of delta_net_pass.
template <class V> void delta_net_begin(const delta_net_head & h, int64_t j0, int64_t j1, float * s_out) {
    for (int64_t j = j0; j < j1; j++) {
        for (int64_t i = 0; i < h.S; i += V::floats) {
            auto s = V::load_f32(h.state + j * h.S + i);
            for (int64_t t = 0; t < h.n_replay; t++) {
                const int64_t at = t * h.log_stride;
                s = V::mul(s, V::setf(h.log_decay[at]));
                s = V::fma(V::load_f32(h.log_k + at + i), V::setf(h.log_delta[at + j]), s);
            }
            V::store_f32(s_out + j * h.S + i, s);
        }
    }
}

// Rows j0 to j1: the end of token t - 1 and the beginning of token t, from s_in to s_next.
// x: k and q of token t - 1, then those of token t.
template <class V, bool KDA, int64_t N>
void delta_net_block(const delta_net_head & h, int64_t t, int64_t j0, int64_t j1, const float * s_in, float * s_next,
                     float * delta, const float * decay, float * x) {
    const int64_t S = h.S;
    constexpr int R = V::state_rows;

    const bool end = t > 0;
    const bool begin = t < h.n_tokens;
    float * s_out = end ? h.state_of(t - 1) : nullptr;
    float * deltas = begin ? h.deltas_of(t) : nullptr;
    const float beta = begin ? *(const float *) (h.beta + t * h.nbb) : 0.0f;
    const float * v = (const float *) (h.v + t * h.nbv);
    float * attn = h.attn + (t - 1) * h.attn_stride;
    // Each token's are in other pages, where CPUs do not prefetch. Beyond the last token this is harmless.
    for (int64_t j = j0; j < j1; j += 16) {
        __builtin_prefetch(h.v + (t + 2) * h.nbv + j * sizeof(float));
        __builtin_prefetch(attn + 2 * h.attn_stride + j, 1);
    }

    const auto step = !end   ? delta_net_step<V, false, true, false, KDA, N>
                      : !begin ? s_out ? delta_net_step<V, true, false, true, KDA, N> : delta_net_step<V, true, false, false, KDA, N>
                      : s_out  ? delta_net_step<V, true, true, true, KDA, N>
                               : delta_net_step<V, true, true, false, KDA, N>;

    // Meanwhile, the next block of the state, or the one of the next head, is read from memory, a part with each pass.
    const int64_t passes = (h.n_tokens < delta_net_tokens ? h.n_tokens + 1 : delta_net_tokens) * (j1 - j0);
    const char * next = (const char *) (h.state + j1 * S);
    const int64_t lines = t < delta_net_tokens ? (j1 - j0) * S * (int64_t) sizeof(float) / 64 : 0;

    for (int64_t j = j0; j < j1; j += R) {
        const int64_t part = t * (j1 - j0) + j - j0;
        for (int64_t i = lines * part / passes; i < lines * (part + R) / passes; i++) {
            __builtin_prefetch(next + 64 * i);
        }
        float sums_q[R], sums_k[R];
        step(S, s_in + j * S, s_out ? s_out + j * S : nullptr, s_next + j * S, x, x + S, delta + j, sums_q, x + 2 * S, decay, sums_k);

        for (int r = 0; end && r < R; r++) {
            attn[j + r] = sums_q[r] * h.scale;
        }
        for (int r = 0; begin && r < R; r++) {
            delta[j + r] = (v[j + r] - sums_k[r]) * beta;
        }
        if (deltas) {
            memcpy(deltas + j, delta + j, R * sizeof(float));
        }
    }
}

// work: delta_net_work floats
template <class V> void delta_net_rows(const delta_net_head & h, float * work) {
    const int64_t S = h.S;
    const int64_t n = h.n_tokens;
    const int64_t n_decay = h.kda ? S : 1;

    float * delta = work + S * S;
    float * decay = delta + S;
    float * x = decay + delta_net_tokens * n_decay;

    const auto block = h.kda ? delta_net_block<V, true, 0> : S == 128 ? delta_net_block<V, false, 128> : delta_net_block<V, false, 0>;

    // the state during token t, in its final place if no other token needs it
    const auto rows = [&](int64_t t) { return h.n_states == 1 && t <= h.last ? h.states : work; };

    if (n == 0) {
        delta_net_begin<V>(h, 0, S, h.states);
    }
    for (int64_t t0 = 0; n > 0 && t0 <= n; t0 += delta_net_tokens) {
        const int64_t t1 = t0 + delta_net_tokens < n + 1 ? t0 + delta_net_tokens : n + 1;

        // token t at x + (t - t0 + 1) * 2 * S
        if (t0 > 0) {
            memcpy(x, x + delta_net_tokens * 2 * S, 2 * S * sizeof(float));
        }
        for (int64_t t = t0; t < t1 && t < n; t++) {
            float * xt = x + (t - t0 + 1) * 2 * S;
            memcpy(xt, h.k + t * h.nbk, S * sizeof(float));
            memcpy(xt + S, h.q + t * h.nbq, S * sizeof(float));
            h.decay(t, decay + (t - t0) * n_decay);
        }
        for (int64_t j0 = 0; j0 < S; j0 += state_block) {
            const int64_t j1 = j0 + state_block < S ? j0 + state_block : S;
            // in place there is nothing to copy
            if (t0 == 0 && (h.n_replay > 0 || h.state != rows(0))) {
                delta_net_begin<V>(h, j0, j1, rows(0));
            }
            for (int64_t t = t0; t < t1; t++) {
                block(h, t, j0, j1, rows(t > 0 ? t - 1 : 0), rows(t), delta, decay + (t - t0) * n_decay, x + (t - t0) * 2 * S);
            }
        }
    }
}

}  // namespace
}  // namespace mtp
