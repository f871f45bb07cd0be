"""Fixtures of the tests of a family; the FAMILY of a test file says which."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import succeed
from support.upstream.families import Family, Trunk, tensors_of, with_head, write_trunk


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "spoiled" in metafunc.fixturenames:
        cases = metafunc.module.FAMILY.damaged
        metafunc.parametrize("spoiled", cases, ids=[f"{name}-{said}" for name, _, said in cases])
    if "refusal" in metafunc.fixturenames:
        cases = metafunc.module.FAMILY.refused
        metafunc.parametrize("refusal", cases, ids=["-".join(keys) for keys, _ in cases])


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.module.FAMILY
    return found


@pytest.fixture(scope="module")
def trunk(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Trunk:
    return write_trunk(family.make, tmp_path_factory.mktemp("family") / "trunk", family.spread)


@pytest.fixture(scope="module")
def checkpoint(family: Family, trunk: Trunk, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head, and as published."""
    folder = tmp_path_factory.mktemp("family") / "with-head"
    stored = tensors_of(trunk[0])
    like = {
        new + name.removeprefix(old): tuple(values.shape)
        for new, old in family.like.items()
        for name, values in stored.items()
        if name.startswith(old)
    }
    with_head(folder, trunk[0], family.head | like, family.scale)
    family.publish(folder)
    return folder


@pytest.fixture(scope="module")
def published(checkpoint: Path) -> Path:
    return checkpoint


@pytest.fixture(scope="module")
def whole(family: Family, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("family") / "whole.gguf"
    assert family.said in succeed("convert", checkpoint, "--quant", "BF16", "-o", out)
    return out
