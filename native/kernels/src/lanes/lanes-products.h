// Which kernel multiplies weights of a type with columns, for any vectors V.

#pragma once

#include "lanes-attention.h"
#include "lanes-blocks.h"
#include "lanes-floats.h"
#include "lanes-grid-formats.h"
#include "lanes-k-formats.h"
#include "lanes-panels.h"

namespace mtp {
namespace {

// Products::of<T> for the layout T of a type with blocks of 256.
template <class Products> product_kernel super_block_product(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q2_K:    return Products::template of<sixteens<q2_K>>;
        case GGML_TYPE_Q3_K:    return Products::template of<sixteens<q3_K>>;
        case GGML_TYPE_Q4_K:    return Products::template of<k_mins<block_q4_K>>;
        case GGML_TYPE_Q5_K:    return Products::template of<k_mins<block_q5_K>>;
        case GGML_TYPE_Q6_K:    return Products::template of<q6_K>;
        case GGML_TYPE_IQ4_XS:  return Products::template of<iq4_xs>;
        case GGML_TYPE_IQ2_XXS: return Products::template of<sixteens<iq2_xxs>>;
        case GGML_TYPE_IQ2_XS:  return Products::template of<sixteens<iq2_xs>>;
        case GGML_TYPE_IQ2_S:   return Products::template of<sixteens<iq2_s>>;
        case GGML_TYPE_IQ3_XXS: return Products::template of<sixteens<iq3_xxs>>;
        case GGML_TYPE_IQ3_S:   return Products::template of<sixteens<iq3_s>>;
        case GGML_TYPE_TQ2_0:   return Products::template of<sixteens<tq2_0>>;
        default:                return nullptr;
    }
}

template <class V> struct super_block_products {
    template <class T> static constexpr product_kernel of = rows_or_panels<V, super_blocks<T>, super_panels<V, T>>;
};

template <class V> product_kernel quants_product(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q8_0:    return block_mul_mat<V, q8_0>;
        case GGML_TYPE_Q4_0:    return block_mul_mat<V, q4_0>;
        case GGML_TYPE_Q4_1:    return block_mul_mat<V, q4_1>;
        case GGML_TYPE_Q5_0:    return block_mul_mat<V, q5_0>;
        case GGML_TYPE_Q5_1:    return block_mul_mat<V, q5_1>;
        case GGML_TYPE_IQ4_NL:  return block_mul_mat<V, iq4_nl>;
        case GGML_TYPE_MXFP4:   return block_mul_mat<V, mxfp4>;
        case GGML_TYPE_NVFP4:   return block_mul_mat<V, nvfp4>;
        case GGML_TYPE_Q2_0:    return block_mul_mat<V, q2_0>;
        default:                return super_block_product<super_block_products<V>>(type);
    }
}

template <class V> product_kernel product_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:    return float_mul_mat<V, float>;
        case GGML_TYPE_F16:    return float_mul_mat<V, f16>;
        case GGML_TYPE_BF16:   return float_mul_mat<V, bf16>;
        default:               return quants_product<V>(type);
    }
}

template <class V> const attention_kernels * attention_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:    return attention_steps<V, float>();
        case GGML_TYPE_F16:    return attention_steps<V, f16>();
        case GGML_TYPE_BF16:   return attention_steps<V, bf16>();
        case GGML_TYPE_Q8_0:   return attention_steps<V, block_q8_0>();
        case GGML_TYPE_Q4_0:   return attention_steps<V, block_q4_0>();
        default:               return nullptr;
    }
}

struct small_codes {
    static constexpr int max_code = 15;
};

// As many sums side by side as hide how long a product takes.
template <class V> double multiply(int64_t n) {
    constexpr int count = 12;
    typename V::I sum[count], w = V::set8(1);
    for (auto & s : sum) {
        s = V::zero();
    }
    for (int64_t i = 0; i < n; i++) {
        LANES_UNROLL
        for (auto & s : sum) {
            w = in_order(w);  // else it may be multiplied once for all
            s = in_order(V::template dot4<small_codes>(s, w, w));
        }
    }
    return (double) n * count * V::count * 16;
}

}  // namespace
}  // namespace mtp
