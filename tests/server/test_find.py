"""Which llama-server is run, and the detection of its capabilities."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.server.build import Build
from mtp_gguf.server.find import VARIABLE, ask, find_server, finds_gpu
from support.commands import invoke
from support.models import Files
from support.stand_in_server import write_stand_in


def test_option_then_environment_then_our_build_then_path(
    no_servers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerError, match="build-server"):
        find_server(None)
    on_path = write_stand_in(no_servers / "llama-server")
    assert find_server(None) == on_path
    built = Build(tmp_path / "built")
    monkeypatch.setattr("mtp_gguf.server.find.find_build", lambda: built)
    assert find_server(None) == built.server
    stated = write_stand_in(tmp_path / "stated server")
    monkeypatch.setenv(VARIABLE, str(stated))
    assert find_server(None) == stated
    named = write_stand_in(tmp_path / "named")
    assert find_server(named) == named


@pytest.mark.parametrize("through", ["option", "environment"])
def test_what_was_named_must_be_a_program(
    through: str, no_servers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server is no substitute for the one that was asked for."""
    write_stand_in(no_servers / "llama-server")
    named = tmp_path / "server"
    named.write_text("no program")
    if through == "environment":
        monkeypatch.setenv(VARIABLE, str(named))
    with pytest.raises(ServerError, match="expected a program"):
        find_server(named if through == "option" else None)


def test_another_program_is_not_a_server(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="another program"):
        ask(write_stand_in(tmp_path / "other", "usage: other"))


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho libllama.so: not found\nexit 127\n")
    broken.chmod(0o755)
    with pytest.raises(ServerError, match=r"code 127: libllama\.so: not found"):
        ask(broken)


@pytest.mark.server
def test_a_missing_gpu_is_said(patched_server: Path, files: Files) -> None:
    listed = subprocess.run(
        [patched_server, "--list-devices"], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"^ +\w+: .* MiB", listed, re.MULTILINE) is not None
    assert finds_gpu(patched_server) == found
    command = ("serve", files("plain"), "--llama-server", patched_server, "--print-command")
    for layers, said in ((None, False), ("0", False), ("99", not found)):
        done = invoke(*command, *(() if layers is None else ("-ngl", layers)))
        assert ("finds no GPU" in done.stderr) == said
