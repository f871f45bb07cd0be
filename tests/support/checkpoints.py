"""Tiny Qwen3.5 checkpoints with random weights, the same bytes on every machine.

`write_checkpoint(folder, spec)` writes what a download from the hub leaves: config, safetensors
(whole or in shards), tokenizer, generation config, chat template. A `Spec` says which of the
layouts seen in the wild it takes; `SPECS` names the ones the goldens are made for.

Weights are drawn under their plainest names (flat, one tensor per expert) from a stream of their
own, seeded by (spec.seed, name), and only then renamed, fused, cast and spread over shards: two
specs that differ in layout alone hold the same model.

Nothing here calls a function whose last bit depends on the platform (no exp, no log, no normal
distribution of NumPy): only integers, products, quotients and roundings, all fixed by IEEE 754,
and PCG64's raw words, whose stream NEP 19 promises to keep.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from support.quantized_layouts import LAYOUTS

Array = NDArray[Any]
F32 = NDArray[np.float32]
DType = Literal["BF16", "F16", "F32", "F8_E4M3", "U8", "I8", "I32", "I64"]

FP8_BLOCK = 128
FP8_MAX = 448.0

NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


@dataclass(frozen=True)
class Spec:
    """One tiny checkpoint: its shape, and how it is laid out in files.

    Lengths count elements. `experts == 0` means a dense feed-forward network. A linear-attention
    layer has `k_heads` query and key heads and `v_heads` value heads, all `linear_dim` wide (one
    width, because llama.cpp loads no other).
    """

    name: str
    seed: int = 1
    family: Literal["qwen3_5", "qwen3_next"] = "qwen3_5"

    hidden: int = 256
    intermediate: int = 256
    layers: int = 4
    interval: int = 4  # one full-attention layer in so many
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    k_heads: int = 2
    v_heads: int = 4
    linear_dim: int = 64
    conv_kernel: int = 4
    vocab_size: int = 1024
    tied: bool = False
    stored_head: bool = False  # tied, and `lm_head.weight` is stored nevertheless
    mtp: bool = True

    experts: int = 0
    experts_per_token: int = 2
    fused_experts: bool = True  # of the trunk
    fused_mtp_experts: bool = False

    nested: bool = False  # text_config inside, `model.language_model.` names, a vision tower
    layer_types: bool = True  # False: full_attention_interval alone
    mtp_prefix: str = "mtp."  # or "model.mtp.", as some trainers save it
    rope: Literal["parameters", "plain", "yarn"] = (
        "parameters"  # plain: keys as before rope_parameters
    )
    dtype: DType = "BF16"
    state_dtype: DType = "F32"  # of A_log and linear_attn.norm (mamba_ssm_dtype)
    fp8: bool = False
    layout: str = ""  # of the matrices: a key of quantized_layouts.LAYOUTS
    shards: int = 1
    jinja_file: bool = True  # False: the chat template stands in tokenizer_config.json
    merge_pairs: bool = True  # False: merges as "a b", as tokenizers wrote them before 0.20
    model_card: bool = False
    repeated: bool = False  # matrices repeat the same values, which takes a tenth of the time

    def __str__(self) -> str:
        return self.name  # in the names of tests

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        if self.family == "qwen3_next":
            return "qwen3next"
        return "qwen35moe" if self.experts else "qwen35"

    @property
    def keeps_blocks(self) -> bool:
        """Whether the layout's blocks go into a GGUF as they are."""
        return bool(self.layout) and LAYOUTS[self.layout].kept

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def key_dim(self) -> int:
        return self.k_heads * self.linear_dim

    @property
    def value_dim(self) -> int:
        return self.v_heads * self.linear_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @property
    def rope_dim(self) -> int:
        return self.head_dim // 4

    def is_full(self, layer: int) -> bool:
        """Say whether a trunk layer is full attention (the last of each interval)."""
        return (layer + 1) % self.interval == 0


