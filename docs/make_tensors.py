"""Generate docs/tensors.md from the converter's own code.

    python docs/make_tensors.py            prints the page
    python docs/make_tensors.py --write    replaces docs/tensors.md

A test compares the page with this output, so the two cannot diverge.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtp_gguf.convert.checkpoints.checkpoint import LAYERS_KEY, Checkpoint, PlacedTensor
from mtp_gguf.convert.checkpoints.config import ConfigReader
from mtp_gguf.convert.checkpoints.quantized import SCHEMES
from mtp_gguf.convert.families import qwen, qwen3_5, qwen3_next
from mtp_gguf.convert.families.family import find_family
from mtp_gguf.convert.families.qwen import Dims, Entry
from mtp_gguf.convert.families.target_model import HeadChoice, TargetModel
from mtp_gguf.convert.plans.precision import Override, choose_types
from mtp_gguf.convert.plans.recipe import Target
from mtp_gguf.gguf_tools import vision
from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.files.safetensors import StoredTensor
from mtp_gguf.gguf_tools.files.tensor_types import Q8_0
from mtp_gguf.gguf_tools.hub.sources import FileSource

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.real_tools.rows import ROWS, SAME

PAGE = Path(__file__).with_name("tensors.md")

_COMMON: dict[str, Any] = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
DENSE_9B = _COMMON | {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
MOE_35B = _COMMON | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}

NEXT_80B = (
    MOE_35B
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "intermediate_size": 5120,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "vocab_size": 151936,
    }
) | {"rope_parameters": {k: v for k, v in _COMMON["rope_parameters"].items() if "mrope" not in k}}

INTRODUCTION = """\
# Which tensors and metadata does the converter write?

The tables list every tensor of Qwen3.5, Qwen3-Next, Qwen3.8-Flash-Next, MiMo-V2, Step 3.5,
Nemotron 3 and GLM-5.3-Flash, from its Hugging Face name to its name in the GGUF file.
`python docs/make_tensors.py --write` generates this page from the converter's code, and a test
compares the two.

