"""The command that starts a llama-server on a model."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from mtp_gguf.gguf_tools.errors import RequestError, ServerError
from mtp_gguf.gguf_tools.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.profile import AUTO, DraftSettings

from .address import Address
from .find import LlamaServer
from .model import ServedModel

# What `serve` itself decides, and so must know, in all spellings that llama-server takes.
_OURS = {
    "-m": "MODEL",
    "--model": "MODEL",
    "--host": "--host",
    "--port": "--port",
}
# What makes a server draft step by step, or without the head: it cannot choose how deep then.
_STEPWISE = (
    "--no-spec-draft-fused",
    "--spec-type",
    *("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft"),
    *("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft"),
)
_KEYS = ("--api-key", "--api-key-file")
_KEY_VARIABLES = ("LLAMA_API_KEY", "LLAMA_ARG_API_KEY_FILE")


@dataclass(frozen=True)
class ServerCommand:
    """A command line for llama-server, and what follows from it.

    health: the address that answers 200 once the model is loaded. notes: sentences for the user
    on what the server will not do with the file.
    """

    words: tuple[str, ...]
    health: str
    notes: tuple[str, ...]


def server_command(
    server: LlamaServer,
    model: ServedModel,
    address: Address,
    depth: int | Literal["auto"] | None,
    tuned: DraftSettings | None,
    rpc: str | None,
    allow_public: bool,
    passed: Sequence[str],
) -> ServerCommand:
    """Put the command together.

    model: has a head where it shall draft. depth: what the user wants; None for what `tuned`, the
    model's profile, says, and without one for "auto", where the server can choose for itself, or a
    default by the model's size. rpc: `HOST:PORT,…` of ggml's RPC servers. passed: the user's own
    options, handed on as they are, after ours.

    ServerError when the server cannot load the file, or cannot draft though it should.
    RequestError when `passed` or `address` needs another word of the user.
    """
    for option in map(_spelled, passed):
        if option in _OURS:
            raise RequestError(f"{option} after `--`: give it to serve as {_OURS[option]}, before")
    if address.public and not allow_public and not _has_key(passed):
        raise RequestError(
            f"--host {address.host}: others can reach it, and there is no API key: "
            "pass one after `--` (--api-key), or --allow-public"
        )
    notes = [*_check_layouts(server, model)]
    words = [str(server.path), "-m", str(model.file.path)]
    words += ["--host", address.host, "--port", str(address.port)]
    if rpc:
        words += ["--rpc", rpc]
    if model.head_file:
        if not server.drafts:
            raise ServerError(
                f"{server.path} ({server.version}): knows no draft-mtp: make one that does with "
                "`mtp-gguf build-server`, or serve with --no-draft"
            )
        if depth == AUTO and not server.auto:
            raise ServerError(
                f"{server.path} ({server.version}): cannot choose how deep to draft: give "
                "--spec-draft-n-max a number, or make one that can with `mtp-gguf build-server`"
            )
        if depth is None:
            depth = _depth(server, model, tuned, passed)
        if depth == 0:
            notes.append("serves without drafting, which was slower when it was tuned")
        else:
            words += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(depth)]
            if model.head_beside:
                words += ["-md", str(model.head_beside)]
            if tuned and server.fused:
                words += _tuned_words(tuned)
    scheme = "https" if _value(passed, "--ssl-cert-file", "LLAMA_ARG_SSL_CERT_FILE") else "http"
    prefix = _value(passed, "--api-prefix", "LLAMA_ARG_API_PREFIX") or ""
    return ServerCommand((*words, *passed), address.url(scheme, prefix) + "/health", tuple(notes))


def _depth(
    server: LlamaServer, model: ServedModel, tuned: DraftSettings | None, passed: Sequence[str]
) -> int | Literal["auto"]:
    """How deep to draft without the user's word."""
    if tuned and tuned.depth != AUTO:
        return tuned.depth
    if server.auto and not any(option in passed for option in _STEPWISE):
        return AUTO
    return model.draft_depth


def _tuned_words(tuned: DraftSettings) -> Sequence[str]:
    """What a profile says beside the depth, where it differs from llama-server's defaults."""
    values = {
        "--spec-draft-n-vocab": tuned.fastmtp_size,
        "--spec-draft-threads": tuned.draft_threads,
    }
    return [word for option, value in values.items() if value for word in (option, str(value))]


def _check_layouts(server: LlamaServer, model: ServedModel) -> Sequence[str]:
    """Compare what the files hold with what the server reads; gives what is to be said of it."""
    if server.fastmtp:
        return ()
    for file in (model.file, model.head_file):
        if file and file.head.ready and not file.head.stock and file.head.draft:
            raise ServerError(
                f"{file.path}: {server.path} cannot load its FastMTP layout "
                f"({file.head.draft.layout.value}): make a server that can with "
                "`mtp-gguf build-server`, or convert with `--fastmtp-layout ids`"
            )
    if model.draft_layout is DraftLayout.IDS:
        return (
            "this llama-server ignores the file's FastMTP vocabulary and drafts over the whole "
            "one: `mtp-gguf build-server` makes one that uses it",
        )
    return ()


def _spelled(word: str) -> str:
    """An option as it is documented; llama-server takes underscores in it, too."""
    return word.replace("_", "-") if word.startswith("--") else word


def _has_key(passed: Sequence[str]) -> bool:
    return any(_spelled(word) in _KEYS for word in passed) or any(
        map(os.environ.get, _KEY_VARIABLES)
    )


def _value(passed: Sequence[str], option: str, variable: str) -> str | None:
    """What the server will take for `option`: the last one passed, else the environment's."""
    given = [value for name, value in pairwise(passed) if _spelled(name) == option]
    return given[-1] if given else os.environ.get(variable)
