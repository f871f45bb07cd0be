"""Finding a llama-server, and asking it what it can do."""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.gguf_tools.system import PATCHED, STOCK

from .build import find_build

VARIABLE = "MTP_GGUF_LLAMA_SERVER"

_ABILITIES = ("draft-mtp", "FastMTP", "--spec-draft-fused", "auto:N")  # as --help has them

_ANSWER_SECONDS = 60.0  # a cold start with GPU libraries takes seconds


@dataclass(frozen=True)
class LlamaServer:
    """A llama-server that answered.

    version: the first line of its --version. drafts: it knows `--spec-type draft-mtp`. fastmtp: it
    drafts with the FastMTP vocabularies of Qwen3.5 files, which takes `patches/`. fused: it can
    draft in one graph, which takes them, too. auto: it then can choose how deep, by itself.
    """

    path: Path
    version: str
    drafts: bool
    fastmtp: bool
    fused: bool
    auto: bool

    @property
    def kernels(self) -> str:
        """What it multiplies a few rows with on this CPU, as in Machine: patches/ has x86-64's."""
        x86 = platform.machine() in ("x86_64", "AMD64")
        return PATCHED if self.fastmtp and x86 else STOCK


def find_server(named: Path | None) -> Path:
    """The llama-server to run: `named`, the environment's, our build, the one on the PATH.

    ServerError when what was named cannot be run, or when there is none at all.
    """
    if named:
        return _executable(named, "--llama-server")
    if stated := os.environ.get(VARIABLE):
        return _executable(Path(stated), VARIABLE)
    if built := find_build():
        return built.server
    if found := shutil.which("llama-server"):
        return Path(found)
    raise ServerError(
        "no llama-server found: make one with `mtp-gguf build-server`, "
        f"or name one with --llama-server or {VARIABLE}"
    )


def ask(path: Path) -> LlamaServer:
    """What the server at `path` can do, by its own words; ServerError when it does not say."""
    version = _answer(path, "--version")
    usage = _answer(path, "--help")
    if "--spec-type" not in usage and "--model" not in usage:
        raise ServerError(f"{path}: expected a llama-server, but its --help is another program's")
    first = version.strip().splitlines() or ["no version"]
    return LlamaServer(path, first[0], *(word in usage for word in _ABILITIES))


def _answer(path: Path, option: str) -> str:
    try:
        done = subprocess.run(
            [path, option],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except OSError as error:
        raise ServerError(f"{path}: cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ServerError(f"{path}: no answer to {option} in {_ANSWER_SECONDS:.0f} s") from None
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        last = text.strip().splitlines() or ["no message"]
        raise ServerError(f"{path} {option}: ended with code {done.returncode}: {last[-1]}")
    return text


def _executable(path: Path, origin: str) -> Path:
    found = shutil.which(path)  # takes a name on the PATH as well as a file
    if found is None:
        raise ServerError(f"{origin}: expected a program, found none at {path}")
    return Path(found)
