#include "ops.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "vec.h"

#include <cmath>
#include <cstring>

// ggml_compute_forward_gated_delta_net_replay

// Row j of a head's state, s[j*S_v + i] = S[i][j], depends on no other row. So a row takes up the kept tokens of the log and
// then the new tokens, with the operations of ggml_compute_forward_gated_delta_net: the bits are the same.
void ggml_compute_forward_gated_delta_net_replay(
        const ggml_compute_params * params,
        ggml_tensor * dst) {
    const ggml_tensor * src_q    = dst->src[0];
    const ggml_tensor * src_k    = dst->src[1];
    const ggml_tensor * src_v    = dst->src[2];
    const ggml_tensor * src_g    = dst->src[3];
    const ggml_tensor * src_beta = dst->src[4];
    const ggml_tensor * src_mem  = dst->src[5];

    const int32_t * ids      = (const int32_t *) dst->src[6]->data;
    const int32_t * n_replay = (const int32_t *) dst->src[7]->data;

    const int64_t n_log = ggml_get_op_params_i32(dst, 0);

    const int64_t S_v      = src_v->ne[0];
    const int64_t H        = src_v->ne[1];
    const int64_t n_tokens = src_v->ne[2];
    const int64_t n_seqs   = src_v->ne[3];
    const int64_t H_q      = src_q->ne[1];
    const int64_t H_k      = src_k->ne[1];

    const int64_t row_size   = src_mem->ne[0];
    const int64_t log_size   = ggml_gated_delta_net_log_size(S_v, H_k, H);
    const int64_t log_offset = S_v * S_v * H;

    // tokens that become part of the new state
    const int64_t n_state = n_tokens - ggml_gated_delta_net_n_logged(n_tokens, n_log);

    // the work buffer of a thread, see ggml_graph_plan
    float * row_work = (float *) params->wdata + params->ith * (S_v + n_tokens + CACHE_LINE_SIZE_F32);
    float * decays   = row_work + S_v;

    const float scale = 1.0f / sqrtf((float) S_v);

    const auto at = [](const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
        return (const float *) ((const char *) t->data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3]);
    };

    const int64_t nr  = H * n_seqs;
    const int64_t ir0 = nr *  params->ith      / params->nth;
    const int64_t ir1 = nr * (params->ith + 1) / params->nth;

    for (int64_t ir = ir0; ir < ir1; ++ir) {
        const int64_t iv1 = ir % H; // head_index
        const int64_t iv3 = ir / H; // sequence
        const int64_t iq1 = iv1 % H_q;
        const int64_t ik1 = iv1 % H_k;

        GGML_ASSERT(ids[iv3] >= 0 && ids[iv3] < src_mem->ne[1]);
        GGML_ASSERT(n_replay[iv3] >= 0 && n_replay[iv3] <= n_log);

        const float * row_in  = at(src_mem, ids[iv3], 0, 0);
        float       * row_out = (float *) dst->data + S_v * H * n_tokens * n_seqs + iv3 * row_size;
        float       * log_out = row_out + log_offset;

        for (int64_t t = 0; t < n_tokens; ++t) {
            decays[t] = expf(*at(src_g, iv1, t, iv3));

            if (t >= n_state) {
                float * token = log_out + (t - n_state) * log_size;

                // all heads iv1 with the same remainder share a head of k; the first of them logs it
                if (iv1 == ik1) {
                    memcpy(token + ik1 * S_v, at(src_k, ik1, t, iv3), S_v * sizeof(float));
                }
                token[(H_k + H) * S_v + iv1] = decays[t];
            }
        }

        for (int64_t j = 0; j < S_v; ++j) {
            float * s = row_out + (iv1 * S_v + j) * S_v;
            memcpy(s, row_in + (iv1 * S_v + j) * S_v, S_v * sizeof(float));

            for (int64_t t = 0; t < n_replay[iv3]; ++t) {
                const float * token = row_in + log_offset + t * log_size;

                ggml_vec_scale_f32(S_v, s, token[(H_k + H) * S_v + iv1]);
                ggml_vec_mad_f32  (S_v, s, token + ik1 * S_v, token[(H_k + iv1) * S_v + j]);
            }

            for (int64_t t = 0; t < n_tokens; ++t) {
                const float * q = at(src_q, iq1, t, iv3);
                const float * k = at(src_k, ik1, t, iv3);

                if (t == n_state) {
                    s = (float *) memcpy(row_work, s, S_v * sizeof(float));
                }

                float sum = 0.0f;
                ggml_vec_scale_f32(S_v, s, decays[t]);
                ggml_vec_dot_f32  (S_v, &sum, 0, s, 0, k, 0, 1);

                const float delta = (at(src_v, iv1, t, iv3)[j] - sum) * *at(src_beta, iv1, t, iv3);

                ggml_vec_mad_f32(S_v, s, k, delta);
                ggml_vec_dot_f32(S_v, &sum, 0, s, 0, q, 0, 1);

                ((float *) dst->data)[((iv3 * n_tokens + t) * H + iv1) * S_v + j] = sum * scale;

                if (t >= n_state) {
                    log_out[(t - n_state) * log_size + (H_k + iv1) * S_v + j] = delta;
                }
            }
        }
    }
}