_ALL = (
    # The dense family as published: 0.8B (tied, as many V heads as K heads) and 9B (untied).
    Spec("dense-tied", v_heads=2, linear_dim=128, tied=True, nested=True, model_card=True),
    Spec("dense-untied", intermediate=512, nested=True, shards=3, layer_types=False),
    # Three V heads per K head: the reorder from grouped to tiled is no involution (as in 27B).
    Spec("dense-3v", v_heads=6, linear_dim=128, tied=True, jinja_file=False),
    # Enough layers for the mixes that give first, last and every third layer more bits, and four
    # query heads per KV head, which IQ4 mixes ask for. The state is kept in BF16.
    Spec("dense-deep", layers=8, kv_heads=1, merge_pairs=False, state_dtype="BF16"),
    Spec("dense-f16", layers=3, interval=3, dtype="F16", state_dtype="F16"),
    Spec("dense-f32", layers=3, interval=3, dtype="F32", layer_types=False),
    # Rows of 416 and 192 (no multiple of 256, but of 32) and of 144 (of neither).
    Spec(
        "dense-ragged",
        intermediate=416,
        heads=3,
        kv_heads=3,
        head_dim=48,
        v_heads=6,
        linear_dim=32,
        rope="plain",
    ),
    # KV rows fill half of an FP8 block.
    Spec("dense-fp8", kv_heads=1, nested=True, fp8=True),
    Spec("dense-no-mtp", mtp=False),
    # A name that upstream's heuristics take apart, and habits of fine-tuned checkpoints.
    Spec(
        "Qwen3.5-1.5M-Chat-v1.1",
        layers=2,
        interval=2,
        tied=True,
        stored_head=True,
        mtp_prefix="model.mtp.",
        rope="yarn",
    ),
    # Eight experts are special to some mixes; others are not. Expert rows of 128 and 64 elements
    # fall back to blocks of 32, rows of 256 do not.
    Spec(
        "moe-fused",
        layers=2,
        interval=2,
        intermediate=128,
        experts=8,
        fused_mtp_experts=True,
        layer_types=False,
    ),
    Spec("moe-unfused", layers=2, interval=2, experts=4, fused_experts=False, tied=True),
    Spec(
        "moe-mixed",
        layers=3,
        interval=3,
        intermediate=64,
        experts=16,
        experts_per_token=4,
        nested=True,
        shards=4,
    ),
    Spec(
        "moe-fp8",
        layers=2,
        interval=2,
        experts=4,
        fused_experts=False,
        nested=True,
        fp8=True,
        shards=2,
    ),
    # Qwen3-Next as published, its experts one by one, and as transformers saves it.
    Spec(
        "next-unfused",
        family="qwen3_next",
        experts=8,
        fused_experts=False,
        layer_types=False,
        rope="plain",
    ),
    Spec(
        "next-fused",
        family="qwen3_next",
        layers=2,
        interval=2,
        intermediate=128,
        v_heads=6,
        linear_dim=32,
        experts=4,
        fused_mtp_experts=True,
        tied=True,
        dtype="F16",
        state_dtype="F16",
    ),
    Spec(
        "next-fp8",
        family="qwen3_next",
        layers=2,
        interval=2,
        experts=4,
        fused_experts=False,
        rope="plain",
        fp8=True,
        shards=2,
    ),
    # One for each further way to store matrices in fewer bits. Three V heads per K head move
    # columns; heads of 32 put two groups of NVFP4 side by side.
    *(
        Spec(
            f"quantized-{layout}",
            layers=2,
            interval=2,
            kv_heads=1,
            v_heads=6,
            linear_dim=32,
            nested=i % 2 == 0,
            dtype="F16" if layout.startswith("gptq") else "BF16",
            layout=layout,
        )
        for i, layout in enumerate(LAYOUTS)
    ),
    Spec(
        "quantized-moe-modelopt-nvfp4",
        layers=2,
        interval=2,
        experts=4,
        fused_experts=False,
        nested=True,
        layout="modelopt-nvfp4",
    ),
    Spec(
        "quantized-moe-gptq-4",
        layers=2,
        interval=2,
        experts=4,
        fused_experts=False,
        layout="gptq-4",
    ),
)
SPECS: dict[str, Spec] = {spec.name: spec for spec in _ALL}


# ---------------------------------------------------------------------------- weights

STREAM = 8_388_593  # values; a prime, so that no two rows of a matrix are the same


