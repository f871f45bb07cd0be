"""llama.cpp's own malformed files, made by its own test's code, go through our reader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.format import open_gguf
from support.upstream import handcrafted

pytestmark = pytest.mark.upstream

# Upstream reads these without their data, which are not in the file; a hole stands for them.
WITHOUT_DATA = "HANDCRAFTED_TENSORS_"
HOLE = 1 << 36
# One byte less than all padding: if only padding is missing, llama.cpp's loader and ours take it.
ONE_BYTE_LESS = "HANDCRAFTED_DATA_NOT_ENOUGH_DATA"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return handcrafted.build(tmp_path_factory.mktemp("handcrafted"))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_upstream_and_ours_take_the_same_files(seed: int, program: Path, tmp_path: Path) -> None:
    files = handcrafted.write(program, seed, tmp_path)
    assert len(files) >= 34
    assert {expected for _, expected in files.values()} == {True, False}
    wrong = {}
    for name, (path, expected) in files.items():
        if name.startswith(WITHOUT_DATA):
            os.truncate(path, HOLE)
        try:
            with open_gguf(path) as file:
                last = max((t.offset + t.nbytes for t in file.tensors), default=0)
                read = "read"
                if name == ONE_BYTE_LESS:
                    assert path.stat().st_size >= last
                    expected = True  # noqa: PLW2901
        except FormatError as error:
            read = str(error)
        if (read == "read") != expected:
            wrong[name] = read
    assert wrong == {}
