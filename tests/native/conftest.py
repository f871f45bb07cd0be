"""Where models run, and a way to break GGUF files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.files.format import Value
from support import places
from support.gguf_files import Rewrite, Tensor, rewritten


@pytest.fixture(autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[places.Place]:
    """Where the test's models run: the CPU, unless `places` has parametrized the test."""
    with places.use(places.place(getattr(request, "param", "cpu"))) as chosen:
        yield chosen


@pytest.fixture
def rewrite(tmp_path: Path) -> Rewrite:
    """Copy a GGUF with some keys and tensors changed; None drops one."""

    def copy(
        path: Path,
        keys: Mapping[str, Value | None] | None = None,
        tensors: Mapping[str, Tensor | None] | None = None,
    ) -> Path:
        out = tmp_path / f"rewritten-{len(list(tmp_path.iterdir()))}.gguf"
        return rewritten(path, out, keys or {}, tensors or {})

    return copy