def _uniform(name: str, seed: int, n: int) -> F32:
    """Give n values in [-1, 1), a multiple of 2**-15 each, from the stream of this name."""
    words = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw((n + 3) // 4)
    halves = words.astype("<u8").view("<u2")[:n]
    values: F32 = (halves.astype(np.float32) - np.float32(32768.0)) / np.float32(32768.0)
    return values


def _bell(name: str, shape: tuple[int, ...], seed: int, std: float) -> F32:
    """Draw a near-normal tensor whose rows differ in scale (by 1, 1.5 or 2.25) and have outliers.

    A sum of four uniforms has a variance of 4/3; x + x**3/8 gives it tails. Row scales and tails
    are what makes the search of the k-quants and an imatrix matter.
    """
    rows = _tailed(name, seed, int(np.prod(shape))).reshape(-1, shape[-1])
    steps = np.arange(len(rows), dtype=np.uint32) % np.uint32(3)
    scale = np.array([1.0, 1.5, 2.25], np.float32)[steps][:, None]
    out: F32 = (rows * scale * np.float32(std / 2.5)).reshape(shape)
    return out


def _tailed(name: str, seed: int, n: int) -> F32:
    """The n values of `_bell` before rows are scaled."""
    x: F32 = _uniform(name, seed, 4 * n).reshape(4, n).sum(axis=0, dtype=np.float32)
    return x + x * x * x * np.float32(0.125)


@lru_cache
def _stream() -> F32:
    return _tailed("stream", 1, STREAM)


def _part(name: str, shape: tuple[int, ...], std: float) -> F32:
    """Values of one stream, from a place that the name decides on, and again if it ends."""
    n = int(np.prod(shape))
    start = zlib.crc32(name.encode()) % (STREAM - n) if n < STREAM else 0
    part = _stream()[start : start + n] * np.float32(std / 2.5)
    return np.resize(part, shape)


def weights(spec: Spec) -> Iterator[tuple[str, F32]]:
    """Yield every tensor of the text model in float32 under its plain name and HF shape.

    Matrices are scaled to keep activations near 1, so that logits differ and no layer dominates.
    Norm weights lie around 0 (HF adds 1), the gated norm of linear attention around 1.
    """
    h, f = spec.hidden, spec.intermediate

    def matrix(name: str, *shape: int) -> tuple[str, F32]:
        std: float = shape[-1] ** -0.5
        return name, _part(name, shape, std) if spec.repeated else _bell(
            name, shape, spec.seed, std
        )

    def norm(name: str, n: int, centre: float = 0.0) -> tuple[str, F32]:
        return name, np.float32(centre) + np.float32(0.25) * _uniform(name, spec.seed, n)

    def attention(prefix: str) -> Iterator[tuple[str, F32]]:
        yield matrix(f"{prefix}.q_proj.weight", 2 * spec.q_dim, h)  # query and gate, per head
        yield matrix(f"{prefix}.k_proj.weight", spec.kv_dim, h)
        yield matrix(f"{prefix}.v_proj.weight", spec.kv_dim, h)
        yield matrix(f"{prefix}.o_proj.weight", h, spec.q_dim)
        yield norm(f"{prefix}.q_norm.weight", spec.head_dim)
        yield norm(f"{prefix}.k_norm.weight", spec.head_dim)

    def linear_attention(prefix: str) -> Iterator[tuple[str, F32]]:
        if spec.family == "qwen3_next":
            yield matrix(f"{prefix}.in_proj_qkvz.weight", spec.conv_dim + spec.value_dim, h)
            yield matrix(f"{prefix}.in_proj_ba.weight", 2 * spec.v_heads, h)
        else:
            yield matrix(f"{prefix}.in_proj_qkv.weight", spec.conv_dim, h)
            yield matrix(f"{prefix}.in_proj_z.weight", spec.value_dim, h)
            yield matrix(f"{prefix}.in_proj_a.weight", spec.v_heads, h)
            yield matrix(f"{prefix}.in_proj_b.weight", spec.v_heads, h)
        yield matrix(f"{prefix}.out_proj.weight", h, spec.value_dim)
        yield matrix(f"{prefix}.conv1d.weight", spec.conv_dim, 1, spec.conv_kernel)
        name = f"{prefix}.A_log"  # log of a decay rate between 0.02 and 16, as it is initialised
        yield name, np.float32(-0.5) + np.float32(3.25) * _uniform(name, spec.seed, spec.v_heads)
        yield norm(f"{prefix}.dt_bias", spec.v_heads, 1.0)
        yield norm(f"{prefix}.norm.weight", spec.linear_dim, 1.0)

    def feed_forward(prefix: str) -> Iterator[tuple[str, F32]]:
        yield matrix(f"{prefix}.gate_proj.weight", f, h)
        yield matrix(f"{prefix}.up_proj.weight", f, h)
        yield matrix(f"{prefix}.down_proj.weight", h, f)

    def block(prefix: str, full: bool) -> Iterator[tuple[str, F32]]:
        yield norm(f"{prefix}.input_layernorm.weight", h)
        yield norm(f"{prefix}.post_attention_layernorm.weight", h)
        if full:
            yield from attention(f"{prefix}.self_attn")
        else:
            yield from linear_attention(f"{prefix}.linear_attn")
        if not spec.experts:
            yield from feed_forward(f"{prefix}.mlp")
            return
        yield matrix(f"{prefix}.mlp.gate.weight", spec.experts, h)
        yield matrix(f"{prefix}.mlp.shared_expert_gate.weight", 1, h)
        yield from feed_forward(f"{prefix}.mlp.shared_expert")
        for e in range(spec.experts):
            yield from feed_forward(f"{prefix}.mlp.experts.{e}")

    yield matrix("model.embed_tokens.weight", spec.vocab_size, h)
    for layer in range(spec.layers):
        yield from block(f"model.layers.{layer}", spec.is_full(layer))
    yield norm("model.norm.weight", h)
    if not spec.tied or spec.stored_head:
        yield matrix("lm_head.weight", spec.vocab_size, h)
    if spec.mtp:
        yield matrix("mtp.fc.weight", h, 2 * h)
        yield norm("mtp.pre_fc_norm_embedding.weight", h)
        yield norm("mtp.pre_fc_norm_hidden.weight", h)
        yield from block("mtp.layers.0", full=True)
        yield norm("mtp.norm.weight", h)


def _visual(spec: Spec) -> Iterator[tuple[str, F32]]:
    """Yield a stub of the vision tower: names and ranks as published, sizes not."""
    for name, shape in (
        ("patch_embed.proj.weight", (8, 3, 2, 4, 4)),
        ("patch_embed.proj.bias", (8,)),
        ("pos_embed.weight", (16, 8)),
        ("blocks.0.norm1.weight", (8,)),
        ("blocks.0.attn.qkv.weight", (24, 8)),
        ("blocks.0.mlp.linear_fc1.weight", (16, 8)),
        ("merger.norm.weight", (8,)),
        ("merger.linear_fc2.weight", (spec.hidden, 32)),
    ):
        yield f"model.visual.{name}", _bell(name, shape, spec.seed, 0.1)


# ----------------------------------------------------------------------------- layout


def _fuse(spec: Spec, tensors: Iterator[tuple[str, F32]]) -> Iterator[tuple[str, F32]]:
    """Stack the experts of a layer where the spec wants it: gate above up, down by itself.

    Gives `experts.gate_up_proj` [expert, 2 * intermediate, hidden] and `experts.down_proj`
    [expert, hidden, intermediate], without `.weight`, as transformers names its parameters.
    """
    waiting: dict[str, dict[str, list[F32]]] = {}
    for name, array in tensors:
        prefix, found, rest = name.partition(".experts.")
        fused = spec.fused_mtp_experts if name.startswith("mtp.") else spec.fused_experts
        if not (found and fused):
            yield name, array
            continue
        kind = rest.split(".")[1]
        parts = waiting.setdefault(prefix, {"gate_proj": [], "up_proj": [], "down_proj": []})
        parts[kind].append(array)
        if kind == "down_proj" and len(parts[kind]) == spec.experts:
            gate_up = [np.stack(parts["gate_proj"]), np.stack(parts["up_proj"])]
            yield f"{prefix}.experts.gate_up_proj", np.concatenate(gate_up, axis=1)
            yield f"{prefix}.experts.down_proj", np.stack(parts["down_proj"])


def _stored_name(spec: Spec, name: str) -> str:
    if name.startswith("mtp."):
        return spec.mtp_prefix + name.removeprefix("mtp.")
    if spec.nested and name.startswith("model.") and not name.startswith("model.visual."):
        return "model.language_model." + name.removeprefix("model.")
    return name


def keeps_precision(name: str) -> bool:
    """Say whether an FP8 checkpoint leaves this tensor in 16 bits.

    As in the official Qwen3.5 FP8 checkpoints: embeddings, head, norms, convolutions, the two
    narrow projections of linear attention, routers, the MTP block's `fc`, the vision tower.
    """
    return not name.endswith("_proj.weight") and not name.endswith(
        (".in_proj_qkv.weight", ".in_proj_z.weight", ".in_proj_qkvz.weight")
    )


def stores_in_fewer_bits(spec: Spec, name: str) -> bool:
    """Say whether the spec's layout is for this matrix."""
    if not spec.layout or keeps_precision(name) or name.startswith("model.visual."):
        return False
    return LAYOUTS[spec.layout].head or not name.startswith("mtp.")


def _stored_dtype(spec: Spec, name: str) -> DType:
    if name.endswith((".A_log", ".linear_attn.norm.weight")):
        return spec.state_dtype
    if spec.fp8 and not name.startswith("model.visual.") and not keeps_precision(name):
        return "F8_E4M3"
    return spec.dtype


def fp8_blocks(weight: F32) -> tuple[Array, Array]:
    """Quantize [rows, cols] to float8 with one BF16 factor per block of 128 x 128.

    Returns (weight [rows, cols] float8_e4m3fn, weight_scale_inv [ceil(rows / 128),
    ceil(cols / 128)] bfloat16); the value is weight * weight_scale_inv of its block.
    """
    rows, cols = weight.shape
    grid = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    padded = np.zeros((grid[0] * FP8_BLOCK, grid[1] * FP8_BLOCK), np.float32)
    padded[:rows, :cols] = weight
    blocks = padded.reshape(grid[0], FP8_BLOCK, grid[1], FP8_BLOCK)
    largest = np.abs(blocks).max(axis=(1, 3))
    scale = (largest / np.float32(FP8_MAX)).astype(ml_dtypes.bfloat16)
    scaled = blocks / scale.astype(np.float32)[:, None, :, None]
    values = scaled.clip(-FP8_MAX, FP8_MAX).reshape(padded.shape)[:rows, :cols]
    return values.astype(ml_dtypes.float8_e4m3fn), scale


def stored_tensors(spec: Spec) -> Iterator[tuple[str, Array]]:
    """Yield every tensor as the checkpoint's files hold it: name, dtype, shape, values."""
    for plain, array in _fuse(spec, weights(spec)):
        name, dtype = _stored_name(spec, plain), _stored_dtype(spec, plain)
        if stores_in_fewer_bits(spec, plain):
            module = name.removesuffix(".weight")
            for suffix, part in LAYOUTS[spec.layout].store(array).items():
                yield module + suffix, part
        elif dtype == "F8_E4M3":
            weight, scale = fp8_blocks(array)
            yield name, weight
            yield name + "_scale_inv", scale
        else:
            yield name, array.astype(NUMPY_DTYPES[dtype])
    if spec.nested:
        for name, array in _visual(spec):
            yield name, array.astype(NUMPY_DTYPES[spec.dtype])


def safetensors_header(tensors: dict[str, Array]) -> bytes:
    """Give what precedes the tensors in a safetensors file: u64 length and JSON."""
    names = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_safetensors(path: Path, tensors: dict[str, Array]) -> None:
    """Write one safetensors file: the header, the tensors back to back."""
    with path.open("wb") as f:
        f.write(safetensors_header(tensors))
        for array in tensors.values():
            np.ascontiguousarray(array).tofile(f)


def _write_shards(folder: Path, tensors: dict[str, Array], shards: int) -> None:
    """Cut the tensors, sorted by name, into shards of about equal size, with their index."""
    total = sum(array.nbytes for array in tensors.values())
    parts: list[dict[str, Array]] = [{} for _ in range(shards)]
    done = 0
    for name in sorted(tensors):
        parts[min(done * shards // total, shards - 1)][name] = tensors[name]
        done += tensors[name].nbytes
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


# -------------------------------------------------------------------------- tokenizer

# The split of the Qwen3.5 tokenizer.json (quoted in llama.cpp's src/llama-vocab.cpp, pre-tokenizer
# "qwen35"): letters take their marks along, digits stand alone.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# (text, special), in the order of the real family. The fim tokens are not marked as special there
# either; llama.cpp takes them for control tokens by their look.
ADDED_TOKENS: tuple[tuple[str, bool], ...] = (
    *((f"<|{name}|>", True) for name in ("endoftext", "im_start", "im_end", "object_ref_start")),
    *((f"<|{name}|>", True) for name in ("object_ref_end", "box_start", "box_end", "quad_start")),
    *((f"<|{name}|>", True) for name in ("quad_end", "vision_start", "vision_end", "vision_pad")),
    *((f"<|{name}|>", True) for name in ("image_pad", "video_pad")),
    ("<tool_call>", False),
    ("</tool_call>", False),
    *((f"<|{name}|>", False) for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad")),
    *((f"<|{name}|>", False) for name in ("repo_name", "file_sep")),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)

MERGES = 640

TRAINING_TEXT = """
The draft head reads the hidden state of the last token and guesses the next one; the trunk then
verifies the guesses in one batch, keeps the longest prefix that it agrees with, and adds a token
of its own. When the guesses are right the model writes several tokens for the price of one. When
they are wrong, nothing is lost but a little work, because the trunk has the last word anyway.
A converter takes the tensors of a checkpoint, gives them the names that the runtime expects, and
stores them in fewer bits. It must not lose a tensor, it must not change an order of rows unless
the kernels ask for it, and it must say what it did. Whoever reads the file later should find the
shapes, the types and the vocabulary in it, and need nothing else.
def read_header(path: str, limit: int = 1024) -> dict[str, int]:
    \"\"\"Return the offsets of all tensors, or raise if the file is shorter than it claims.\"\"\"
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > limit:
            raise ValueError(f"header of {length} bytes is longer than {limit}")
        return {name: entry["offset"] for name, entry in json.loads(file.read(length)).items()}

for (int i = 0; i < n_tokens; ++i) {
    const float * row = logits + i * n_vocab;
    batch.add(argmax(row, n_vocab), pos + i, /* output = */ true);
}
I've said it's simple; they'd say we're late, but you'll see that I'm right and it doesn't matter.
In 2024 and 2025 there were 365 + 365 = 730 days, 3.14159 is not 22/7, and 1e-6 is 0.000001.
Die Übersetzung großer Wörter kostet Mühe. Où est la bibliothèque ? El niño comió una manzana.
Быстрая проверка черновика экономит время. 模型先写草稿，再由主干验证。今天天气很好，我们去公园吧。
速いモデルは正しいモデルでなければならない。 빠른 초안은 검증을 거쳐야 한다.
हिन्दी में लिखा हुआ पाठ। ไทย
🙂🚀 → ∑ x² ≤ √n … “quoted” — and\ttabs,\t\ttoo.
"""


def byte_symbols() -> dict[int, str]:
    """Map each byte to its visible stand-in, in vocabulary order, as GPT-2's BPE defined it.

    Printable bytes of Latin-1 stand for themselves and come first; the others take the code
    points from 256 on (https://github.com/openai/gpt-2, src/encoder.py, bytes_to_unicode).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(256)) - set(printable))
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


@lru_cache
def train_merges(n: int = MERGES) -> tuple[tuple[str, str], ...]:
    """Learn n merges from TRAINING_TEXT: the commonest pair first, of equals the smaller one."""
    symbol = byte_symbols()
    pieces = Split(Regex(SPLIT), "isolated").pre_tokenize_str(TRAINING_TEXT)
    count = Counter("".join(symbol[b] for b in piece.encode()) for piece, _ in pieces)
    words = [(list(word), times) for word, times in count.items()]
    merges: list[tuple[str, str]] = []
    for _ in range(n):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words:
            for pair in pairwise(word):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word, _times in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    return tuple(merges)


def _added(first: int) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": first + i, "content": text, **flags, "special": special}
        for i, (text, special) in enumerate(ADDED_TOKENS)
    ]


def token_id(text: str) -> int:
    """Look up the id of an added token."""
    return 256 + MERGES + [t for t, _ in ADDED_TOKENS].index(text)


def tokenizer_json(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    added: list[dict[str, Any]],
    *,
    merge_pairs: bool = True,
) -> dict[str, Any]:
    """Build the tokenizer.json of a byte-level BPE that splits as Qwen3.5 does."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {**byte_level, "use_regex": False}],
        },
        "post_processor": {**byte_level, "use_regex": False},
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(m) for m in merges] if merge_pairs else [" ".join(m) for m in merges],
        },
    }


CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)

MODEL_CARD = """---
license: apache-2.0
license_link: https://example.org/LICENSE
library_name: transformers
pipeline_tag: text-generation
base_model:
- example/Tiny-Base
language:
- en
---

# A tiny model for tests
"""


def write_tokenizer(folder: Path, tokenizer: dict[str, Any], *, jinja_file: bool = True) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template (in either place)."""
    _write_json(folder / "tokenizer.json", tokenizer)
    added = tokenizer["added_tokens"]
    config: dict[str, Any] = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "TokenizersBackend",
        "unk_token": None,
    }
    if jinja_file:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    else:
        config["chat_template"] = CHAT_TEMPLATE
    _write_json(folder / "tokenizer_config.json", config)


# ---------------------------------------------------------------------------- configs


def _rope_keys(spec: Spec) -> dict[str, Any]:
    base: dict[str, Any] = {"partial_rotary_factor": 0.25, "rope_theta": 10000000}
    if spec.rope == "plain":
        return {**base, "rope_scaling": None}
    pairs = spec.rope_dim // 2
    third = -(-pairs // 3)
    sections = [third, third, pairs - 2 * third]
    multi = {"mrope_interleaved": True, "mrope_section": sections}
    rope = {**base, **(multi if spec.family == "qwen3_5" else {}), "rope_type": "default"}
    if spec.rope == "yarn":
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
    return {"rope_parameters": rope}


# The last two: Qwen3-Next's config says nothing of its head.
_NOT_IN_QWEN3_NEXT = (
    *("attn_output_gate", "mamba_ssm_dtype", "output_gate_type"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
)


def text_config(spec: Spec) -> dict[str, Any]:
    """Build the config of the text model, with the keys that published checkpoints have."""
    kinds = [
        "full_attention" if spec.is_full(i) else "linear_attention" for i in range(spec.layers)
    ]
    config: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": {"BF16": "bfloat16", "F16": "float16"}.get(spec.dtype, "float32"),
        "eos_token_id": token_id("<|endoftext|>"),
        "full_attention_interval": spec.interval,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "initializer_range": 0.02,
        "linear_conv_kernel_dim": spec.conv_kernel,
        "linear_key_head_dim": spec.linear_dim,
        "linear_num_key_heads": spec.k_heads,
        "linear_num_value_heads": spec.v_heads,
        "linear_value_head_dim": spec.linear_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text" if spec.experts else "qwen3_5_text",
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "output_gate_type": "swish",
        "rms_norm_eps": 1e-06,
        **_rope_keys(spec),
        "tie_word_embeddings": spec.tied,
        "use_cache": True,
        "vocab_size": spec.vocab_size,
    }
    if spec.layer_types:
        config["layer_types"] = kinds
    if spec.mtp:
        config |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    if spec.experts:
        config |= {
            "moe_intermediate_size": spec.intermediate,
            "num_experts": spec.experts,
            "num_experts_per_tok": spec.experts_per_token,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": spec.intermediate,
        }
    else:
        config["intermediate_size"] = spec.intermediate
    if spec.family == "qwen3_next":
        for key in _NOT_IN_QWEN3_NEXT:
            config.pop(key, None)
        config |= {
            "decoder_sparse_step": 1,
            "intermediate_size": spec.intermediate,
            "mlp_only_layers": [],
            "model_type": "qwen3_next",
            "norm_topk_prob": True,
        }
    return config


def config_json(spec: Spec) -> dict[str, Any]:
    """Build config.json: flat, or with the text model's part under `text_config`."""
    text = text_config(spec)
    if spec.family == "qwen3_next":
        family = "Qwen3Next"
    else:
        family = "Qwen3_5Moe" if spec.experts else "Qwen3_5"
    config: dict[str, Any]
    if spec.nested:
        config = {
            "architectures": [f"{family}ForConditionalGeneration"],
            "image_token_id": token_id("<|image_pad|>"),
            "model_type": "qwen3_5_moe" if spec.experts else "qwen3_5",
            "text_config": text,
            "tie_word_embeddings": spec.tied,
            "video_token_id": token_id("<|video_pad|>"),
            "vision_config": {
                "depth": 1,
                "hidden_size": 8,
                "model_type": "qwen3_5_moe" if spec.experts else "qwen3_5",
                "num_heads": 2,
                "out_hidden_size": spec.hidden,
            },
            "vision_end_token_id": token_id("<|vision_end|>"),
            "vision_start_token_id": token_id("<|vision_start|>"),
        }
    else:
        config = {"architectures": [f"{family}ForCausalLM"], **text}
    if spec.fp8:
        kept = [name for name, _ in stored_tensors(spec) if name.endswith(".weight")]
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": [
                name.removesuffix(".weight")
                for name in kept
                if "norm" not in name and (keeps_precision(name) or ".visual." in name)
            ],
            "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    if spec.layout and LAYOUTS[spec.layout].config:
        config["quantization_config"] = LAYOUTS[spec.layout].config
    return {**config, "transformers_version": "5.2.0"}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def write_checkpoint(folder: Path, spec: Spec) -> Path:
    """Write a checkpoint into a new folder (parents are made) and return the folder.

    Upstream takes `general.name` from the folder's name, so the goldens were made from folders
    called `spec.name`.
    """
    folder.mkdir(parents=True)
    tensors = dict(stored_tensors(spec))
    if spec.shards > 1:
        _write_shards(folder, tensors, spec.shards)
    else:
        write_safetensors(folder / "model.safetensors", dict(sorted(tensors.items())))

    merges = list(train_merges())
    tokens = [*byte_symbols().values(), *("".join(merge) for merge in merges)]
    added = _added(len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizer_json(vocab, merges, added, merge_pairs=spec.merge_pairs)
    write_tokenizer(folder, tokenizer, jinja_file=spec.jinja_file)

    _write_json(folder / "config.json", config_json(spec))
    if spec.layout and LAYOUTS[spec.layout].beside:
        _write_json(folder / "hf_quant_config.json", LAYOUTS[spec.layout].beside)
    generation = {
        "bos_token_id": token_id("<|endoftext|>"),
        "do_sample": True,
        "eos_token_id": [token_id("<|im_end|>"), token_id("<|endoftext|>")],
        "pad_token_id": token_id("<|endoftext|>"),
        "repetition_penalty": 1.05,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    _write_json(folder / "generation_config.json", generation)
    if spec.model_card:
        (folder / "README.md").write_text(MODEL_CARD, encoding="utf-8")
    return folder


# The smallest model with all kinds of layers; only blocks of 32 divide its rows of 64 and 96.
TINY = Spec(
    "tiny",
    hidden=64,
    intermediate=96,
    layers=2,
    interval=2,
    heads=2,
    kv_heads=1,
    head_dim=32,
    k_heads=1,
    v_heads=2,
    linear_dim=32,
)
# The same with rows that blocks of 256 divide, for what is about types.
SMALL = Spec("small", layers=2, interval=2, kv_heads=1)

# For large vocabularies: little else.
NARROW = replace(
    SPECS["dense-tied"],
    name="narrow",
    tied=False,
    nested=False,
    model_card=False,
    hidden=64,
    intermediate=64,
    layers=2,
    interval=2,
    dtype="F16",
)

# Dense, MoE and Qwen3-Next, tied and not, rows that blocks do not divide, more value heads than key
# heads.
COVERED = [
    SPECS[name]
    for name in (
        "dense-tied",
        "dense-untied",
        "dense-3v",
        "dense-ragged",
        "moe-fused",
        "moe-unfused",
        "moe-mixed",
        "next-unfused",
    )
]
DENSE, MOE = SPECS["dense-3v"], SPECS["moe-mixed"]
