"""Which tensors make an MTP head: one row for each architecture with heads in GGUF files.

The rows follow load_arch_tensors and the MTP graph of src/models/ in the pinned llama.cpp. A test
leaves out each tensor of a small file of each architecture and asks llama.cpp whether it still
drafts (tests/gguf_tools/test_architectures.py). Rows without a graph there follow published files.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

Suffixes = tuple[str, ...]


def _weights(*names: str) -> Suffixes:
    return tuple(f"{name}.weight" for name in names)


@dataclass(frozen=True)
class NextnBlock:
    """The MTP block of an architecture.

    required: suffixes of its tensors (the parts after `blk.N.`). choices: groups of alternatives,
    of which one must be complete, such as a dense or a mixed feed-forward network. single: whether
    llama.cpp drafts with one block only. ours: whether our runtime drafts with it; the others draft
    with llama-server. in_checkpoints: whether `graft` reads it from a checkpoint, too. hybrid:
    whether it is one of the Qwen models that doctor knows as a whole, with linear attention in most
    layers. converted: whether `convert` writes whole models. graph: whether the pinned llama.cpp
    drafts with it; a newer one may. loads_whole: whether it loads a file with trunk and head.
    streams: whether hyper-connections widen the hidden state that the head reads; such models have
    a mixer in place of the last norm, and the head its own.
    """

    required: Suffixes
    choices: tuple[tuple[Suffixes, ...], ...] = ()
    single: bool = True
    ours: bool = False
    in_checkpoints: bool = False
    hybrid: bool = False
    converted: bool = False
    graph: bool = True
    loads_whole: bool = True
    streams: bool = False

    def missing(self, present: Collection[str], shared_experts: bool) -> list[str]:
        """Suffixes that a block lacks.

        present: those that it has, with the parts of fused tensors. shared_experts: whether the
        model has any.
        """
        wanted = [*self.required]
        for group in self.choices:
            wanted += min(group, key=lambda names: sum(name not in present for name in names))
        if not shared_experts:
            wanted = [name for name in wanted if name not in _SHARED]
        return [name for name in wanted if name not in present]

    @property
    def suffixes(self) -> Iterator[str]:
        """All suffixes of the row."""
        yield from self.required
        yield from (name for group in self.choices for names in group for name in names)


_CORE = _weights("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "attn_norm", "attn_output")
_QKV = _weights("attn_q", "attn_k", "attn_v")
_QK_NORMS = _weights("attn_q_norm", "attn_k_norm")
_POST_NORM = _weights("post_attention_norm")
_FFN_NORM = _weights("ffn_norm")
_DENSE = _weights("ffn_gate", "ffn_up", "ffn_down")
_EXPERTS = _weights("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_SHARED = _weights("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
_GATED_SHARED = (*_weights("ffn_gate_inp_shexp"), *_SHARED)
_GATES = _weights("ffn_gate_exps", "ffn_gate_shexp")  # of gated networks
_BIAS = ("exp_probs_b.bias",)
_LATENT = _weights("attn_kv_a_mqa", "attn_kv_a_norm")  # multi-head latent attention
_LATENT_VALUES = _weights("attn_k_b", "attn_v_b")
_LOW_RANK_Q = _weights("attn_q_a", "attn_q_a_norm", "attn_q_b")
_ANY_Q = (_weights("attn_q"), _LOW_RANK_Q)
_INDEXER = (
    *_weights("indexer.proj", "indexer.attn_k", "indexer.attn_q_b", "indexer.k_norm"),
    "indexer.k_norm.bias",
)
_STREAMS = _weights(  # hyper-connections
    *(f"hc_{place}_{part}" for place in ("attn", "ffn") for part in ("fn", "base", "scale"))
)
_MIXERS = _weights(  # low-rank hyper-connections, with the mixer that the head ends with
    *(f"hc_{p}_{part}" for p in ("attn", "ffn") for part in ("norm", "down", "up", "inject")),
    *(f"nextn.hc_head_{part}" for part in ("norm", "down", "up")),
)
_SPARSE = _weights(*(f"indexer.{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")))
_QWEN_ATTENTION = (*_CORE, *_QKV, *_QK_NORMS, *_POST_NORM)
_QWEN_MOE = (*_QWEN_ATTENTION, *_EXPERTS, *_GATED_SHARED)


def _qwen(required: Suffixes) -> NextnBlock:
    return NextnBlock(required, ours=True, in_checkpoints=True, hybrid=True, converted=True)


BLOCKS: Mapping[str, NextnBlock] = {
    "qwen35": _qwen((*_QWEN_ATTENTION, *_DENSE)),
    "qwen35moe": _qwen(_QWEN_MOE),
    "qwen3next": _qwen(_QWEN_MOE),
    "glm4moe": NextnBlock(
        (*_CORE, *_QKV, *_POST_NORM, *_EXPERTS, *_BIAS, *_SHARED), ours=True, in_checkpoints=True
    ),
    "deepseek2": NextnBlock(
        (*_CORE, *_LATENT, *_FFN_NORM, *_EXPERTS, *_SHARED),
        (_ANY_Q, (_LATENT_VALUES, _weights("attn_kv_b"))),
    ),
    "deepseek32": NextnBlock(
        (
            *(*_CORE, *_LATENT, *_LATENT_VALUES, *_LOW_RANK_Q),
            *(*_INDEXER, *_FFN_NORM, *_EXPERTS, *_SHARED),
        )
    ),
    "deepseek4": NextnBlock(
        (
            *(name for name in _CORE if name != "attn_output.weight"),
            *_weights("attn_output_a", "attn_output_b", "attn_sinks", "attn_kv", "attn_kv_a_norm"),
            *(*_LOW_RANK_Q, *_STREAMS, *_FFN_NORM, *_EXPERTS, *_BIAS, *_SHARED),
        )
    ),
    "glm-dsa": NextnBlock(
        (*_CORE, *_LATENT, *_LATENT_VALUES, *_LOW_RANK_Q, *_FFN_NORM, *_EXPERTS, *_SHARED)
    ),
    "glm5-next": NextnBlock(
        (
            *(*_CORE, *_LATENT, *_LATENT_VALUES, *_LOW_RANK_Q, *_INDEXER),
            *_weights("indexer_compressor_gate", "indexer_compressor_ape"),
            *(*_FFN_NORM, *_EXPERTS, *_BIAS, *_SHARED),
        ),
        in_checkpoints=True,
        converted=True,
        graph=False,
    ),
    "mimo2": NextnBlock(
        (*_CORE, *_weights("attn_qkv"), *_FFN_NORM, *_DENSE),
        single=False,
        in_checkpoints=True,
        converted=True,
    ),
    "step35": NextnBlock(
        (*_CORE, *_QKV, *_FFN_NORM),
        ((_DENSE, (*_EXPERTS, *_SHARED)),),
        single=False,
        ours=True,
        in_checkpoints=True,
        converted=True,
    ),
    "hy_v3": NextnBlock(
        (*_CORE, *_QKV, *_QK_NORMS, *_FFN_NORM), ((_DENSE, (*_EXPERTS, *_SHARED)),), single=False
    ),
    "nemotron_h_moe": NextnBlock(
        (
            *(*_CORE, *_QKV, *_POST_NORM, *_BIAS, *_weights("nextn.shared_head_norm")),
            *(name for name in (*_EXPERTS, *_SHARED) if name not in _GATES),
        ),
        in_checkpoints=True,
        converted=True,
    ),
    "cohere2moe": NextnBlock((*_CORE, *_QKV, *_EXPERTS, *_SHARED)),
    "bailingmoe3": NextnBlock(
        (
            *(*_CORE, *_LATENT, *_LATENT_VALUES, *_weights("attn_gate", "layer_output_norm")),
            *(*_FFN_NORM, *_EXPERTS, *_BIAS, *_SHARED),
        ),
        (_ANY_Q,),
    ),
    "qwen4exp": NextnBlock(
        (
            *(name for name in _CORE if name != "attn_norm.weight"),
            *(*_QKV, *_QK_NORMS, *_SPARSE, *_MIXERS, *_EXPERTS, *_GATED_SHARED),
        ),
        in_checkpoints=True,
        converted=True,
        graph=False,
        loads_whole=False,
        streams=True,
    ),
}
KNOWN = tuple(BLOCKS)
ARCHITECTURES = tuple(name for name, block in BLOCKS.items() if block.graph)
OUR_ARCHITECTURES = tuple(name for name, block in BLOCKS.items() if block.ours)
HYBRIDS = tuple(name for name, block in BLOCKS.items() if block.hybrid)
# Their recurrent states roll back by replay (patches/0106); those of others by snapshots.
REPLAYED = ("qwen35", "qwen35moe")

# Architectures without a NextN block that `carrier` writes as `glm4moe`.
CARRIED = ("qwen2", "qwen3", "llama")

# Fused tensors that llama.cpp accepts in place of their parts (create_tensor_qkv and
# create_tensor_gate_up_exps in llama-model.cpp). They are the concatenation of the parts' rows;
# upstream's converter writes them with --fuse-qkv and --fuse-gate-up-exps.
FUSED_SUFFIXES: Mapping[str, Suffixes] = {
    "attn_qkv.weight": _QKV,
    "ffn_gate_up_exps.weight": _weights("ffn_gate_exps", "ffn_up_exps"),
}
