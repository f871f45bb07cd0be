"""The vision tower of Qwen3.5: names, shapes and metadata of the mmproj file.

The GGUF side is llama.cpp's `clip` with the projector `qwen3vl_merger` (clip.cpp and
models/qwen3vl.cpp in its tools/mtmd), the Hugging Face side transformers' `Qwen3_5VisionModel`.
Keys, types and the order of both are those of `convert_hf_to_gguf.py --mmproj`, so that the files
have the same bytes.

Tensors are copied as they are, with one exception: the kernel of the patch embedding spans two
frames of a video, and llama.cpp convolves each of them with a tensor of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.files.format import Value
from mtp_gguf.gguf_tools.machine.text import first_of
from mtp_gguf.gguf_tools.vision import (
    ARCHITECTURE,
    BLOCK,
    MERGER,
    PATCH_BIAS,
    PATCHES,
    POSITIONS,
    PROJECTOR,
    SECOND_PATCHES,
)

from ..checkpoints.checkpoint import Checkpoint, canonical_name, is_vision
from ..checkpoints.config import LARGEST_F32, ConfigReader, is_whole
from ..checkpoints.json_files import read_json_object
from ..checkpoints.quantized import check_schemes, weights_of
from ..plans.recipe import Recipe, Target
from .target_model import typed

_FRAMES = 2  # temporal_patch_size, of which llama.cpp supports this one alone
_CHANNELS = 3
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
)  # the last takes precedence


@dataclass(frozen=True)
class Dims:
    """The sizes in `vision_config`.

    out: width of the language model. merge: number of patches along each side of a token.
    """

    depth: int
    width: int
    ffn: int
    heads: int
    out: int
    patch: int
    positions: int
    merge: int


@dataclass(frozen=True, eq=False)
class Tower:
    """The vision tower of a checkpoint: the architecture's metadata, and its tensors."""

    hparams: dict[str, Value]
    targets: tuple[Target, ...]
    architecture: str = ARCHITECTURE


def vision_tower(checkpoint: Checkpoint) -> Tower:
    """Name and shape of every tensor of the tower, in the order of the checkpoint.

    CheckpointError if there is no tower, if config and tensors contradict each other, or if the
    tower has parts that llama.cpp does not know.
    """
    where = str(checkpoint.folder / "config.json")
    config = checkpoint.config.get("vision_config")
    placed = {name: t for name, t in checkpoint.tensors.items() if is_vision(name)}
    if config is None or not placed:
        lacks = "vision_config" if config is None else "model.visual.* tensors"
        raise CheckpointError(
            f"{checkpoint.folder}: --mmproj: expected a vision tower, found no {lacks}; many "
            "fine-tunes leave it out, and the mmproj file of the original model fits them"
        )
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: vision_config: expected an object, found {config!r:.80}")
    text = ConfigReader(where, checkpoint.config)
    vision = ConfigReader(f"{where}: vision_config", config)
    dims = _read_dims(vision, text)
    check_schemes(placed.values())
    weights = weights_of(placed)
    wanted = {name: (shape, recipe) for name, shape, recipe in _sources(dims)}
    targets: list[Target] = []
    for name, weight in weights.by_name.items():
        suffix = canonical_name(name).partition("visual.")[2]
        if suffix not in wanted:
            raise CheckpointError(
                f"{weight.where}: {name} is not part of this vision tower; this kind of tower is "
                "not supported"
            )
        shape, made = wanted.pop(suffix)
        if weight.shape != shape:
            raise CheckpointError(
                f"{weight.where}: {name}: expected shape {list(shape)} by the config, found "
                f"{list(weight.shape)}"
            )
        targets += [replace(t, recipe=replace(t.recipe, sources=(name,))) for t in made]
    if wanted:
        raise CheckpointError(
            f"{checkpoint.folder}: the vision tower is incomplete: {first_of([*wanted])} missing"
        )
    return Tower(_hparams(dims, text, checkpoint.folder), tuple(targets))


def _read_dims(c: ConfigReader, text: ConfigReader) -> Dims:
    """The sizes of the config, with the defaults of transformers' Qwen3_5VisionConfig."""
    dims = Dims(
        depth=c.size("depth", 27),
        width=c.size("hidden_size", 1152),
        ffn=c.size("intermediate_size", 4304),
        heads=c.size("num_heads", 16),
        out=c.size("out_hidden_size", 3584),
        patch=c.size("patch_size", 16),
        positions=c.size("num_position_embeddings", 2304),
        merge=c.size("spatial_merge_size", 2),
    )
    for key, only in (("temporal_patch_size", _FRAMES), ("in_channels", _CHANNELS)):
        if (found := c.size(key, only)) != only:
            raise c.fault(key, f"{only}, as llama.cpp supports it", found)
    if dims.width % dims.heads:
        raise c.fault("hidden_size", f"a multiple of num_heads ({dims.heads})", dims.width)
    if dims.out != (width := text.size("hidden_size")):
        raise c.fault("out_hidden_size", f"{width}, the language model's hidden_size", dims.out)
    if stacked := c.config.get("deepstack_visual_indexes"):
        raise c.fault("deepstack_visual_indexes", "none in this family", stacked)
    return dims


