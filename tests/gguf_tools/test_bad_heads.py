"""Heads that cannot be good are reported with the figure that was measured; good ones never are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtp_gguf.convert.heads.acceptance import check_acceptance
from mtp_gguf.gguf_tools.files.rewrite import TensorCopy
from mtp_gguf.gguf_tools.heads.acceptance import LEAST
from mtp_gguf.gguf_tools.progress import QUIET
from support.commands import succeed
from support.gguf_files import edited, numbers_of, with_numbers
from support.models import DEMO, Models

Tensors = dict[str, TensorCopy]

HEAD, LAST_LAYER = "blk.4.", "blk.3."
OUTLIERS = 2.0  # standard deviation of the logarithm of norms, with which few bits are too few
PROJECTION = f"{HEAD}nextn.eh_proj.weight"
NORMS = (f"{HEAD}nextn.enorm.weight", f"{HEAD}nextn.hnorm.weight")


def rescale(seed: int, deviation: float = 1.2) -> Callable[[Tensors], None]:
    """The same head with norms as different as in large models.

    The demo's are all alike: what a norm is multiplied by, the columns behind it are divided by.
    """

    def edit(tensors: Tensors) -> None:
        projection = numbers_of(tensors[PROJECTION])
        width = projection.shape[1] // 2
        scales = np.exp(np.random.default_rng(seed).normal(0, deviation, 2 * width)).astype(
            np.float32
        )
        for name, part in zip(NORMS, (scales[:width], scales[width:]), strict=True):
            tensors[name] = with_numbers(tensors[name], numbers_of(tensors[name]) * part)
        tensors[PROJECTION] = with_numbers(tensors[PROJECTION], projection / scales)

    return edit


def other_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(HEAD)]:
        if (source := tensors.get(LAST_LAYER + name.removeprefix(HEAD))) is not None:
            tensors[name] = replace(source, spec=replace(source.spec, name=name))


def swapped_norms(tensors: Tensors) -> None:
    first, second = (tensors[name] for name in NORMS)
    for name, source in zip(NORMS, (second, first), strict=True):
        tensors[name] = replace(source, spec=replace(source.spec, name=name))


def permuted_rows(tensors: Tensors) -> None:
    rows = numbers_of(tensors[PROJECTION])
    order = np.random.default_rng(3).permutation(len(rows))
    tensors[PROJECTION] = with_numbers(tensors[PROJECTION], rows[order])


def other_model(tensors: Tensors) -> None:
    random = np.random.default_rng(5)
    for name in [name for name in tensors if name.startswith(HEAD)]:
        if tensors[name].spec.type.name == "F16":
            old = numbers_of(tensors[name]).astype(np.float32)
            new = random.standard_normal(old.shape) * old.std()
            tensors[name] = with_numbers(tensors[name], new)


@pytest.fixture(scope="module")
def good(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "good.gguf"
    return edited(models.gguf(DEMO, "Q4_K_M", "F16"), path, tensors=rescale(0))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "edit", [other_layer, swapped_norms, permuted_rows, other_model], ids=lambda edit: edit.__name__
)
def test_bad_heads_are_reported(
    edit: Callable[[Tensors], None], good: Path, tmp_path: Path
) -> None:
    found = check_acceptance(edited(good, tmp_path / "bad.gguf", tensors=edit), QUIET)
    assert found.measured is not None, found.skipped
    print(found.text)
    assert found.measured.share < LEAST
    assert found.warning is not None
    assert found.warning.startswith(f"{found.measured.share:.0%} of first drafts are accepted")
    assert "another model, fine-tune or layer" in found.warning


@pytest.mark.thorough
def test_a_head_in_too_few_bits_is_reported(models: Models, tmp_path: Path) -> None:
    whole = edited(
        models.gguf(DEMO, "F16", "F16"), tmp_path / "whole.gguf", tensors=rescale(0, OUTLIERS)
    )
    assert check_acceptance(whole, QUIET).warning is None
    succeed("convert", whole, "-o", tmp_path / "small.gguf", "--mtp-type", "Q2_K")
    found = check_acceptance(tmp_path / "small.gguf", QUIET)
    assert found.measured is not None, found.skipped
    print(found.text)
    assert found.warning is not None
    assert f"{found.measured.share:.0%} of first drafts are accepted" in found.warning
    assert "below 4 bits" in found.warning


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_good_heads_are_not(seed: int, models: Models, tmp_path: Path) -> None:
    source = models.gguf(DEMO, "Q4_K_M", "F16")
    found = check_acceptance(edited(source, tmp_path / "good.gguf", tensors=rescale(seed)), QUIET)
    assert found.measured is not None, found.skipped
    print(found.text)
    assert found.warning is None
