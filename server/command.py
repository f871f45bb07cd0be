"""The command that starts a llama-server on a model."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from mtp_gguf.gguf_tools.errors import RequestError, ServerError
from mtp_gguf.gguf_tools.heads.drafters import Drafter
from mtp_gguf.gguf_tools.heads.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.heads.nextn import BLOCKS
from mtp_gguf.gguf_tools.machine.processors import are_limited, computing_threads
from mtp_gguf.gguf_tools.machine.shell import quoted
from mtp_gguf.gguf_tools.profile import AUTO, DraftSettings

from .address import Address
from .find import LlamaServer
from .launch import GRACE_SECONDS
from .model import ServedModel

# Options that `serve` sets itself, in all spellings of llama-server, and their names in `serve`.
_OURS = {
    "-m": "MODEL",
    "--model": "MODEL",
    "--host": "--host",
    "--port": "--port",
}
# Options that switch the fused draft off, and with it the choice of depth by the server.
_STEPWISE = (
    "--no-spec-draft-fused",
    "--spec-type",
    *("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft"),
    *("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft"),
)
# Options of llama-server that say where the vision tower is, or that there shall be none.
MMPROJ_OPTIONS = ("-mm", "--mmproj", "-mmu", "--mmproj-url", "--mmproj-auto", "--no-mmproj")
# Options of llama-server that say how it loads the weights.
_LOADING = {"-lm", "--load-mode", "--mmap", "--no-mmap", "--mlock", "-dio", "--direct-io"}
_KEY, _KEY_VARIABLE = "--api-key", "LLAMA_API_KEY"
_KEY_FILE, _KEY_FILE_VARIABLE = "--api-key-file", "LLAMA_ARG_API_KEY_FILE"


_SAVING_SECONDS = 120.0  # for the conversations of all slots, on a slow disk


@dataclass(frozen=True)
class SessionFolder:
    """Where the server keeps conversations. size: of all of them, in bytes."""

    path: Path
    size: int


@dataclass(frozen=True)
class ServerCommand:
    """A command line for llama-server.

    health: URL that answers 200 once the model is loaded. has_key: it asks for an API key. notes:
    sentences for the user on features of the file that the server will not use. grace: seconds that
    the server may take to end.
    """

    words: tuple[str, ...]
    health: str
    has_key: bool
    notes: tuple[str, ...]
    grace: float = GRACE_SECONDS


def server_command(
    server: LlamaServer,
    model: ServedModel,
    address: Address,
    depth: int | Literal["auto"] | None,
    tuned: DraftSettings | None,
    rpc: str | None,
    allow_public: bool,
    passed: Sequence[str],
    *,
    lookup: bool = False,
    lookup_index: Path | None = None,
    sessions: SessionFolder | None = None,
    share_sessions: bool = False,
    huge_pages: bool = False,
    mtp_type: str | None = None,
) -> ServerCommand:
    """Build the command line.

    Args:
        model: drafts if it has a `head_file`.
        depth: the user's choice. None uses the depth of `tuned`, else "auto" if the server
            supports it, else a default by the size of the model.
        tuned: settings of the model's profile.
        rpc: `HOST:PORT,…` of ggml's RPC servers.
        passed: the user's llama-server options, appended unchanged.
        lookup: draft from the text of each slot, too; also without a head.
        lookup_index: an index of lookup files to draft from, too, if `lookup`.
        sessions: keep conversations there.
        share_sessions: let each API key continue the conversations of the others.
        huge_pages: let the server copy the weights; the pages of the copy depend on the
            environment that it runs in (huge_pages.py).
        mtp_type: quantize the matrices of the head to this type while loading; None for as stored.

    Raises:
        ServerError: the server cannot load the file, or cannot draft.
        RequestError: `passed` or `address` is not allowed.

    """
    for option in map(_spelled, passed):
        if option in _OURS:
            raise RequestError(f"{option} after `--`: give it to serve itself, as {_OURS[option]}")
    has_key = check_access(address, allow_public, passed)
    notes = [*_check_layouts(server, model)]
    words = [str(server.path), "-m", str(model.file.path)]
    words += ["--host", address.host, "--port", str(address.port)]
    if model.mmproj:
        words += ["--mmproj", str(model.mmproj)]
    if are_limited() and not (
        {"-t", "--threads"} & {*map(_spelled, passed)} or "LLAMA_ARG_THREADS" in os.environ
    ):
        # llama-server starts a thread for each core of the machine, also in a container.
        words += ["--threads", str(computing_threads())]
    if huge_pages:
        words += _copying(server, passed)
    if rpc:
        words += ["--rpc", rpc]
    if lookup and not server.lookup:
        raise ServerError(
            f"{server.path} ({server.version}): cannot draft from the text; build one that can "
            "with mtp-gguf build-server, or serve with --no-lookup"
        )
    types = ["lookup"] if lookup else []
    if model.head_file and model.head_file.drafter:
        drafter = model.head_file.drafter
        _check_drafter(server, drafter, depth)
        types.insert(0, drafter.spec_type)
        words += ["--spec-type", ",".join(types), "-md", str(model.head_file.path)]
        words += [] if depth is None else ["--spec-draft-n-max", str(depth)]
    elif model.head_file:
        if not server.drafts:
            raise ServerError(
                f"{server.path} ({server.version}): does not support draft-mtp; build one that "
                "does with mtp-gguf build-server, or serve with --no-draft"
            )
        if depth == AUTO and not server.auto:
            raise ServerError(
                f"{server.path} ({server.version}): cannot choose the depth itself; give "
                "--spec-draft-n-max a number, or build one that can with mtp-gguf build-server"
            )
        if depth is None:
            depth = _depth(server, model, tuned, passed)
        if depth == 0:
            notes.append(
                f"serving without {'the head' if lookup else 'drafting'}, which was the fastest "
                "setting when the model was tuned"
            )
        else:
            _check_shared(server, model, passed)
            types.insert(0, "draft-mtp")
            words += ["--spec-type", ",".join(types), "--spec-draft-n-max", str(depth)]
            if model.separate_head:
                words += ["-md", str(model.separate_head)]
            if tuned and server.fused:
                words += _tuned_words(tuned)
            if mtp_type is not None:
                if not server.head_type:
                    raise ServerError(
                        f"{server.path} ({server.version}): cannot quantize a head while loading; "
                        "build one that can with mtp-gguf build-server, or serve without --mtp-type"
                    )
                words += ["--spec-draft-head-type", mtp_type]
    if types == ["lookup"]:
        words += ["--spec-type", "lookup"]
    if lookup_index:
        words += ["--spec-lookup-index", str(lookup_index)]
    if sessions:
        if not server.sessions:
            raise ServerError(
                f"{server.path} ({server.version}): cannot keep conversations on disk; build one "
                "that can with mtp-gguf build-server, or serve without --session-dir"
            )
        # llama-server counts in MiB
        size = max(1, sessions.size >> 20)
        words += ["--session-dir", str(sessions.path), "--session-size", str(size)]
    if share_sessions and server.separates:  # others share them anyway
        words.append("--share-sessions")
    scheme = "https" if _value(passed, "--ssl-cert-file", "LLAMA_ARG_SSL_CERT_FILE") else "http"
    prefix = _value(passed, "--api-prefix", "LLAMA_ARG_API_PREFIX") or ""
    health = address.url(scheme, prefix) + "/health"
    grace = _SAVING_SECONDS if sessions else GRACE_SECONDS
    return ServerCommand((*words, *passed), health, has_key, tuple(notes), grace)


def _copying(server: LlamaServer, passed: Sequence[str]) -> tuple[str, ...]:
    """The options with which the server copies the weights; RequestError if others say how."""
    for option in map(_spelled, passed):
        if option in _LOADING:
            raise RequestError(f"--huge-pages: cannot be combined with {option} after `--`")
    if not server.copying:
        raise ServerError(
            f"{server.path} ({server.version}): cannot copy the weights; build one that can with "
            "mtp-gguf build-server, or serve without --huge-pages"
        )
    return server.copying


def _check_drafter(
    server: LlamaServer, drafter: Drafter, depth: int | Literal["auto"] | None
) -> None:
    """ServerError if the server cannot draft this way; RequestError for a depth it cannot have."""
    known = (
        server.drafts
        if drafter.spec_type == "draft-mtp"
        else (drafter.spec_type in server.drafters)
    )
    if not known:
        raise ServerError(
            f"{server.path} ({server.version}): does not support {drafter.spec_type}; build one "
            "that does with mtp-gguf build-server, or serve with --no-draft"
        )
    if depth in (AUTO, 0):
        raise RequestError(
            f"--depth {depth}: expected a number from 1 for a drafter that is no MTP head "
            f"({drafter.name}); leave it out for llama-server's own"
        )


def _depth(
    server: LlamaServer, model: ServedModel, tuned: DraftSettings | None, passed: Sequence[str]
) -> int | Literal["auto"]:
    """The depth if the user gives none."""
    if tuned and tuned.depth != AUTO:
        return tuned.depth
    if server.auto and not any(option in passed for option in _STEPWISE):
        return AUTO
    return model.draft_depth


def _tuned_words(tuned: DraftSettings) -> Sequence[str]:
    """The other settings of a profile that differ from llama-server's defaults."""
    values = {
        "--spec-draft-n-vocab": tuned.fastmtp_size,
        "--spec-draft-threads": tuned.draft_threads,
    }
    return [word for option, value in values.items() if value for word in (option, str(value))]


