"""How a model is loaded: MTPLlama's arguments, checked against the file and the machine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from mtp_gguf.gguf_tools.errors import MtpGgufError
from mtp_gguf.gguf_tools.hub.resolve import local_gguf
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.profile import AUTO, LOOKUP_TOKENS, Costs, DraftSettings, find_profile

from .._bindings import MAX_DEPTH, library
from ..checks.head_types import AUTO as AUTO_TYPE
from ..checks.head_types import type_without_drafts
from ..checks.model_file import check_adapter, check_name, check_trunk
from ..errors import NativeError
from ..libraries.exact import Batches, exact_batches, has_attention, kernels
from ..libraries.offload import check_device, check_gpu_layers, check_split, last_gpu, missing_gpu
from ..libraries.offload import tensor_overrides as override_array
from ..libraries.replay import looks_up_by_default, looks_up_without_head
from ..runtime import runtime
from ..session import Rollback

DISABLE_VARIABLE = "MTP_GGUF_DISABLE"

# llama.cpp rounds n_ctx up to a multiple of this, but after limiting batches to what was asked for.
_CONTEXT_STEP = 256
# Options for what llama_cpp.Llama does without generating text.
_NO_TEXT_OPTIONS = ("vocab_only", "embedding")


@dataclass(frozen=True)
class Arguments:
    """MTPLlama's arguments besides those of llama_cpp.Llama."""

    depth: int | Literal["auto"] | None
    max_depth: int
    rollback: str | None
    exact: bool
    rejection: bool
    fastmtp_size: int | None
    mtp_head: str | None
    mtp_type: str | None
    mtp_device: str | None
    n_cpu_moe: int
    tensor_overrides: Mapping[str, str] | None
    keep_prompt: int
    draft_threads: int | None
    profile: bool
    busy: Literal["wait", "raise"]
    lookup: bool | None
    lookup_files: Sequence[str | os.PathLike[str]]
    session_dir: str | os.PathLike[str] | None
    session_size: int

    def check(self, given: Mapping[str, Any]) -> None:
        """NativeError for values that no model can be loaded with.

        given: llama_cpp.Llama's arguments.
        """
        if self.busy not in ("wait", "raise"):
            raise NativeError(f'busy: expected "wait" or "raise", found {self.busy!r}')
        if isinstance(self.lookup_files, str | bytes | os.PathLike):
            raise NativeError(
                f"lookup_files: expected a list of paths, found {self.lookup_files!r}"
            )
        if self.keep_prompt < 0:
            raise NativeError(f"keep_prompt: expected 0 or more, found {self.keep_prompt}")
        if self.session_size < 1:
            raise NativeError(f"session_size: expected 1 byte or more, found {self.session_size}")
        if not isinstance(self.mtp_type, str | None):
            raise NativeError(
                f"mtp_type: expected a name of a type, or {AUTO_TYPE}, found {self.mtp_type!r}"
            )
        if self.session_dir is not None and given.get("logits_all"):
            raise NativeError("session_dir: expected logits_all=False, found True")
        if given.get("draft_model") is not None:
            raise NativeError("draft_model: expected None, because the model drafts with its head")


@dataclass(frozen=True)
class Options:
    """How a model is loaded.

    device: ggml's name of the head's device. without_session: whether llama_cpp.Llama's own methods
    run the model. max_depth, max_lookup: the most drafts of the head, and of the text; 0 for none.
    overrides: tensors that are kept on other devices, as llama.cpp reads them. arguments: with the
    values of the model's profile, or the defaults, for those that were not given.
    """

    path: str
    device: str
    without_session: bool
    depth: int | Literal["auto"]
    max_depth: int
    max_lookup: int
    rollback: Rollback
    costs: Costs
    batches: Batches
    overrides: Any
    arguments: Arguments


