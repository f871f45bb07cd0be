"""Model files in all layouts, free ports, and the patched server if there is one."""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from mtp_gguf.server.build import find_build
from mtp_gguf.server.find import VARIABLE
from support.models import Files, Models

_SIZE = {"demo": "2048"}  # of the draft vocabulary; 256 for the others
_OPTIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "ids": ("--fastmtp-layout", "ids"),
    "table": ("--fastmtp-layout", "table"),
    "sidecar": ("--fastmtp-layout", "sidecar"),
    "head": ("--head-only",),
    "base": ("--no-mtp",),
    "split": ("--split-max-size", "1M"),
}


@pytest.fixture(scope="session")
def files(models: Models) -> Files:
    """Model files by layout and checkpoint."""

    def file(layout: str, spec: str = "dense-3v") -> Path:
        options = [*_OPTIONS[layout]]
        if layout != "base":
            options.append("--mtp-f16")
        if "--fastmtp-layout" in options:
            options += ["--fastmtp", _SIZE.get(spec, "256")]
        return models.convert(spec, *options)

    return file


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
def free_ports() -> list[int]:
    """Three ports of this machine at which nothing listens right now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(3)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@pytest.fixture
def free_port(free_ports: list[int]) -> int:
    """A port of this machine at which nothing listens right now."""
    return free_ports[0]


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
