"""Model files in all layouts, made once from a tiny checkpoint."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from checkpoints import SPECS, write_checkpoint
from conversions import invoke

from mtp_gguf.gguf_tools.server.build import find_build
from mtp_gguf.gguf_tools.server.find import VARIABLE

Files = Callable[[str], Path]

_SPEC = SPECS["dense-3v"]
_FASTMTP = ("--fastmtp", "256", "--fastmtp-layout")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "ids": (*_FASTMTP, "ids"),
    "table": (*_FASTMTP, "table"),
    "sidecar": (*_FASTMTP, "sidecar"),
    "head": ("--head-only",),
    "base": ("--no-mtp",),
    "split": ("--split-max-size", "1M"),
}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A function from a name in the table above to a GGUF file of it. Never write to that."""
    root = tmp_path_factory.mktemp("served")
    checkpoint = write_checkpoint(root / "model", _SPEC)

    @cache
    def make(name: str) -> Path:
        head = () if name == "base" else ("--mtp-f16",)
        out = root / name / "model.gguf"
        out.parent.mkdir()
        result = invoke("convert", checkpoint, "-o", out, *head, *_OPTIONS[name])
        assert result.exit_code == 0, result.output
        return next(iter(sorted(out.parent.iterdir())))

    return make


@pytest.fixture
def no_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which no llama-server is to be found: an empty cache, an empty PATH."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv(VARIABLE, raising=False)
    return empty


@pytest.fixture
def free_port() -> int:
    """A port of this machine at which nothing listens right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def patched_server() -> Path:
    """A llama-server with our patches: the environment's, or that of `mtp-gguf build-server`."""
    stated = os.environ.get(VARIABLE)
    built = find_build()
    if not stated and not built:
        pytest.skip(f"no patched llama-server: run `mtp-gguf build-server`, or set {VARIABLE}")
    found = shutil.which(stated) if stated else str(built.server if built else "")
    assert found, f"{VARIABLE}={stated} is no program"
    return Path(found)