def resolve(model: str, asked: Arguments, given: dict[str, Any]) -> Options:
    """Return how MTPLlama loads a model with these arguments; warns of what it cannot do.

    given: llama_cpp.Llama's arguments; defaults of ours are added.
    """
    asked.check(given)
    if runtime.note:
        warnings.warn(runtime.note, stacklevel=3)
    n_gpu_layers = given.get("n_gpu_layers", 0)
    check_gpu_layers(n_gpu_layers)
    if asked.mtp_device is not None:
        check_device("mtp_device", asked.mtp_device)
    overrides = override_array(asked.n_cpu_moe, asked.tensor_overrides or {})
    check_split(given)
    library()  # rejects an incompatible llama.cpp before anything is loaded
    device = last_gpu(given)
    found = local_gguf(str(model), with_head=asked.mtp_head is None and asked.depth != 0)
    path, model = found.path, str(found.path)
    mtp_head = None if found.head is None else str(found.head)
    if asked.mtp_head is not None:
        mtp_head = str(local_gguf(str(asked.mtp_head), with_head=False).path)
    check_name(path)
    architecture = check_trunk(path)
    if adapter := given.get("lora_path"):
        check_adapter(Path(adapter), architecture)
    settings, costs = _settings(path, device, asked)
    depth = settings.depth
    if os.environ.get(DISABLE_VARIABLE, "") not in ("", "0"):
        depth = 0
    if depth != AUTO and not (isinstance(depth, int) and 0 <= depth <= MAX_DEPTH):
        raise NativeError(f'depth: expected 0 to {MAX_DEPTH} or "auto", found {depth!r}')
    if not 0 <= asked.max_depth <= MAX_DEPTH:
        raise NativeError(f"max_depth: expected 0 to {MAX_DEPTH}, found {asked.max_depth}")
    rollback = Rollback.parse(settings.rollback)
    looks_up = asked.lookup or bool(asked.lookup_files)
    optional = asked.depth in (None, AUTO) and not asked.exact and depth != 0
    why = _why_no_session(path, given, look_for_head=optional and mtp_head is None)
    if why is not None and not any(map(given.get, _NO_TEXT_OPTIONS)):  # for lack of a head
        if asked.lookup is None:
            looks_up |= looks_up_without_head(path, rollback, n_gpu_layers)
        if looks_up or asked.session_dir is not None:
            source = "only from the text" if looks_up else "nothing"
            _warn(model, f"{why}; drafting {source}")
            why, depth = None, 0
    if why is not None and depth != 0:
        if not optional:
            raise NativeError(f"{why}: expected a plain llama_cpp.Llama, or depth=0 with it")
        _warn(model, f"{why}; decoding without drafts, as llama_cpp.Llama does")
        depth = 0
    if why is None and 0 < (given.get("n_ctx") or 0) < _CONTEXT_STEP:
        given["n_ctx"] = _CONTEXT_STEP
    batch = _batch_size(given)
    # A batch holds a token and its drafts; with snapshots llama.cpp needs room for one more.
    room = max(batch - (2 if rollback is Rollback.SNAPSHOT else 1), 0)
    max_depth = asked.max_depth
    if optional and room < (max_depth if depth == AUTO else depth):
        _warn(model, f"batches of {batch} tokens have room for {room} drafts")
        max_depth, depth = room, depth if room and depth == AUTO else room
    # Stock llama.cpp's flash attention is slower on a CPU than attention by matrix products; that
    # of the patched kernels is faster (docs/verification.md).
    if why is None and device == "CPU" and has_attention():
        given.setdefault("flash_attn", True)
    if asked.lookup is None:
        looks_up |= looks_up_by_default(architecture, depth, rollback, n_gpu_layers)
    batches = Batches()
    if asked.exact:
        two_phase = rollback is Rollback.TWO_PHASE
        if not two_phase and set((asked.tensor_overrides or {}).values()) - {"CPU"}:
            raise NativeError("exact: expected no tensor_overrides to a GPU, found some")
        batches = exact_batches(path, given, two_phase=two_phase)
    if no_gpu := missing_gpu("n_gpu_layers=", n_gpu_layers):
        warnings.warn(no_gpu, stacklevel=3)
    most = max_depth if depth == AUTO else depth
    if asked.mtp_type is not None and not most:
        warnings.warn(type_without_drafts("mtp_type", asked.mtp_type), stacklevel=3)
    return Options(
        model,
        asked.mtp_device or device,
        why is not None,
        depth,
        most,
        min(LOOKUP_TOKENS, room) if looks_up and why is None else 0,
        rollback,
        costs,
        batches,
        overrides,
        replace(
            asked,
            **asdict(settings),
            max_depth=max_depth,
            mtp_head=mtp_head,
            profile=False,
            lookup_files=[Path(file) for file in asked.lookup_files],
        ),
    )


def _settings(model: Path, device: str, asked: Arguments) -> tuple[DraftSettings, Costs]:
    """Return the settings: the given arguments, else the profile's, else the defaults."""
    found, note = find_profile(model, kernels(), device) if asked.profile else (None, None)
    if note:
        warnings.warn(note, stacklevel=4)
    base = found.settings if found else DraftSettings()
    given = {f.name: getattr(asked, f.name) for f in fields(DraftSettings)}
    settings = replace(base, **{name: v for name, v in given.items() if v is not None})
    return settings, found.costs if found else Costs()


def _warn(model: str, text: str) -> None:
    warnings.warn(f"{model}: {text}", stacklevel=4)  # where MTPLlama is constructed


def _batch_size(options: dict[str, Any]) -> int:
    """Return the batch size of a context with these llama_cpp.Llama options."""
    given = (options.get(name, 512) for name in ("n_ctx", "n_batch", "n_ubatch"))
    return min((n for n in given if n), default=512)


def _why_no_session(model: Path, options: dict[str, Any], *, look_for_head: bool) -> str | None:
    """Return why a model must run without a session or head; None if it need not.

    Unreadable files are left to llama.cpp, which reports them.
    """
    for name in _NO_TEXT_OPTIONS:
        if options.get(name):
            return f"{name}=True"
    if not look_for_head:
        return None
    try:
        with open_model(model) as opened:
            report = opened.head.report
    except (MtpGgufError, OSError):
        return None
    if report.ready and not report.ours:
        return f"architecture {opened.architecture} drafts with llama-server only (mtp-gguf serve)"
    return None if report.ready else report.reason
