"""Checkpoints of other families: a trunk that transformers' own class writes, and an added head.

A family's test file says what is its own in FAMILY, has the tests that every family has as a
`class TestFamily(FamilyTests)`, and the fixtures of convert/conftest.py. A pair of a folder and an
array is a checkpoint without a head and transformers' logits of IDS, f32[tokens, vocabulary].
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from mtp_gguf.native.runtime import llama_cpp
from support.checkpoint_edits import edit_json
from support.checkpoints import TINY, write_checkpoint
from support.commands import refused, succeed

from .compare import file_differences
from .convert_upstream import convert
from .describe import describe
from .nextn_models import drafts

IDS = [5, 9, 77, 300, 5, 12, 44, 600, 601, 9, 77, 300, 17, 18, 19, 20, 21, 33, 34]

NEEDS_TRANSFORMERS = [
    pytest.mark.upstream,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra"),
]

# Options of `convert` and of upstream's converter: the whole model, its head alone, its trunk.
PARTS = [
    ((), ()),
    pytest.param(("--head-only",), ("--mtp",), marks=pytest.mark.slow),
    pytest.param(("--no-mtp",), ("--no-mtp",), marks=pytest.mark.slow),
]

Array = np.ndarray[Any, np.dtype[np.float32]]
Trunk = tuple[Path, Array]


@dataclass(frozen=True)
class Family:
    """What differs between the tests of families.

    make, spread: as for `write_trunk`. head: shapes of the tensors that the published checkpoints
    have besides, drawn with the deviation `scale`; like: prefixes of further ones, and of tensors
    of the trunk that have their shapes; publish: changes the copy with a head into what
    is published. tolerance: of the logits. said: by `convert` about the whole model. in_f16: a
    tensor of the head that --mtp-f16 stores so. golden: tensors of the BF16 file, computed from
    those of the checkpoint. damaged: tensors, what becomes of each (None: it is missing), and what
    `convert` says. refused: keys of the config, which are inside of an object, and what it says
    then. joined: keys with which the trunk's config promises no head. known: differences from
    upstream's files with a head. compared: options of `compare` with the checkpoint. drafts:
    whether the pinned llama.cpp drafts with it. differences: between two files.
    """

    make: Callable[[], Any]
    spread: Callable[[str], tuple[float, float] | None]
    head: dict[str, tuple[int, ...]]
    tolerance: float
    said: str
    in_f16: str
    golden: Mapping[str, Callable[[dict[str, Array]], Array]]
    refused: Sequence[tuple[dict[str, Any], str]]
    damaged: Sequence[tuple[str, Callable[[Any], Any], str]]
    like: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1
    publish: Callable[[Path], object] = lambda _: None
    inside: str | None = None
    joined: dict[str, Any] = field(default_factory=dict)
    known: tuple[str, ...] = ()
    compared: tuple[str, ...] = ("--all",)
    drafts: bool = True
    differences: Callable[[Path, Path], list[str]] = file_differences


class UpstreamTests:
    """Of a family that the pinned converter knows; `published` is the checkpoint that it reads."""

    @pytest.mark.thorough
    @pytest.mark.parametrize(("options", "flags"), PARTS)
    def test_files_are_upstreams(
        self,
        options: tuple[str, ...],
        flags: tuple[str, ...],
        family: Family,
        published: Path,
        tmp_path: Path,
    ) -> None:
        ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
        succeed("convert", published, *options, "--quant", "BF16", "-o", ours)
        found = family.differences(convert(published, theirs, "bf16", flags), ours)
        assert found == ([] if "--no-mtp" in flags else [*family.known])


class FamilyTests:
    """The tests of every family."""

    def test_logits_are_those_of_transformers(
        self, family: Family, trunk: Trunk, tmp_path: Path
    ) -> None:
        check_logits(trunk, tmp_path, family.tolerance)

    def test_llama_cpp_drafts_with_it(self, family: Family, whole: Path, tmp_path: Path) -> None:
        if family.drafts:
            check_drafts(whole, tmp_path)

    def test_a_mix(self, family: Family, checkpoint: Path, tmp_path: Path) -> None:
        mixed = tmp_path / "mixed.gguf"
        succeed("convert", checkpoint, "--quant", "Q4_K_M", "--mtp-f16", "-o", mixed)
        assert describe(mixed).tensors[family.in_f16].type == "F16"
        assert "can draft" in succeed("doctor", mixed)
        assert "can draft" in succeed("doctor", checkpoint)

    def test_a_graft(self, family: Family, checkpoint: Path, whole: Path, tmp_path: Path) -> None:
        base, grafted = tmp_path / "base.gguf", tmp_path / "grafted.gguf"
        succeed("strip", whole, "-o", base)
        succeed("graft", base, "--from", checkpoint, "--mtp-type", "BF16", "-o", grafted)
        assert family.differences(whole, grafted) == []
        assert "error" not in succeed("compare", grafted, checkpoint, *family.compared)

    def test_the_head_of_another_checkpoint(
        self, family: Family, trunk: Trunk, checkpoint: Path, whole: Path, tmp_path: Path
    ) -> None:
        """The same model, though the trunk has the config keys of transformers."""
        folder, out = tmp_path / "model", tmp_path / "out.gguf"
        shutil.copytree(trunk[0], folder)
        change(folder, inside=family.inside, **family.joined)
        succeed("convert", folder, "--from", checkpoint, "--quant", "BF16", "-o", out)
        found = family.differences(whole, out)
        own = ("general.", "tokenizer.")  # named after the folder; the trunk's own
        assert [text for text in found if not text.startswith(own)] == []

    def test_values_are_those_of_the_checkpoint(
        self, family: Family, checkpoint: Path, whole: Path
    ) -> None:
        """Independent of upstream's converter."""
        tensors = {name: t.float().numpy() for name, t in tensors_of(checkpoint).items()}
        found = values_of(whole)
        for name, compute in family.golden.items():
            np.testing.assert_array_equal(found[name], compute(tensors), err_msg=name)

    def test_damaged_tensors(
        self, spoiled: tuple[str, Callable[[Any], Any], str], checkpoint: Path, tmp_path: Path
    ) -> None:
        name, changed, said = spoiled
        folder = shutil.copytree(checkpoint, tmp_path / "damaged")
        tensors = tensors_of(folder)
        tensors[name] = changed(tensors[name])
        save(folder, {name: values for name, values in tensors.items() if values is not None})
        refused(tmp_path, "convert", folder, "-o", tmp_path / "x.gguf", words=(said,))

    def test_configs_that_llama_cpp_has_no_model_for(
        self, refusal: tuple[dict[str, Any], str], family: Family, checkpoint: Path, tmp_path: Path
    ) -> None:
        keys, said = refusal
        check_refused(checkpoint, tmp_path, said, inside=family.inside, **keys)


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


def values_of(path: Path) -> dict[str, Array]:
    """The tensors of a GGUF file as numbers, rows first."""
    return {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}


def plus_one(name: str) -> Callable[[dict[str, Array]], Array]:
    """A golden tensor that is a norm of the checkpoint plus 1, as llama.cpp multiplies by it."""
    return lambda tensors: tensors[name] + np.float32(1)


def missing(_: Any) -> None:
    """What becomes of a tensor that is left out."""


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
    model = shutil.copytree(checkpoint, folder / "model")
    change(model, inside=inside, **keys)
    refused(folder, "convert", model, "-o", folder / "x.gguf", words=(said,))