def _check_layouts(server: LlamaServer, model: ServedModel) -> Sequence[str]:
    """Notes on what the server ignores; ServerError if it cannot load the draft vocabulary."""
    if server.fastmtp:
        return ()
    for file in (model.file, model.head_file):
        draft = file.head.draft if file else None
        if file and file.head.ready and draft and draft.layout is not DraftLayout.IDS:
            raise ServerError(
                f"{file.path}: {server.path} cannot load its FastMTP layout "
                f"({draft.layout.value}): build a server that can with "
                "mtp-gguf build-server, or convert with --fastmtp-layout ids"
            )
    if model.draft_layout is DraftLayout.IDS:
        return (
            "this llama-server ignores the file's FastMTP draft vocabulary and drafts over the "
            "whole vocabulary; mtp-gguf build-server builds one that uses it",
        )
    return ()


def _check_shared(server: LlamaServer, model: ServedModel, passed: Sequence[str]) -> None:
    """ServerError for a head that shares its trunk's embedding if the server cannot take it."""
    head = model.head_file
    if head is None or not head.head.shared:
        return
    stepwise = any(option in passed for option in _STEPWISE)
    if server.fused and head.head.ours and not stepwise:
        return
    if model.file.architecture in BLOCKS and not BLOCKS[model.file.architecture].graph:
        return  # a newer server, of which nothing is known here
    why = (
        "llama.cpp's own draft steps cannot"
        if server.fused
        else f"{server.path} ({server.version}) cannot"
    )
    trunk = model.file.path
    raise ServerError(
        f"{head.path} shares the embedding and output of its trunk, which {why}: put the head into "
        f"the model with mtp-gguf graft {quoted(trunk)} --from {quoted(head.path)}"
        + ("" if server.fused else ", build a server that can with mtp-gguf build-server,")
        + " or serve with --no-draft"
    )