Shapes are in ggml order (row length first) and are those of the 9B dense model, of 35B-A3B, and of
Qwen3-Next 80B-A3B where it differs. `i` counts the trunk's layers; the MTP block is block `N`,
where N is the number of trunk layers, and `block_count` is N + 1. Multimodal checkpoints name the
trunk's tensors `model.language_model.` instead of `model.`. Tensors under `model.visual.` go into a
[file of their own](#vision-tower); computed buffers (`rotary_emb.inv_freq`) are skipped. Prefixes
that torch.compile, FSDP, DistributedDataParallel, activation checkpointing, Lightning and PEFT add
to names (`_orig_mod.`, `_fsdp_wrapped_module.`, `module.`, `_checkpoint_wrapped_module.`,
`_forward_module.`, `model.model.`, `base_model.model.`) are removed. If the config does not give
the number of the head's layers (`mtp_num_hidden_layers` missing, null or 0, as in Qwen3-Next), they
are counted by its tensors. llama.cpp drafts with one MTP layer, so that of several only the first
is converted.

The types are those of `mtp-gguf convert` without options: a Q4_K_M base, in llama.cpp's mix, and a
Q8_0 head. Several types in one cell mean that layers differ.

Transforms:

- *1 + w*: the families store norm weights as their difference from one (`Qwen3_5RMSNorm` in
  transformers); ggml multiplies by the weight itself.
- *value heads tiled*: Hugging Face groups the value heads of linear attention by key head, while
  ggml repeats the whole list of key heads. Without the reordering, each value head would be paired
  with the wrong key. With equally many heads of both kinds, the order is the same.
- *out of their groups*: Qwen3-Next stores query, key, values and gates of each key head one after
  the other; llama.cpp takes all queries, then all keys, then all values, and the gates apart.
- *-exp(w)*: the decay `A_log`, computed in double precision and rounded once
  ([why](decisions.md)).
- F16 sources keep F16 arithmetic, as in llama.cpp's converter; all others compute in F32.
"""

FLASH_NEXT = """\
## Qwen3.8-Flash-Next (`qwen4exp`)

Linear attention, full attention, experts and MTP block are those of `qwen35moe`. There are no norms
before and after the halves of a block and no last norm; hyper-connections read from S streams of
the hidden state (`hc_count`) and add to them, with gates of rank R (`hc_lowrank`). `M` is such a
reader:

| Hugging Face | GGUF | shape | transform |
| --- | --- | --- | --- |
| `M.hc_norm.weight` | `M_norm.weight` | [S * width] | 1 + w |
| `M.input_mix_weight_down.weight` | `M_down.weight` | [S * width, R] | as it is |
| `M.input_mix_weight_up.weight` | `M_up.weight` | [R, S * width] | as it is |

| where | `M` on Hugging Face | `M` in the GGUF |
| --- | --- | --- |
| before attention | `model.layers.i.attn_hyper_connection` | `blk.i.hc_attn` |
| before the experts | `model.layers.i.mlp_hyper_connection` | `blk.i.hc_ffn` |
| after the last layer | `model.hyper_connection_mixer` | `output_hc` |
| at the end of the head | `mtp.hyper_connection_mixer` | `blk.N.nextn.hc_head` |

| Hugging Face | GGUF | transform |
| --- | --- | --- |
| `….attn_hyper_connection.block_inject_weight.weight` | `….hc_attn_inject.weight` | as it is |
| `….mlp_hyper_connection.block_inject_weight.weight` | `….hc_ffn_inject.weight` | as it is |
| `….self_attn.indexer.index_qk_proj.weight` | `….indexer.q_proj.weight`, \
`….indexer.k_proj.weight` | its first rows, and the last `indexer_head_dim` |
| `….self_attn.indexer.q_layernorm.weight`, `….k_layernorm.weight` | `….indexer.q_norm.weight`, \
`….indexer.k_norm.weight` | 1 + w |
| `….ple.key_proj.weight`, `….ple.value_proj.weight` | `….ple_key.weight`, `….ple_value.weight` \
| as it is |
| `….ple.conv1d.weight` | `….ple_conv1d.weight` | squeezed |
| `….ple.norm_key.weight`, `….norm_query.weight`, `….norm_conv.weight` | `….ple_norm_key.weight`, \
`….ple_norm_query.weight`, `….ple_norm_conv.weight` | 1 + w |
| `….ple.ple_embedding.ngram_embedding.shard_*.weight` | `per_layer_token_embd.weight` | stacked |
| `mtp.fc_embedding.weight`, `mtp.fc_hidden.weight` | `blk.N.nextn.eh_proj.weight` | rows joined |

The constants of the n-gram hash (`….ple_embedding.layer_multipliers`, `.ngram_heads_offsets`,
`.ngram_heads_vocab_sizes`) become metadata (`qwen4exp.ple.*`). The trunk has the tensors and
metadata of the pinned llama.cpp's converter, and transformers' logits; trunk and head have those of
the converter of llama.cpp b11549, which knows the head (`tests/convert/test_qwen4_exp.py`). One key
differs: with a transformers that knows the model, upstream writes 0 for every full-attention layer
of the trunk in `attention.compress_ratios`, and llama.cpp does not use its indexer.
"""

STEP35 = """\
## Step 3.5 and 3.7 (`step35`)

Layers are dense or mixtures of experts, with or without a window, and the MTP layers follow the
trunk's; all of them are converted. `L` is `model.layers.i` (`blk.i`):

| Hugging Face | GGUF | transform |
| --- | --- | --- |
| `L.input_layernorm.weight`, `L.post_attention_layernorm.weight` | `attn_norm.weight`, \
`ffn_norm.weight` | 1 + w |
| `L.self_attn.{q,k,v,o}_proj.weight` | `attn_{q,k,v}.weight`, `attn_output.weight` | as it is |
| `L.self_attn.g_proj.weight` | `attn_gate.weight` | as it is |
| `L.self_attn.{q,k}_norm.weight` | `attn_{q,k}_norm.weight` | 1 + w |
| `L.mlp.{gate,up,down}_proj.weight` | `ffn_{gate,up,down}.weight` | as it is |
| `L.moe.gate.weight`, `L.moe.router_bias` | `ffn_gate_inp.weight`, `exp_probs_b.bias` | as it is |
| `L.moe.{gate,up,down}_proj.weight` | `ffn_{gate,up,down}_exps.weight` | as it is |
| `L.share_expert.{gate,up,down}_proj.weight` | `ffn_{gate,up,down}_shexp.weight` | as it is |
| `L.eh_proj.weight` | `nextn.eh_proj.weight` | as it is |
| `L.enorm.weight`, `L.hnorm.weight` | `nextn.enorm.weight`, `nextn.hnorm.weight` | 1 + w |
| `L.transformer.shared_head.norm.weight` | `nextn.shared_head_norm.weight` | 1 + w |
| `L.transformer.shared_head.output.weight` | `nextn.shared_head_head.weight` | as it is |

Llama 3's scaling of the rotation becomes a tensor (`rope_freqs.weight`), computed in double
precision. Both sets of config keys are read, the publisher's and those that transformers saves. The
vision tower is skipped. Files have the tensors and metadata of llama.cpp's converter, and the trunk
has transformers' logits (`tests/convert/test_step35.py`).

"""

MIMO_V2 = """\
## MiMo-V2 (`mimo2`)

Layers are dense or mixtures of experts, with or without a window; nothing is transformed, and all
MTP layers are converted. `L` is `model.layers.i` (`blk.i`) in the trunk and `model.mtp.layers.j`
(`blk.{N + j}`) in the head:

| Hugging Face | GGUF | where |
| --- | --- | --- |
| `L.input_layernorm.weight` | `attn_norm.weight` | everywhere |
| `L.self_attn.{q,k,v}_proj.weight` | `attn_{q,k,v}.weight`; in the head one `attn_qkv.weight` | \
MiMo-V2-Flash |
| `L.self_attn.qkv_proj.weight` | `attn_qkv.weight` | MiMo-V2.5, 2.6 |
| `L.self_attn.o_proj.weight` | `attn_output.weight` | everywhere |
| `L.self_attn.attention_sink_bias` | `attn_sinks.weight` | layers that have it |
| `L.post_attention_layernorm.weight` | `ffn_norm.weight` | trunk |
| `L.pre_mlp_layernorm.weight` | `ffn_norm.weight` | head |
| `L.mlp.{gate,up,down}_proj.weight` | `ffn_{gate,up,down}.weight` | dense layers, head |
| `L.mlp.gate.weight` | `ffn_gate_inp.weight` | experts |
| `L.mlp.gate.e_score_correction_bias` | `exp_probs_b.bias` | experts |
| `L.mlp.experts.*.{gate,up,down}_proj.weight` | `ffn_{gate,up,down}_exps.weight` | experts |
| `L.eh_proj.weight`, `L.enorm.weight`, `L.hnorm.weight` | `nextn.eh_proj.weight`, \
`nextn.enorm.weight`, `nextn.hnorm.weight` | head |
| `L.final_layernorm.weight` | `layer_output_norm.weight` | head |

The published checkpoints are in FP8. Their fused projections have the queries, keys and values of
the first of four or eight devices, then those of the next, which becomes clear from the number of
scales; the converter puts all queries first. MiMo-V2.6 has its experts in MXFP4, which
`--tensor-type _exps=MXFP4` keeps without loss. Vision and audio towers are skipped.

Files have the tensors and metadata of llama.cpp's converter, and the trunk has transformers' logits
(`tests/convert/test_mimo_v2.py`). One thing differs: from separate projections upstream makes an
MTP block with separate tensors, which llama.cpp's draft graph does not take.

"""

NEMOTRON = """\
## Nemotron 3 (`nemotron_h_moe`)

A layer has Mamba 2, attention without positions, or experts (networks without a gate). `L` is
`backbone.layers.i` (`blk.i`) in the trunk. The head is `mtp.layers.0`, with attention, and
`mtp.layers.1`, with experts; both become `blk.N`:

| Hugging Face | GGUF | transform |
| --- | --- | --- |
| `backbone.embeddings.weight`, `backbone.norm_f.weight` | `token_embd.weight`, \
`output_norm.weight` | as it is |
| `L.norm.weight` | `attn_norm.weight`; of `mtp.layers.1` `post_attention_norm.weight` | as it is |
| `L.mixer.in_proj.weight`, `L.mixer.out_proj.weight` | `ssm_in.weight`, `ssm_out.weight` \
| as it is |
| `L.mixer.conv1d.weight`, `.bias` | `ssm_conv1d.weight`, `.bias` | squeezed |
| `L.mixer.dt_bias`, `L.mixer.D` | `ssm_dt.bias`, `ssm_d` | as it is |
| `L.mixer.A_log` | `ssm_a` | -exp(w) |
| `L.mixer.norm.weight` | `ssm_norm.weight` | one row for each group |
| `L.mixer.{q,k}_proj.weight` | `attn_{q,k}.weight` | the halves of a head's rows alternate |
| `L.mixer.{v,o}_proj.weight` | `attn_v.weight`, `attn_output.weight` | as it is |
| `L.mixer.gate.weight`, `L.mixer.gate.e_score_correction_bias` | `ffn_gate_inp.weight`, \
`exp_probs_b.bias` | as it is |
| `L.mixer.experts.*.{up,down}_proj.weight` | `ffn_{up,down}_exps.weight` | stacked |
| `L.mixer.shared_experts.{up,down}_proj.weight` | `ffn_{up,down}_shexp.weight` | as it is |
| `L.mixer.fc{1,2}_latent_proj.weight` | `ffn_latent_{down,up}.weight` | as it is |
| `mtp.layers.0.{eh_proj,enorm,hnorm}.weight` | `nextn.{eh_proj,enorm,hnorm}.weight` | as it is |
| `mtp.layers.1.final_layernorm.weight` | `nextn.shared_head_norm.weight` | as it is |

Files have the tensors and metadata of llama.cpp's converter, and the trunk has transformers' logits
(`tests/convert/test_nemotron_h.py`). One type differs: `ffn_gate_inp.weight` is F32 in the head,
too. Models with dense layers, which have no head, are refused, and so are tokenizers other than
byte-level BPE.

"""
GLM5_NEXT = """\
## GLM-5.3-Flash (`glm5-next`)

Three of four layers have linear attention (KDA), the others latent attention (MLA) without
positions, with an indexer that some layers share. Each layer of the trunk has two hyper-connections
of four streams. `L` is `model.layers.i` (`blk.i`); the MTP layer is the one after the trunk's, with
latent attention and experts:

| Hugging Face | GGUF | transform |
| --- | --- | --- |
| `L.hc_{attn,ffn}_{fn,base,scale}` | `hc_{attn,ffn}_{fn,base,scale}.weight` | F32 |
| `L.input_layernorm.weight`, `L.post_attention_layernorm.weight` | `attn_norm.weight`, \
`ffn_norm.weight` | as it is |
| `L.self_attn.{q,k,v,o}_proj.weight` | `attn_{q,k,v,output}.weight` | as it is |
| `L.self_attn.{q,k,v}_conv1d.weight` | `ssm_conv1d_{q,k,v}.weight` | F32 |
| `L.self_attn.{f,g}_{a,b}_proj.weight`, `L.self_attn.b_proj.weight` | `ssm_{f,g}_{a,b}.weight`, \
`ssm_beta.weight` | as it is |
| `L.self_attn.A_log` | `ssm_a` | -exp(w) |
| `L.self_attn.dt_bias`, `L.self_attn.o_norm.weight` | `ssm_dt.bias`, `ssm_norm.weight` | as it is |
| `L.self_attn.q_{a,b}_proj.weight`, `L.self_attn.q_a_layernorm.weight` | \
`attn_q_{a,b}.weight`, `attn_q_a_norm.weight` | as it is |
| `L.self_attn.kv_a_proj_with_mqa.weight`, `L.self_attn.kv_a_layernorm.weight` | \
`attn_kv_a_mqa.weight`, `attn_kv_a_norm.weight` | as it is |
| `L.self_attn.kv_b_proj.weight` | `attn_k_b.weight`, `attn_v_b.weight` | divided; keys of \
each head transposed |
| `L.self_attn.indexer.{wq_b,wk,weights_proj}.weight` | `indexer.{attn_q_b,attn_k,proj}.weight` | \
as it is; `proj` F32 |
| `L.self_attn.indexer.k_norm.{weight,bias}` | `indexer.k_norm.{weight,bias}` | as it is |
| `L.self_attn.indexer.index_kpool_compress_{gate,ape}` | `indexer_compressor_{gate,ape}.weight` | \
F32 |
| `L.mlp.{gate,up,down}_proj.weight` | `ffn_{gate,up,down}.weight` | dense layers |
| `L.mlp.gate.weight`, `L.mlp.gate.e_score_correction_bias` | `ffn_gate_inp.weight`, \
`exp_probs_b.bias` | as it is |
| `L.mlp.experts.*.{gate,up,down}_proj.weight` | `ffn_{gate,up,down}_exps.weight` | stacked |
| `L.mlp.shared_experts.{gate,up,down}_proj.weight` | `ffn_{gate,up,down}_shexp.weight` | as it is |
| `L.{eh_proj,enorm,hnorm}.weight`, `L.shared_head.norm.weight` | \
`nextn.{eh_proj,enorm,hnorm,shared_head_norm}.weight` | head |
| `L.embed_tokens.weight`, `L.shared_head.head.weight` | \
`nextn.{embed_tokens,shared_head_head}.weight` | head, if it has them |

Config keys are the published ones (`linear_attn_config`, `first_k_dense_replace`) or those that
transformers saves. The tokens `[gMASK]`, `<|user|>`, `<|endoftext|>` and `<|observation|>` get the
roles that llama.cpp's converter gives them. Files have the tensors and metadata of that converter,
and the trunk has transformers' logits (`tests/convert/test_glm5_next.py`). The vision tower is
skipped.

"""

DIFFERENCES = """\
## Metadata

Keys, types and values are those of llama.cpp's converter and quantizer for the same checkpoint
(`tests/goldens/`), with these differences:

| key | here | upstream |
| --- | --- | --- |
| `{arch}.full_attention_interval` | the config's own value | 4 if the config has no \
`layer_types`; `attention.recurrent_layers` takes precedence in both |
| `{arch}.rope.freq_base` | 10000 if the config's `rope_theta` is null | no key, and llama.cpp \
assumes 10000 |
| `general.*` | numbers, dates, and yes or no in a model card are stored as text | refused, \
or stored as true and false |
| `quantize.imatrix.file` | the file's name | its path as given |
| `mtp_gguf.fastmtp.*` | present if a draft vocabulary was requested \
([fastmtp.md](fastmtp.md)) | absent |
| `mtp_gguf.recipe` | present if types were chosen for a target or by `--recipe` \
([precision.md](precision.md)): an array of strings `TENSOR TYPE` | absent |

In addition to `general.*` (from the model card, the config and the folder's name, by the rules of
the `gguf` package) and `tokenizer.*`, a file has:
"""


VISION = """
## Vision tower

`--mmproj` writes the tensors under `model.visual.` into an mmproj file (architecture `clip`), with
the bytes of `convert_hf_to_gguf.py --mmproj` (`tests/convert/test_mmproj.py`). `i` counts the
tower's layers. Every tensor of the table has a weight and a bias, except the positions.

| Hugging Face | GGUF | type |
| --- | --- | --- |"""

VISION_TYPES = """
Biases and norms are F32. Rows that are not a multiple of Q8_0's block of 32 fall back to F16. The
kernel of the patch embedding spans two frames of a video and becomes two tensors. A tower for
another width than the language model's, or with `deepstack_visual_indexes`, is refused.
"""

QUANTIZED = """
## Quantized checkpoints

Schemes that llama.cpp's converter dequantizes are dequantized here too, to the same bits, and then
written in the requested types. NVFP4 is kept: the blocks of trunk, embedding and output are copied
unchanged, with their `.scale` and `.input_scale`, whatever `--quant` says; the MTP head is stored
in the type requested for it. Rows whose length is not a multiple of ggml's block size of 64 are
dequantized.

Every other scheme is refused with an error that names it. The MTP head of such a checkpoint can
still be taken (`graft --from`, `convert --from`) if it was left in 16 bits. Weights in
`pytorch_model.bin` are read if there is no safetensors file; the pickle in it is not executed.

| scheme | `quant_method` | `format` or `quant_algo` | |
| --- | --- | --- | --- |"""

TOOLS = """
## Which tools' output can be converted?

Each row is a tiny model written by the tool itself and converted both here and by llama.cpp's
converter (`tests/real_tools`).

| tool | call | result |
| --- | --- | --- |"""

NOT_RUN = """
transformers 4 has tokenizers of this family and none of its models, so only its tokenizers are
tested. AutoAWQ has no class for the architecture; the test adds one, without scales. The programs
of llama.cpp are those of `mtp-gguf build-server`; a model with an importance matrix is compared
with the output of `llama-quantize`. transformers 5.23 quantizes to FP8 on GPUs only, which is not
tested. GPTQ in 8 bits and in its second version, compressed-tensors in INT8 and ModelOpt's
W4A16_NVFP4 are compared with upstream on matrices that the tests construct themselves
(`tests/goldens/quantized-*`).
"""


def page() -> str:
    """Return the whole page."""
    dense, moe, following = _Model(DENSE_9B), _Model(MOE_35B), _Model(NEXT_80B)
    sections = [
        INTRODUCTION,
        "## Outside the blocks\n",
        *_table(dense, ("", ""), [qwen.EMBEDDING, qwen.OUTPUT_NORM, qwen.OUTPUT]),
        "Tied models have no `lm_head.weight`; their output layer is `token_embd.weight`.\n",
        "## Every block\n",
        *_table(dense, _TRUNK, qwen.NORMS),
        "## Full attention (every fourth layer, and the MTP block)\n",
        *_table(dense, _FULL, qwen.FULL_ATTENTION),
        "`attn_q.weight` contains query and gate, interleaved per head.\n",
        "## Linear attention (the other layers)\n",
        *_table(dense, _TRUNK, qwen3_5.LINEAR_ATTENTION),
        "## Linear attention of Qwen3-Next (`qwen3next`)\n",
        "Everything else is as in `qwen35moe`. A config with dense layers (`mlp_only_layers`,\n"
        "`decoder_sparse_step`) is refused, because llama.cpp has no such model.\n",
        *_table(following, _TRUNK, qwen3_next.LINEAR_ATTENTION),
        "## Feed-forward, dense (`qwen35`)\n",
        *_table(dense, _TRUNK, qwen.DENSE_FFN),
        "## Feed-forward, mixture of experts (`qwen35moe`)\n",
        *_table(moe, _TRUNK, qwen.SHARED_EXPERT),
        *_experts(moe),
        "## MTP block\n",
        "A full-attention block (`mtp.layers.0.*` to `blk.N.*`, the tables above) and:\n",
        *_table(dense, ("mtp.", "blk.32."), qwen.MTP),
        "The input of `nextn.eh_proj` is the normed embedding and the normed hidden state, in this "
        "order.\n"
        "Checkpoints with dedicated embeddings also have "
        f"`mtp.{qwen.MTP_EMBEDDING.source}`, which becomes "
        f"`blk.N.{qwen.MTP_EMBEDDING.target}`.\n",
        FLASH_NEXT,
        MIMO_V2,
        STEP35,
        NEMOTRON,
        GLM5_NEXT,
        DIFFERENCES,
        *_metadata({"9B": dense, "35B-A3B": moe, "80B-A3B": following}),
        VISION,
        *_vision(),
        VISION_TYPES,
        QUANTIZED,
        *_schemes(),
        TOOLS,
        *_tools(),
        NOT_RUN,
    ]
    return "\n".join(sections).rstrip() + "\n"


_TRUNK = ("model.layers.0.", "blk.0.")
_FULL = ("model.layers.3.", "blk.3.")


class _Model:
    """A model of the family with real shapes and no weights, planned with the default types."""

    def __init__(self, config: dict[str, Any]) -> None:
        reader = ConfigReader("config.json", config)
        family = find_family(config, Path("config.json"))
        self.dims = qwen.read_dims(reader, reader.size(LAYERS_KEY), "num_experts" in config)
        linear = (qwen3_next if family is qwen3_next else qwen3_5).LINEAR_ATTENTION
        sources = dict(_sources(self.dims, linear))
        checkpoint = Checkpoint(Path("model"), config, sources, (), ())
        self.target_model: TargetModel = family.target_model(checkpoint, HeadChoice.WITH_TRUNK)
        self.targets = {t.name: t for t in self.target_model.targets}
        metadata = {
            "general.architecture": Value(ValueType.STRING, self.target_model.architecture),
            **self.target_model.hparams,
        }
        head = Override(rf"^blk\.{self.dims.layers}\.", Q8_0)
        self.types = choose_types(self.target_model.targets, metadata, "Q4_K_M", [head], None)

    def types_of(self, name: str) -> str:
        """Return the types of a tensor over the trunk's layers, or in the head's block."""
        suffix = re.sub(r"^blk\.\d+\.", "", name)
        head = f"blk.{self.dims.layers}."
        same = {
            kind.name
            for other, kind in self.types.items()
            if re.sub(r"^blk\.\d+\.", "", other) == suffix
            and other.startswith(head) == name.startswith(head)
        }
        return ", ".join(sorted(same))


def _sources(dims: Dims, linear: tuple[Entry, ...]) -> Iterator[tuple[str, PlacedTensor]]:
    """Yield every source tensor of a model of these sizes, its experts fused."""

    def place(prefix: str, entry: Entry) -> tuple[str, PlacedTensor]:
        name, shape = prefix + entry.source, entry.shape(dims)
        return name, PlacedTensor(StoredTensor(name, "BF16", shape, 0, 0), _NO_FILE)

    def block(prefix: str, recurrent: bool) -> Iterator[tuple[str, PlacedTensor]]:
        attention = linear if recurrent else qwen.FULL_ATTENTION
        ffn = qwen.SHARED_EXPERT if dims.moe else qwen.DENSE_FFN
        for entry in (*qwen.NORMS, *attention, *ffn):
            yield place(prefix, entry)
        if dims.moe:
            yield place(prefix, qwen.EXPERT_GATE_UP)
            down = qwen.EXPERT_PROJECTIONS[2]
            yield place(
                prefix, Entry("mlp.experts.down_proj", "", lambda d: (d.experts, *down.shape(d)))
            )

    for entry in (qwen.EMBEDDING, qwen.OUTPUT_NORM, qwen.OUTPUT):
        yield place("", entry)
    for index, recurrent in enumerate(dims.recurrent):
        yield from block(f"model.layers.{index}.", recurrent)
    for entry in qwen.MTP:
        yield place("mtp.", entry)
    yield from block("mtp.layers.0.", recurrent=False)


_NO_FILE = FileSource(Path(__file__))


def _row(model: _Model, source: str, target: Target, transform: str) -> str:
    name = re.sub(r"^model\.layers\.\d+\.", "model.layers.i.", source)
    block = "blk.N." if source.startswith("mtp.") else "blk.i."
    shown = re.sub(r"^blk\.\d+\.", block, target.name)
    shape = str(list(target.shape))
    return f"| `{name}` | `{shown}` | {shape} | {transform} | {model.types_of(target.name)} |"


_HEADER = ("| Hugging Face | GGUF | shape | transform | type |", "| --- | --- | --- | --- | --- |")


def _table(
    model: _Model, prefixes: tuple[str, str], entries: "list[Entry] | tuple[Entry, ...]"
) -> Iterator[str]:
    yield from _HEADER
    for entry in entries:
        target = model.targets[prefixes[1] + entry.target]
        yield _row(model, prefixes[0] + entry.source, target, entry.transform.value)
    yield ""


def _experts(model: _Model) -> Iterator[str]:
    yield "Experts are stored fused (`gate_up_proj`, gate rows first) or one by one; both become:\n"
    yield from _HEADER
    for entry in qwen.EXPERT_PROJECTIONS:
        target = model.targets["blk.0." + entry.target]
        fused = "down_proj" if entry.source == "down_proj" else "gate_up_proj"
        source = f"model.layers.i.mlp.experts.{fused}` or `….experts.e.{entry.source}.weight"
        yield _row(model, source, target, "experts stacked")
    yield ""


def _metadata(models: dict[str, _Model]) -> Iterator[str]:
    yield f"| key | type | {' | '.join(models)} |"
    yield "| --- | --- |" + " --- |" * len(models)
    all_keys = [
        {key.partition(".")[2]: value for key, value in model.target_model.hparams.items()}
        for model in models.values()
    ]
    for key in dict.fromkeys(key for hparams in all_keys for key in hparams):
        value = next(hparams[key] for hparams in all_keys if key in hparams)
        kind = f"array of {value.type.name}" if value.is_array else value.type.name
        cells = " | ".join(_shown(hparams.get(key)) for hparams in all_keys)
        yield f"| `{{arch}}.{key}` | {kind} | {cells} |"


def _vision() -> Iterator[str]:
    patches = f"`{vision.PATCHES}`, `{vision.SECOND_PATCHES}`"
    yield f"| `patch_embed.proj` | {patches} | F16 in F16 files, else F32 |"
    yield f"| `pos_embed.weight` | `{vision.POSITIONS}` | F32 |"
    names = {f"blocks.i.{s}": f"v.blk.i.{t}" for s, t in vision.BLOCK.items()} | vision.MERGER
    for source, target in names.items():
        yield f"| `{source}` | `{target}` | {'F32' if 'norm' in source else 'as requested'} |"


def _schemes() -> Iterator[str]:
    for scheme in SCHEMES:
        kinds = ", ".join(f"`{kind}`" for kind in scheme.formats) or "any"
        verb = "refused" if scheme.reader is None else "converted"
        yield f"| {scheme.name} | `{scheme.method}` | {kinds} | {verb} |"


def _tools() -> Iterator[str]:
    for row in ROWS:
        result = SAME if row.outcome == SAME else f"refused: {row.outcome}"
        yield f"| {row.tool} | {row.made} | {result} |"


def _shown(value: Value | None) -> str:
    if value is None:
        return "—"
    if not value.is_array:
        return str(value.data)
    items = [str(item).lower() for item in value.data]  # type: ignore[union-attr]
    return ", ".join(items) if len(items) <= 4 else f"{', '.join(items[:4])}, … ({len(items)})"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