def _sources(d: Dims) -> Iterator[tuple[str, tuple[int, ...], tuple[Target, ...]]]:
    """Every source tensor: its name inside the tower, its shape, and what is made of it."""
    yield "patch_embed.proj.weight", (d.width, _CHANNELS, _FRAMES, d.patch, d.patch), _patches(d)
    yield _copied("patch_embed.proj.bias", PATCH_BIAS, (d.width,))
    yield _copied("pos_embed.weight", POSITIONS, (d.positions, d.width))
    merged = d.width * d.merge**2
    matrices = {
        "attn.qkv": (3 * d.width, d.width),
        "attn.proj": (d.width, d.width),
        "mlp.linear_fc1": (d.ffn, d.width),
        "mlp.linear_fc2": (d.width, d.ffn),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (d.out, merged),
    }
    blocks = {f"blocks.{i}.{s}": f"v.blk.{i}.{t}" for i in range(d.depth) for s, t in BLOCK.items()}
    for source, target in {**blocks, **MERGER}.items():
        parts = source.split(".", 2)
        shape = matrices.get(parts[2] if parts[0] == "blocks" else source, (d.width,))
        yield _copied(f"{source}.weight", f"{target}.weight", shape)
        yield _copied(f"{source}.bias", f"{target}.bias", shape[:1])


def _copied(
    source: str, target: str, shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...], tuple[Target, ...]]:
    return source, shape, (Target(target, tuple(reversed(shape)), Recipe((source,))),)


def _patches(d: Dims) -> tuple[Target, ...]:
    """The kernel of each frame."""
    rows = np.arange(d.width * _CHANNELS * _FRAMES * d.patch).reshape(-1, _FRAMES, d.patch)
    shape = (d.patch, d.patch, _CHANNELS, d.width)
    return tuple(
        Target(name, shape, Recipe((), rows[:, frame].ravel()))
        for frame, name in enumerate((PATCHES, SECOND_PATCHES))
    )


def _hparams(d: Dims, text: ConfigReader, folder: Path) -> dict[str, Value]:
    """The keys of `clip`, in the order of llama.cpp's converter."""
    mean, std = _normalization(folder)
    keys = {
        "has_vision_encoder": True,
        "vision.projection_dim": d.out,
        # The side of the picture that has a learned position for each patch.
        "vision.image_size": int(d.positions**0.5 * d.patch),
        "vision.patch_size": d.patch,
        "vision.embedding_length": d.width,
        "vision.feed_forward_length": d.ffn,
        "vision.block_count": d.depth,
        "vision.attention.head_count": d.heads,
        "vision.image_mean": mean,
        "vision.image_std": std,
        "projector_type": PROJECTOR,
        "use_gelu": True,
        "vision.spatial_merge_size": d.merge,
        # llama.cpp's converter takes the epsilon of the language model; clip.cpp reads it.
        "vision.attention.layer_norm_epsilon": text.number(
            text.config, "rms_norm_eps", 1e-6, least=0
        ),
        "vision.is_deepstack_layers": (False,) * d.depth,
    }
    return typed(ARCHITECTURE, keys)


def _normalization(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the channels, from the files of the image processor."""
    held: dict[str, Any] = {}
    for name in _PROCESSOR_FILES:
        path = folder / name
        if path.is_file():
            found = read_json_object(path)
            inner = found.get("image_processor")
            held |= {**found, **(inner if isinstance(inner, dict) else {})}
    mean, std = (_channels(folder, held.get(key), key) for key in ("image_mean", "image_std"))
    if min(std) <= 0:
        raise _processor_fault(folder, "image_std", "positive numbers", list(std))
    return mean, std


def _channels(folder: Path, found: object, key: str) -> tuple[float, ...]:
    numbers = [
        float(v)
        for v in (found if isinstance(found, list) else ())
        if (is_whole(v) or isinstance(v, float)) and abs(v) <= LARGEST_F32
    ]
    if not isinstance(found, list) or not len(numbers) == len(found) == _CHANNELS:
        raise _processor_fault(folder, key, f"{_CHANNELS} numbers", found)
    return tuple(numbers)


def _processor_fault(folder: Path, key: str, expected: str, found: object) -> CheckpointError:
    shown = "none" if found is None else f"{found!r:.80}"
    return CheckpointError(
        f"{folder}: --mmproj: {key} of {' or '.join(_PROCESSOR_FILES)}: expected {expected}, found "
        f"{shown}; copy the file from the original model"
    )
