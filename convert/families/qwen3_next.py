"""Qwen3-Next: its linear attention, and what llama.cpp expects of its experts.

The GGUF side is llama.cpp's `qwen3next` (src/models/qwen3next.cpp), the Hugging Face side
transformers' `qwen3_next`. Both pair a key head with a group of value heads, so that no heads are
reordered. Hugging Face stores the projections of a group in one matrix, group after group
(fix_query_key_value_ordering in Qwen3NextGatedDeltaNet); llama.cpp takes all queries, keys and
values in one tensor and all gates in another.
"""

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import ConfigReader
from . import qwen
from .qwen import Entry, QwenModel, Transform
from .target_model import HeadChoice, TargetModel

ARCHITECTURES: tuple[str, ...] = ("Qwen3NextForCausalLM",)

_FUSED = "linear_attn.in_proj_qkvz.weight"
LINEAR_ATTENTION = (
    Entry(
        _FUSED,
        "attn_qkv.weight",
        lambda d: (2 * (d.keys + d.values), d.hidden),
        Transform.QKV_OF_GROUPS,
    ),
    Entry(
        _FUSED,
        "attn_gate.weight",
        lambda d: (2 * (d.keys + d.values), d.hidden),
        Transform.GATES_OF_GROUPS,
    ),
    Entry("linear_attn.in_proj_ba.weight", "ssm_ba.weight", lambda d: (2 * d.v_heads, d.hidden)),
    Entry(
        "linear_attn.conv1d.weight",
        "ssm_conv1d.weight",
        lambda d: (2 * d.keys + d.values, 1, d.conv),
        Transform.SQUEEZED,
        always_f32=True,
    ),
    Entry("linear_attn.dt_bias", "ssm_dt.bias", lambda d: (d.v_heads,), always_f32=True),
    Entry(
        "linear_attn.A_log", "ssm_a", lambda d: (d.v_heads,), Transform.NEGATED_EXP, always_f32=True
    ),
    Entry("linear_attn.norm.weight", "ssm_norm.weight", lambda d: (d.v_dim,), always_f32=True),
    Entry("linear_attn.out_proj.weight", "ssm_out.weight", lambda d: (d.hidden, d.values)),
)


def target_model(checkpoint: Checkpoint, head: HeadChoice) -> TargetModel:
    """Name and shape of every target; CheckpointError if the checkpoint does not fit."""
    config = checkpoint.reader
    _check_experts(config)
    dims = qwen.read_dims(config, checkpoint.mtp_layers(), moe=True)
    model = QwenModel(config, dims, "qwen3next", LINEAR_ATTENTION)
    return qwen.target_model(checkpoint, head, model)


def _check_experts(c: ConfigReader) -> None:
    """CheckpointError for layers that llama.cpp computes otherwise than transformers."""
    if c.config.get("mlp_only_layers") not in (None, []):
        found = c.config["mlp_only_layers"]
        raise c.fault("mlp_only_layers", "[], as llama.cpp has experts in every layer", found)
    if (step := c.config.get("decoder_sparse_step", 1)) != 1:
        raise c.fault("decoder_sparse_step", "1, as llama.cpp has experts in every layer", step)
    if c.config.get("norm_topk_prob", True) is not True:
        found = c.config["norm_topk_prob"]
        raise c.fault("norm_topk_prob", "true, as llama.cpp normalizes the experts' weights", found)
