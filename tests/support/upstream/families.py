"""Checkpoints of other families: a trunk that transformers' own class writes, and an added head.

What the tests of each family do with them alike is here. A pair of a folder and an array is a
checkpoint without a head and transformers' logits of IDS, f32[tokens, vocabulary].
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.native.runtime import llama_cpp
from support.checkpoint_edits import edit_json
from support.checkpoints import TINY, write_checkpoint
from support.commands import refused, succeed

from .compare import file_differences
from .convert_upstream import convert
from .nextn_models import drafts

IDS = [5, 9, 77, 300, 5, 12, 44, 600, 601, 9, 77, 300, 17, 18, 19, 20, 21, 33, 34]

# Options of `convert` and of upstream's converter: the whole model, its head alone, its trunk.
PARTS = [
    ((), ()),
    pytest.param(("--head-only",), ("--mtp",), marks=pytest.mark.slow),
    pytest.param(("--no-mtp",), ("--no-mtp",), marks=pytest.mark.slow),
]

Trunk = tuple[Path, np.ndarray[Any, np.dtype[np.float32]]]


def write_trunk(
    make: Callable[[], Any], folder: Path, spread: Callable[[str], tuple[float, float] | None]
) -> Trunk:
    """Save a model of transformers in BF16 after its values were drawn, and compute its logits.

    make: returns the model. spread: mean and deviation of the values of a name; None: those of a
    matrix, or what transformers has made of a vector.
    """
    import torch  # noqa: PLC0415

    torch.manual_seed(3)
    model = make().float().eval()
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if drawn := spread(name):
                values.normal_(*drawn)
            elif values.ndim > 1 and values.is_floating_point():
                values.normal_(0, values.shape[-1] ** -0.5)
        model = model.to(torch.bfloat16).float()
        logits: np.ndarray[Any, np.dtype[np.float32]] = model(torch.tensor([IDS])).logits[0].numpy()
        model.to(torch.bfloat16).save_pretrained(folder)
    vocabulary = write_checkpoint(folder.parent / f"{folder.name}-words", TINY)
    for path in vocabulary.glob("*token*"):
        shutil.copy(path, folder)
    return folder, logits


def tensors_of(folder: Path) -> dict[str, Any]:
    """Those of model.safetensors, as torch has them."""
    from safetensors.torch import load_file  # noqa: PLC0415

    found: dict[str, Any] = load_file(folder / "model.safetensors")
    return found


def save(folder: Path, tensors: dict[str, Any]) -> None:
    """Write torch's tensors to model.safetensors."""
    from safetensors.torch import save_file  # noqa: PLC0415

    contiguous = {name: values.contiguous() for name, values in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def with_head(
    folder: Path, trunk: Path, shapes: dict[str, tuple[int, ...]], scale: float = 1
) -> Path:
    """Copy a checkpoint into a new folder, and add random BF16 tensors of these shapes."""
    import torch  # noqa: PLC0415

    shutil.copytree(trunk, folder)
    noise = torch.Generator().manual_seed(4)
    head = {
        name: (torch.randn(*shape, generator=noise) * scale).bfloat16()
        for name, shape in shapes.items()
    }
    save(folder, tensors_of(folder) | head)
    return folder


def change(folder: Path, *, inside: str | None = None, **keys: Any) -> None:
    """Set keys of config.json, or of an object inside it; None removes a key."""

    def edit(config: dict[str, Any]) -> None:
        there = config[inside] if inside else config
        there.update(keys)
        for key in [key for key, value in there.items() if value is None]:
            del there[key]

    edit_json(folder / "config.json", edit)


def differences_from_upstream(
    checkpoint: Path, options: tuple[str, ...], flags: tuple[str, ...], folder: Path
) -> list[str]:
    """What differs between the BF16 files of both converters, called with options as in PARTS."""
    ours = folder / "ours.gguf"
    succeed("convert", checkpoint, *options, "--quant", "BF16", "-o", ours)
    return file_differences(convert(checkpoint, folder / "theirs.gguf", "bf16", flags), ours)


def check_logits(trunk: Trunk, folder: Path, tolerance: float) -> str:
    """Hold the logits of the trunk, converted to F32, to transformers'; what `convert` said."""
    checkpoint, expected = trunk
    out = folder / "f32.gguf"
    said = succeed("convert", checkpoint, "--no-mtp", "--quant", "F32", "-o", out)
    model = llama_cpp.Llama(str(out), n_ctx=64, verbose=False, logits_all=True)
    model.eval(IDS)
    found = np.array(model.scores[: len(IDS)])
    model.close()
    assert np.abs(expected).max() > 1
    assert np.abs(found - expected).max() < tolerance
    return said


def check_drafts(whole: Path, folder: Path) -> None:
    """Draft by llama.cpp with a whole model and with its extracted head: the same."""
    head = folder / "head.gguf"
    succeed("extract", whole, "-o", head)
    found = drafts([whole, head])
    assert found[0] is not None
    assert found[0] == found[1]


def check_refused(
    checkpoint: Path, folder: Path, said: str, *, inside: str | None = None, **keys: Any
) -> None:
    """Change keys of a checkpoint's config, after which it is refused with these words."""
    model = folder / "model"
    shutil.copytree(checkpoint, model)
    change(model, inside=inside, **keys)
    refused(folder, "convert", model, "-o", folder / "x.gguf", words=(said,))
