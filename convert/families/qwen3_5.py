"""Qwen3.5, 3.6 and 3.8, dense and mixture of experts: their linear attention and M-RoPE.

The GGUF side is llama.cpp's `qwen35` and `qwen35moe` (src/models/qwen35.cpp, qwen35moe.cpp), the
Hugging Face side transformers' `qwen3_5` and `qwen3_5_moe`.

If linear attention has more value heads than key heads, Hugging Face groups the value heads by key
head (repeat_interleave in Qwen3_5GatedDeltaNet.forward), while ggml cycles through the key heads
(broadcast). So value heads are reordered wherever they appear.
"""

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import LARGEST_SIZE, ConfigReader, is_whole
from . import qwen
from .qwen import Entry, QwenModel, Transform
from .target_model import HeadChoice, TargetModel

_DENSE = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
_MOE = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
ARCHITECTURES: tuple[str, ...] = _DENSE + _MOE

# Default of transformers (Qwen3_5TextRotaryEmbedding). llama.cpp requires the sections.
_DEFAULT_MROPE_SECTION = [11, 11, 10]

LINEAR_ATTENTION = (
    Entry(
        "linear_attn.in_proj_qkv.weight",
        "attn_qkv.weight",
        lambda d: (2 * d.keys + d.values, d.hidden),
        Transform.QKV_ROWS,
    ),
    Entry(
        "linear_attn.in_proj_z.weight",
        "attn_gate.weight",
        lambda d: (d.values, d.hidden),
        Transform.V_ROWS,
    ),
    Entry(
        "linear_attn.in_proj_a.weight",
        "ssm_alpha.weight",
        lambda d: (d.v_heads, d.hidden),
        Transform.HEAD_ROWS,
    ),
    Entry(
        "linear_attn.in_proj_b.weight",
        "ssm_beta.weight",
        lambda d: (d.v_heads, d.hidden),
        Transform.HEAD_ROWS,
    ),
    Entry(
        "linear_attn.conv1d.weight",
        "ssm_conv1d.weight",
        lambda d: (2 * d.keys + d.values, 1, d.conv),
        Transform.CONV,
        always_f32=True,
    ),
    Entry(
        "linear_attn.dt_bias",
        "ssm_dt.bias",
        lambda d: (d.v_heads,),
        Transform.PER_HEAD,
        always_f32=True,
    ),
    Entry("linear_attn.A_log", "ssm_a", lambda d: (d.v_heads,), Transform.DECAY, always_f32=True),
    Entry("linear_attn.norm.weight", "ssm_norm.weight", lambda d: (d.v_dim,), always_f32=True),
    Entry(
        "linear_attn.out_proj.weight",
        "ssm_out.weight",
        lambda d: (d.hidden, d.values),
        Transform.V_COLUMNS,
    ),
)


def target_model(checkpoint: Checkpoint, head: HeadChoice) -> TargetModel:
    """Name and shape of every target; CheckpointError if the checkpoint does not fit."""
    config = checkpoint.reader
    moe = config.architecture in _MOE
    dims = qwen.read_dims(config, checkpoint.mtp_layers(), moe)
    architecture = "qwen35moe" if moe else "qwen35"
    model = QwenModel(config, dims, architecture, LINEAR_ATTENTION, mrope_sections(config))
    return qwen.target_model(checkpoint, head, model)


def mrope_sections(c: ConfigReader) -> tuple[int, ...]:
    """The four sections of M-RoPE."""
    sections = c.rope().get("mrope_section", _DEFAULT_MROPE_SECTION)
    whole = isinstance(sections, list) and all(
        is_whole(n) and 0 <= n <= LARGEST_SIZE for n in sections
    )
    if not whole or len(sections) > 4:
        raise c.fault("mrope_section", "at most four whole numbers", sections)
    return (*sections, *(0 for _ in range(4 - len(sections))))
