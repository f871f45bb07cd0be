"""Finds a llama-server and asks it for its capabilities."""

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.gguf_tools.machine.system import PATCHED, STOCK, runs_kernels

from .build import find_build

VARIABLE = "MTP_GGUF_LLAMA_SERVER"

# As spelled in --help.
_CAPABILITIES = (
    "draft-mtp",
    "FastMTP",
    "--spec-draft-fused",
    "auto:N",
    ",lookup",
    "--spec-lookup-index",
    "--session-dir",
    "--share-sessions",
    "--spec-draft-head-type",
)

_DRAFTERS = ("draft-eagle3", "draft-dflash", "draft-dspark")
_COPYING = (("--load-mode", "none"), ("--no-mmap",))  # the second one in older servers
_NO_DEVICES = "(none)"  # in the list of devices, which leaves out the CPU
_ANSWER_SECONDS = 60.0  # a cold start with GPU libraries takes seconds


@dataclass(frozen=True)
class LlamaServer:
    """A llama-server and its capabilities.

    version: the first line of --version. drafts: supports `--spec-type draft-mtp`. The others need
    `patches/`. fastmtp: drafts with the FastMTP vocabularies of Qwen3.5 files. fused: drafts in one
    graph. auto: chooses the depth itself. lookup: drafts from the text of a slot, too, and
    lookup_index: from an index of lookup files. sessions: keeps conversations in a folder.
    separates: keeps the conversations of several API keys apart. head_type: quantizes the head
    while loading. drafters: the values of `--spec-type` for drafters that are no MTP head.
    copying: the options with which it copies the weights instead of mapping the file.
    """

    path: Path
    version: str
    drafts: bool
    fastmtp: bool
    fused: bool
    auto: bool
    lookup: bool
    lookup_index: bool
    sessions: bool
    separates: bool
    head_type: bool
    drafters: tuple[str, ...] = field(default=(), kw_only=True)
    copying: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def lacking(self) -> list[str]:
        """What it cannot do that a server of `mtp-gguf build-server` can."""
        features = {
            "drafts with FastMTP vocabularies": self.fastmtp,
            "drafts in one graph": self.fused,
            "a depth chosen by cost": self.auto,
            "drafts from the text": self.lookup,
            "lookup files": self.lookup_index,
            "conversations on disk": self.sessions,
            "separate conversations for each API key": self.separates,
            "types of the head chosen while loading": self.head_type,
        }
        return [name for name, there in features.items() if not there]

    @property
    def kernels(self) -> str:
        """Its kernels on this CPU, named as in Machine."""
        return PATCHED if self.fastmtp and runs_kernels() else STOCK


def find_server(named: Path | None) -> Path:
    """The llama-server to run: `named`, that of the environment, our build, or that on the PATH.

    ServerError if the named one cannot be run, or if there is none.
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
        "no llama-server found; build one with mtp-gguf build-server, "
        f"or name one with --llama-server or {VARIABLE}"
    )


def ask(path: Path) -> LlamaServer:
    """Read the capabilities of the server at `path` from its --help; ServerError if it fails."""
    version = _answer(path, "--version")
    usage = _answer(path, "--help")
    if "--spec-type" not in usage and "--model" not in usage:
        raise ServerError(f"{path}: expected a llama-server, found another program by its --help")
    drafters = tuple(kind for kind in _DRAFTERS if kind in usage)
    copying = next((options for options in _COPYING if options[0] in usage), ())
    first = version.strip().splitlines() or ["no version"]
    known = (word in usage for word in _CAPABILITIES)
    return LlamaServer(path, first[0], *known, drafters=drafters, copying=copying)


def finds_gpu(path: Path) -> bool:
    """Whether the server at `path` finds a GPU that it can use."""
    return _NO_DEVICES not in _answer(path, "--list-devices")


def _answer(path: Path, *options: str) -> str:
    option = options[-1]
    try:
        done = subprocess.run(
            [path, *options],
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
    found = shutil.which(path)  # a file or a name on the PATH
    if found is None:
        raise ServerError(f"{origin}: expected a program, found none at {path}")
    return Path(found)
