"""Model files in all layouts, servers, and a machine without a llama-server."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_gguf.server.find import VARIABLE
from support.models import DEMO, Files, Models
from support.real_server import Server

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

    def file(layout: str, spec: str | Path = "dense-3v") -> Path:
        options = [*_OPTIONS[layout]]
        if layout != "base":
            options.append("--mtp-f16")
        if "--fastmtp-layout" in options:
            options += ["--fastmtp", _SIZE.get(str(spec), "256")]
        return models.convert(spec, *options)

    return file


@pytest.fixture(scope="session")
def templated(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the demo model with another chat template."""

    def make(template: str) -> Path:
        folder = shutil.copytree(DEMO, tmp_path_factory.mktemp("template") / "demo")
        (folder / "chat_template.jinja").write_text(template)
        return models.gguf(folder, "F32", "F32")

    return make


@pytest.fixture(scope="session")
def server(patched_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Starts llama-servers with our patches."""
    return Server(patched_server, tmp_path_factory.mktemp("logs"))


@pytest.fixture
def no_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which no llama-server is to be found: an empty cache, an empty PATH."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv(VARIABLE, raising=False)
    return empty
