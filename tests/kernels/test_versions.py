"""The plugged-in kernels compute the same bits in other versions of llama.cpp.

    pytest -m slow -s tests/kernels/test_versions.py

downloads their sources with pip and builds ggml's CPU backend, a minute or two each.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.kernels.results import ANY, SMALL, Arrays, MakeSweep, Sweep, cases
from support.llama_sources import built

pytestmark = pytest.mark.slow

# Distribution, version, where llama.cpp is in its source distribution; which llama.cpp it is
VERSIONS = [
    pytest.param("llama-cpp-python", "0.3.9", "vendor/llama.cpp", id="May 2025"),
    pytest.param("xllamacpp", "2026.10.11549", "thirdparty/llama.cpp", id="b11549"),
]
KINDS = ("product", "many", "experts", "attention", "recurrence")


@pytest.mark.parametrize(("name", "version", "inside"), VERSIONS)
def test_bits_are_those_on_the_pinned_version(
    tmp_path: Path,
    stock_sweep: Sweep,
    plugged_in: MakeSweep,
    name: str,
    version: str,
    inside: str,
) -> None:
    found: Arrays = plugged_in(built(tmp_path, name, version, inside, "ggml-cpu"))("")
    expected = stock_sweep("")
    assert found["lanes"] == expected["lanes"]
    assert found["left to ggml"].tolist() == []
    keys = [
        key
        for kind in KINDS
        for name, batch, key in cases(found, kind)
        # the other ones are ggml's own
        if batch <= SMALL or kind in ANY or name.split()[0] in found["exact"]
    ]
    assert len(keys) > 1000
    assert [key for key in keys if found[key].tobytes() != expected[key].tobytes()] == []