def _spelled(word: str) -> str:
    """An option as documented; llama-server also accepts underscores."""
    return word.replace("_", "-") if word.startswith("--") else word


def without_key(words: Sequence[str]) -> list[str]:
    """A command with llama-server's options for a terminal or a log, without the API key."""
    shown = []
    for before, word in zip(("", *words), words, strict=False):
        name, equals, _ = word.partition("=")
        if _spelled(before) == _KEY:
            shown.append("***")
        elif equals and _spelled(name) == _KEY:
            shown.append(f"{name}=***")
        else:
            shown.append(word)
    return shown


def check_access(address: Address, allow_public: bool, passed: Sequence[str]) -> bool:
    """Whether llama-server will ask for an API key.

    passed: the user's llama-server options.

    Raises:
        RequestError: a key is empty, as from a variable that is not set: llama-server drops it and
            asks nobody. Or there is none, and other machines may not use the server without one.

    """
    given = [(_spelled(option), value) for option, value in pairwise(passed)]
    given += [
        (variable, value)
        for variable in (_KEY_VARIABLE, _KEY_FILE_VARIABLE)
        if (value := os.environ.get(variable))  # an empty one is not set, by convention
    ]
    has_key = False
    for origin, value in given:
        if origin in (_KEY, _KEY_VARIABLE):
            if not value.strip(' ,"'):
                raise RequestError(f"{origin}: expected an API key, found {value!r}")
            has_key = True
        elif origin in (_KEY_FILE, _KEY_FILE_VARIABLE):
            _check_key_file(origin, Path(value))
            has_key = True
    if address.public and not allow_public and not has_key:
        raise RequestError(
            f"--host {address.host}: other machines can reach it and there is no API key; "
            "pass one after `--`, as --api-key KEY, or use mtp-gguf serve --allow-public"
        )
    return has_key


def _check_key_file(origin: str, path: Path) -> None:
    """RequestError unless llama-server will read a key from the file at `path`."""
    if not path.is_file():  # a folder or a pipe is read as an empty file
        raise RequestError(f"{origin}: expected a file of API keys, found none at {path}")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RequestError(f"{origin}: {path} cannot be read: {error.strerror}") from None
    if not any(line.strip() and not line.startswith(b"#") for line in lines):
        raise RequestError(f"{origin}: expected an API key in a line of {path}, found none")


def _value(passed: Sequence[str], option: str, variable: str) -> str | None:
    """The value that the server will use: the last one passed, else that of the environment."""
    given = [value for name, value in pairwise(passed) if _spelled(name) == option]
    return given[-1] if given else os.environ.get(variable)
