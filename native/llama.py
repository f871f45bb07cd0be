"""llama_cpp.Llama with multi-token prediction: the same constructor and the same methods."""

from __future__ import annotations

import atexit
import ctypes
import os
import secrets
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from difflib import get_close_matches
from functools import partial, wraps
from inspect import Parameter, signature
from itertools import groupby
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.depth_file import depth_file
from mtp_gguf.gguf_tools.errors import FormatError, MtpGgufError
from mtp_gguf.gguf_tools.hub.resolve import local_gguf
from mtp_gguf.gguf_tools.machine.processors import computing_threads
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.profile import (
    AUTO,
    AUTO_MAX_DEPTH,
    FROM_TEXT,
    LOOKUP_TOKENS,
    Costs,
    DraftSettings,
    find_profile,
)

from . import log
from ._bindings import MAX_DEPTH, library
from ._interrupts import DeferredInterrupts
from .answer import Answer
from .chat_answer import ChatAnswer
from .chat_layer import AnswerSampling, ChatTemplate, Rendered, sample_answers
from .chat_request import ChatRequest
from .checkpoint import Checkpoint, CheckpointKind
from .errors import ContextFullError, ModelRefusedError, NativeError
from .exact import Batches, exact_batches, has_attention, kernels
from .head import Head, check_head
from .json_schema import schema_grammar
from .logprobs import ROWS, TokenLogprobs
from .lookup_files import open_lookup_files
from .model_file import TEMPLATE_ERRORS, check_adapter, check_trunk, template_fault
from .model_lock import ModelLock
from .offload import (
    check_device,
    check_gpu_layers,
    check_split,
    idle_cpu_moe,
    last_gpu,
    missing_gpu,
)
from .offload import tensor_overrides as override_array
from .prompt_checkpoints import PromptCheckpoints
from .prompt_reuse import PromptReuse, explain
from .python_server import answer_mistakes_with_400, take_what_clients_send
from .replay import keeps_snapshots, looks_up_by_default, looks_up_without_head
from .runtime import llama_cpp, runtime
from .session import NO_STATS, MtpStats, Rollback, Session
from .session_file import SessionHeader, read_session, write_session
from .session_folder import SessionFolder, shared_length
from .session_identity import check_identity, identity_of
from .session_store import DEFAULT_BYTES, SessionStore
from .state_cache import StateCache

_P = ParamSpec("_P")
_R = TypeVar("_R")

take_what_clients_send()
sample_answers()

DISABLE_VARIABLE = "MTP_GGUF_DISABLE"

# For prompts with at least this many new tokens the recurrent state is copied. The copy is made a
# margin before the end of the prompt: when the chat continues, its template may render the last few
# tokens differently. The margin is still large enough for an efficient batch.
MIN_CHECKPOINTED_PROMPT = 256
CHECKPOINT_MARGIN = 64
# Agents call tools several times between two messages of a user, and templates then drop the
# thoughts of all of these calls. Each copy takes 150 MiB with a model of 27B.
DEFAULT_PROMPTS = 4
# Options for what llama_cpp.Llama does without generating text.
_WITHOUT_SESSION = ("vocab_only", "embedding")
LOGITS_BYTES = 256 << 20  # that a batch may take whose tokens all get log-probabilities


def _exclusive(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Run a method under one lease; without a session, run llama_cpp.Llama's own method."""

    @wraps(method)
    def call(llm: Any, /, *args: _P.args, **options: _P.kwargs) -> _R:
        with llm._model_lock.hold():
            llm._check_open()
            return cast("_R", llm._bind(method)(*args, **options))

    return call


def _streaming(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Run a generator under one lease, from its first item to its end; otherwise the same."""

    @wraps(method)
    def read(llm: Any, /, *args: _P.args, **options: _P.kwargs) -> _R:
        return cast("_R", llm._under_lease(llm._bind(method)(*args, **options)))

    return read


class MTPLlama(llama_cpp.Llama):
    """A Llama that drafts with the model's MTP head and verifies with its trunk.

    model_path: a GGUF, or one on the hub (`OWNER/NAME:QUANT`, `hf://OWNER/NAME/FILE`), which is
    downloaded into huggingface_hub's cache with its shards. If it has no head, but only one
    head-only file `mtp-*.gguf` beside it fits, that is its head, here as on the hub.

    Arguments besides those of llama_cpp.Llama:

    - depth: tokens drafted in each cycle, 0 (no drafting) to 16, or "auto" to choose the fastest
      depth up to max_depth in each cycle. A head of several layers drafts a token with each; a
      larger depth is lowered to their number, with a warning. MTP_GGUF_DISABLE=1 in the
      environment sets it to 0.
    - rollback: "snapshot", "checkpoint", "two-phase" or "host".
    - exact: make greedy output byte-identical at every depth; NativeError if something prevents
      that. docs/native.md says what it costs.
    - rejection: accept drafts by rejection sampling if the sampler is a plain chain of top-k,
      top-p, min-p and temperature. False: accept only equal tokens, which gives the same
      tokens as a run without drafts with the same seed.
    - fastmtp_size: how much of a ranked draft vocabulary to use; 0 for all, -1 for none. A file
      without one gets a list of this size when it is loaded; 0 for the default size.
    - mtp_head: another file to take the head from, local or on the hub.
    - mtp_device: ggml's name of the device for the head (default: that of the trunk's last layer).
    - split_mode, tensor_split, main_gpu: llama_cpp.Llama's, for several GPUs.
    - n_cpu_moe: keep the experts of the trunk's first so many layers on the CPU, for a model that
      does not fit on the GPU. The head's are where the head is.
    - tensor_overrides: ggml's name of a device for each regular expression, such as
      {"ffn_.*_exps": "CPU"}; tensors of the trunk in whose names it is found are kept there. The
      first that is found decides, before n_cpu_moe.
    - draft_threads: CPU threads of the head; 0 for as many as the trunk uses.
    - keep_prompt: how many copies of the recurrent state to keep in host memory and session files,
      each near the end of a long prompt. A later prompt with the same beginning continues there
      instead of at its start. 0 for none.
    - session_dir: a folder of sessions. A conversation is written there when another one takes its
      place, when the model is closed and when Python ends; a prompt is continued from the session
      there that holds the most of it. docs/sessions.md has the rules.
    - session_size: bytes of all sessions in session_dir; the least recently used are removed.
    - lookup_files: your own text files, and folders of them, to draft from as well; this implies
      lookup. They are indexed once, in the user's cache.
    - lookup: also draft from the text itself, up to 14 tokens at a time, if a copy of earlier text
      promises more tokens per millisecond than the head; this works without a head, too. On by
      default with depth "auto" if the libraries replay (docs/native.md), and without a head if the
      model has attention only; otherwise rollback "snapshot" needs memory for 14 snapshots.

    depth, rollback, fastmtp_size and draft_threads default to the model's profile, if `mtp-gguf
    tune` has written one for this file and machine (profile=False ignores it), otherwise to "auto",
    "snapshot", 0 and 0. With "auto" the depth depends on measured times. Runs that must reproduce
    every token need a fixed depth, or exact and temperature 0.

    n_threads and n_threads_batch default to the performance cores that this process may use, also
    in a container with a quota (llama_cpp: half of and all of the machine's processors).

    flash_attn is on by default if the trunk runs on a CPU with the patched libraries, whose kernels
    are faster with it.

    A model without a head drafts from the text, with a warning that says why. One that cannot do
    that either (recurrent states without replay, lookup=False, embedding=True, vocab_only=True) is
    run by llama_cpp.Llama's own methods; if depth is a number or exact is set, HeadMissingError or
    NativeError is raised instead. depth=0 decodes any model
    without drafts. Raises ModelRefusedError, with llama.cpp's last log lines, if a model cannot be
    loaded. Close it, or use contextlib.closing.
    """

    _closed = True  # nothing to free before __init__

    def __init__(
        self,
        model_path: str,
        *,
        depth: int | Literal["auto"] | None = None,
        max_depth: int = AUTO_MAX_DEPTH,
        rollback: str | None = None,
        exact: bool = False,
        rejection: bool = True,
        fastmtp_size: int | None = None,
        mtp_head: str | None = None,
        mtp_device: str | None = None,
        n_cpu_moe: int = 0,
        tensor_overrides: Mapping[str, str] | None = None,
        keep_prompt: int = DEFAULT_PROMPTS,
        draft_threads: int | None = None,
        profile: bool = True,
        busy: Literal["wait", "raise"] = "wait",
        lookup: bool | None = None,
        lookup_files: Sequence[str | os.PathLike[str]] = (),
        session_dir: str | os.PathLike[str] | None = None,
        session_size: int = DEFAULT_BYTES,
        **options: Any,
    ) -> None:
        _check_names(type(self), options)
        answer_mistakes_with_400()
        self._model_lock = ModelLock(wait=busy == "wait")
        self._closed = False
        self._session: Session | None = None
        self._head: Head | None = None
        self._prompts = PromptCheckpoints(int(keep_prompt))
        self._store: SessionStore | None = None
        self._record: TokenLogprobs | None = None
        self._preserved: frozenset[int] = frozenset()  # special tokens that answers have as text
        self._templates: dict[str, ChatTemplate] = {}
        self._n_tokens = self._pictures = 0
        self._prompt_reuse: PromptReuse | None = None
        if busy not in ("wait", "raise"):
            raise NativeError(f'busy: expected "wait" or "raise", found {busy!r}')
        if isinstance(lookup_files, str | bytes | os.PathLike):
            raise NativeError(f"lookup_files: expected a list of paths, found {lookup_files!r}")
        if keep_prompt < 0:
            raise NativeError(f"keep_prompt: expected 0 or more, found {keep_prompt}")
        if session_size < 1:
            raise NativeError(f"session_size: expected 1 byte or more, found {session_size}")
        if session_dir is not None and options.get("logits_all"):
            raise NativeError("session_dir: expected logits_all=False, found True")
        folder = None if session_dir is None else SessionFolder(Path(session_dir), session_size)
        looks_up = lookup or bool(lookup_files)
        self._lookup_files = [Path(path) for path in lookup_files]
        if options.get("draft_model") is not None:
            raise NativeError("draft_model: expected None, because the model drafts with its head")
        if runtime.note:
            warnings.warn(runtime.note, stacklevel=2)
        check_gpu_layers(options.get("n_gpu_layers", 0))
        if mtp_device is not None:
            check_device("mtp_device", mtp_device)
        self._overrides = override_array(n_cpu_moe, tensor_overrides or {})
        check_split(options)
        library()  # rejects an incompatible llama.cpp before anything is loaded
        device = last_gpu(options)
        found = local_gguf(str(model_path), with_head=mtp_head is None and depth != 0)
        model_path = str(found.path)
        if mtp_head is not None:
            mtp_head = str(local_gguf(str(mtp_head), with_head=False).path)
        elif found.head is not None:
            mtp_head = str(found.head)
        architecture = check_trunk(Path(model_path))
        if adapter := options.get("lora_path"):
            check_adapter(Path(adapter), architecture)
        asked = (depth, fastmtp_size, rollback, draft_threads)
        settings, costs = _settings(Path(model_path), device, profile, *asked)
        depth = settings.depth
        if os.environ.get(DISABLE_VARIABLE, "") not in ("", "0"):
            depth = 0
        if depth != AUTO and not (isinstance(depth, int) and 0 <= depth <= MAX_DEPTH):
            raise NativeError(f'depth: expected 0 to {MAX_DEPTH} or "auto", found {depth!r}')
        if not 0 <= max_depth <= MAX_DEPTH:
            raise NativeError(f"max_depth: expected 0 to {MAX_DEPTH}, found {max_depth}")
        optional = asked[0] in (None, AUTO) and not exact and depth != 0
        why = _why_plain(Path(model_path), options, look_for_head=optional and mtp_head is None)
        self._mode = Rollback.parse(settings.rollback)
        if why is not None and not any(map(options.get, _WITHOUT_SESSION)):  # for lack of a head
            if lookup is None:
                gpu_layers = options.get("n_gpu_layers", 0)
                looks_up |= looks_up_without_head(Path(model_path), self._mode, gpu_layers)
            if looks_up or folder is not None:
                source = "only from the text" if looks_up else "nothing"
                _warn(model_path, f"{why}; drafting {source}")
                why, depth = None, 0
        self._plain = why is not None  # llama_cpp.Llama's methods run it, without a session
        if self._plain and depth != 0:
            if not optional:
                raise NativeError(f"{why}: expected a plain llama_cpp.Llama, or depth=0 with it")
            _warn(model_path, f"{why}; decoding without drafts, as llama_cpp.Llama does")
            depth = 0
        batch = _batch_size(options)
        # A batch holds a token and its drafts; with snapshots llama.cpp needs room for one more.
        room = max(batch - (2 if self._mode is Rollback.SNAPSHOT else 1), 0)
        if optional and room < (max_depth if depth == AUTO else depth):
            _warn(model_path, f"batches of {batch} tokens have room for {room} drafts")
            max_depth, depth = room, depth if room and depth == AUTO else room
        if not self._plain:
            _choose_attention(options, device)
        self.depth = depth
        self.max_depth = max_depth if depth == AUTO else depth
        if lookup is None:
            gpu_layers = options.get("n_gpu_layers", 0)
            looks_up |= looks_up_by_default(architecture, depth, self._mode, gpu_layers)
        self._max_lookup = min(LOOKUP_TOKENS, room) if looks_up and not self._plain else 0
        self._rejection = rejection
        self._origin = 0
        self._mtp_options = {
            "depth": settings.depth,
            "max_depth": max_depth,
            "rollback": settings.rollback,
            "exact": exact,
            "rejection": rejection,
            "fastmtp_size": settings.fastmtp_size,
            "mtp_head": mtp_head,
            "mtp_device": mtp_device,
            "n_cpu_moe": n_cpu_moe,
            "tensor_overrides": tensor_overrides,
            "keep_prompt": keep_prompt,
            "draft_threads": settings.draft_threads,
            "profile": False,
            "busy": busy,
            "lookup": lookup,
            "lookup_files": self._lookup_files,
            "session_dir": session_dir,
            "session_size": session_size,
        }
        self._batches = Batches()
        if exact:
            two_phase = self._mode is Rollback.TWO_PHASE
            if not two_phase and set((tensor_overrides or {}).values()) - {"CPU"}:
                raise NativeError("exact: expected no tensor_overrides to a GPU, found some")
            self._batches = exact_batches(Path(model_path), options, two_phase=two_phase)
        if no_gpu := missing_gpu("n_gpu_layers=", options.get("n_gpu_layers", 0)):
            warnings.warn(no_gpu, stacklevel=2)
        try:
            # Until llama_cpp owns the objects that llama.cpp creates, an interrupt would leak them.
            with DeferredInterrupts() as self._interrupts:
                self._load(model_path, mtp_head, mtp_device or device, settings, costs, options)
            if folder is not None:
                self._open_store(folder)
        except BaseException:
            self.close()
            raise
        if idle := idle_cpu_moe(n_cpu_moe, options.get("n_gpu_layers", 0), self.metadata):
            warnings.warn(idle, stacklevel=2)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: list[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: bool | Literal["auto"] = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> MTPLlama:
        """Download a GGUF of the hub and load it; same arguments as llama_cpp.Llama's.

        filename: the file's name or a glob pattern, which only one model may match; None for its
        Q4_K_M or only one. All shards are downloaded, and the head-only file beside a model that
        has no head. local_dir_use_symlinks is ignored, as in huggingface_hub.
        RemoteError says why a download failed.
        """
        from mtp_gguf.gguf_tools.hub.hub_gguf import Folders, fetch_matching  # noqa: PLC0415  (slow)

        _check_names(cls, kwargs)
        head = kwargs.get("mtp_head")
        path, beside = fetch_matching(
            repo_id,
            filename,
            additional_files or [],
            Folders(
                *(None if path is None else os.fspath(path) for path in (local_dir, cache_dir))
            ),
            with_head=head is None and kwargs.get("depth") != 0,
        )
        if beside is not None:
            kwargs["mtp_head"] = str(beside)
        return cls(model_path=str(path), **kwargs)

    def _load(
        self,
        model_path: str,
        mtp_head: str | None,
        device: str,
        settings: DraftSettings,
        costs: Costs,
        options: dict[str, Any],
    ) -> None:
        """Load trunk and head; the two properties below change the trunk's parameters."""
        for name in ("n_threads", "n_threads_batch"):
            options[name] = options.get(name) or computing_threads()
        verbose = options.setdefault("verbose", False)
        log.listen(verbose)
        if self.max_depth > 0 and device != "CPU":
            check_head(
                mtp_head or model_path,
                trunk=model_path if mtp_head else None,
                device=device,
                fastmtp_size=settings.fastmtp_size,
            )
        try:
            super().__init__(model_path, **options)
        except ValueError as error:
            hint = _layout_hint(Path(model_path))
            raise ModelRefusedError(f"{error}{hint}{log.indented_log()}") from None
        except TEMPLATE_ERRORS as error:
            raise ModelRefusedError(f"{model_path}: {template_fault(error)}") from None
        if not options.get("chat_format"):
            self._choose_format()
        if self.lora_path and not self._lora_adapter:  # a null pointer, which llama_cpp would use
            raise ModelRefusedError(
                f"{self.lora_path}: expected a LoRA adapter that fits {model_path}; llama.cpp "
                f"refused it{log.indented_log()}"
            )
        log.listen(verbose)  # drops the lines of loading, which do not explain later errors
        if self._ctx.memory is None or llama_cpp.llama_model_has_encoder(self._model.model):
            self._plain = True  # a session needs a decoder with a memory
        if self._plain:
            return
        # llama.cpp rounds n_ctx up, but llama_cpp.Llama allocates for the requested size.
        self.input_ids = np.zeros(self.n_ctx(), np.intc)
        # Without logits_all nothing is written to scores; a single row is enough for readers.
        self.scores = np.zeros((self.n_ctx() if self._logits_all else 1, self._n_vocab), np.single)
        if self.max_depth > 0:
            self._head = Head(
                mtp_head or model_path,
                trunk=model_path if mtp_head else None,
                device=device,
                n_threads=settings.draft_threads or self.n_threads,
                n_ctx=self.n_ctx(),
                fastmtp_size=settings.fastmtp_size,
                model=self._model.model,
            )
            self._stack.callback(self._head.close)
            self._limit_depth(model_path, self._head.max_depth)
        drafts = self.max_depth or self._max_lookup
        if self._mode is Rollback.SNAPSHOT and drafts and not keeps_snapshots(self._ctx.ctx):
            self._mode = Rollback.CHECKPOINT
        self._session = Session(
            self._ctx.ctx,
            self._head,
            max_depth=self.max_depth,
            rollback=self._mode,
            max_rows=self._batches.max_rows,
            min_rows=self._batches.min_rows,
            max_lookup=self._max_lookup,
        )
        self._stack.callback(self._session.close)
        self._session.set_costs(costs.verify_ms, costs.draft_ms)
        if self.depth == AUTO:
            names = (
                *("n_threads", "n_gpu_layers", "type_k", "type_v", "flash_attn", "lora_path"),
                *("split_mode", "tensor_split", "main_gpu"),
            )
            remembered = depth_file(
                [Path(path) for path in (model_path, mtp_head) if path],
                runtime.folder,
                *(str(options.get(name)) for name in names),
                *(str(value) for value in self._mtp_options.values()),
            )
            if remembered:
                self._session.remember_depth(remembered)
        if self._lookup_files:
            corpus = open_lookup_files(
                self._lookup_files,
                self._session.tokenizer(),
                self._n_vocab,
                lambda text: self.tokenize(text, add_bos=False, special=False),
            )
            self._stack.callback(corpus.close)
            self._session.set_corpus(corpus)

    def _choose_format(self) -> None:
        """Use the model's own template where llama_cpp has guessed a format of its own for it."""
        if "chat_template.default" in self._chat_handlers and self.chat_handler is None:
            self.chat_format = "chat_template.default"

    def _limit_depth(self, model_path: str, most: int) -> None:
        """Draft at most as many tokens as the head can, with a warning if more were asked for."""
        if self.depth != AUTO and self.depth > most:
            _warn(
                model_path,
                f"depth: expected at most {most}, the number of the head's layers, each of which "
                f"drafts one token, found {self.depth}; drafting {most}",
            )
            self.depth = most
        self.max_depth = min(self.max_depth, most)

    # llama_cpp.Llama's constructor sets these two; there is no other way to change the parameters.

    @property
    def model_params(self) -> Any:
        """llama.cpp's model parameters; with a session the trunk has no MTP layer."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        if not self._plain:
            params.load_mtp = False
        interrupts = self._interrupts
        self._progress = llama_cpp.llama_progress_callback(lambda *_: not interrupts.will_raise)
        params.progress_callback = self._progress
        if len(self._overrides) > 1:
            params.tensor_buft_overrides = ctypes.addressof(self._overrides)
        if not self._batches.repacked:
            params.use_extra_bufts = False
        self._model_params = params

    @property
    def context_params(self) -> Any:
        """llama.cpp's context parameters, with the snapshots that rollback needs."""
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        most = max(self.max_depth, self._max_lookup)
        drafts = most if self._mode is Rollback.SNAPSHOT else 0
        if not self._plain:
            params.n_rs_seq = max(drafts, self._batches.min_rows - 1)
        self._context_params = params

    @property
    def n_tokens(self) -> int:
        """Number of evaluated positions; llama_cpp's handlers set it after a picture."""
        return self._n_tokens

    @n_tokens.setter
    def n_tokens(self, length: int) -> None:
        session = self._session
        if session is not None and not session.closed and length > session.length():
            held = llama_cpp.llama_memory_seq_pos_max(self._ctx.memory, 0) + 1
            if held > session.length():
                self._follow(length)
        if length != self._n_tokens:
            self._requires_eval = True  # the logits are those of another token
        self._n_tokens = length

    @property
    def session(self) -> Session:
        """The underlying session; NativeError if the model is closed or has none."""
        if self._session is None:
            if self._closed:
                raise NativeError("the model is closed")
            raise NativeError("the model has no session, because it runs without drafts")
        return self._session

    @property
    def head(self) -> Head | None:
        """The MTP head, or None if drafting is off."""
        return self._head

    @property
    def mtp_stats(self) -> MtpStats:
        """Drafting statistics since the model was loaded or `session.reset_stats()`."""
        return NO_STATS if self._plain and not self._closed else self.session.stats()

    @property
    def prompt_reuse(self) -> PromptReuse | None:
        """How much of the last prompt was evaluated already, and why no more; None before one.

        A prompt of a completion with `echo` and `logprobs` is evaluated anew and is not counted.
        """
        return self._prompt_reuse

    @property
    def token_origin(self) -> int:
        """The origin of the last token that `generate` yielded.

        0: the trunk; i: the i-th draft of the head; -1: a draft from the text.
        """
        return self._origin

    def is_end(self, token: int) -> bool:
        """Whether a token ends the generation (end of text or end of turn)."""
        return bool(llama_cpp.llama_vocab_is_eog(self._model.vocab, token))

    def close(self) -> None:
        """Free session, head, context and model; a second call does nothing.

        While another thread uses the session, NativeError is raised and nothing is freed.
        """
        # Python would print and drop an interrupt that is handled inside a destructor.
        with DeferredInterrupts():
            self._close_store()
            if self._session is not None:
                self._session.close()
            if hasattr(self, "_stack"):
                self._abandon_failed_context()
                super().close()
            self._prompts.close()
            self._session = None
            self._head = None
            # llama_cpp.Llama's methods use these and would otherwise access freed memory.
            self._model = self._ctx = self._batch = self.tokenizer_ = _CLOSED
            self._closed = True
            self._model_lock.release_all()

    def _abandon_failed_context(self) -> None:
        """Keep llama_cpp from freeing a context whose device has failed, which would abort."""
        held = None if self._closed else getattr(self, "_ctx", None)
        if held is not None and held.ctx is not None:
            pointer = ctypes.cast(held.ctx, ctypes.c_void_p)
            if library().mtp_context_has_failed(pointer):
                held.ctx = None

    def __del__(self) -> None:
        if not self._closed:
            self.close()

    def __enter__(self) -> MTPLlama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------- llama_cpp.Llama's API

    @_exclusive
    def reset(self) -> None:
        """Forget all tokens."""
        self.n_tokens = 0
        self._requires_eval = True
        self.session.remove(0)

    @_exclusive
    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after those evaluated so far; ContextFullError if they do not fit."""
        self._sync_session()
        for batch in self._batches_of(tokens):
            self._decode(batch, all_logits=self._logits_all)

    def _decode(self, batch: Sequence[int], *, all_logits: bool) -> None:
        self.session.decode(batch, all_logits=all_logits)
        at = self.n_tokens
        self.input_ids[at : at + len(batch)] = batch
        if self._logits_all:
            for i in range(len(batch)):
                self._store_scores(at + i, i)
        self.n_tokens += len(batch)
        self._requires_eval = False

    def sample(self, *args: Any, idx: int | None = None, **options: Any) -> Any:
        """Sample a token after the last evaluated one, as llama_cpp.Llama.sample does.

        NativeError if its logits are not there, as after `load_state` or `generate`. llama_cpp's
        methods, which run a model without a session, call this, too.
        """
        with self._model_lock.hold():
            self._check_open()
            self._check_logits("sample")
            token = super().sample(*args, **{**options, "idx": idx})
            if self._record is not None and self._plain and idx is not None:
                self._record_scores(self._record, idx, token)
            return token

    def _check_logits(self, method: str) -> None:
        if self._requires_eval:
            raise NativeError(
                f"{method}: expected the logits of the last token, which a loaded state, `reset` "
                "and `generate` do not leave, found none; call eval first"
            )

    @property
    def eval_logits(self) -> deque[list[float]]:
        """The logits of all evaluated tokens with logits_all=True, else those of the last one.

        NativeError if these are not there, as for `sample`.
        """
        with self._model_lock.hold():
            self._check_open()
            if self._logits_all:
                return super().eval_logits
            self._check_logits("eval_logits")
            return deque([self._logits(-1).tolist()], maxlen=1)

    embed = _exclusive(llama_cpp.Llama.embed)
    # llama_cpp's handlers of pictures evaluate the prompt here, in several steps.
    _answer_chat = _exclusive(llama_cpp.Llama.create_chat_completion)

    def create_chat_completion(
        self, *args: Any, max_completion_tokens: int | None = None, **options: Any
    ) -> Any:
        """Answer a conversation with llama-server's chat layer; arguments of llama_cpp.Llama's.

        messages: as OpenAI's clients send them. tools, tool_choice: "none", "auto", "required" or a
        function by name; calls are read from the answer in the format of the model's family.
        response_format: of OpenAI's API or of llama-server. MessagesError names the place where a
        request is malformed, or what the model's chat template refuses.

        Further arguments, which llama-server has, too: parallel_tool_calls; reasoning_effort;
        reasoning_format, "deepseek" (thinking is `reasoning_content`) or "none" (it is part of the
        content); reasoning_budget_tokens, the most tokens of thinking, after which
        reasoning_budget_message and the end of thinking follow; chat_template_kwargs, variables of
        the template; chat_template, another template than the model's; add_generation_prompt and
        continue_final_message; max_completion_tokens, OpenAI's name of `max_tokens`; truncation,
        "auto" to leave out the oldest turns of a conversation that does not fit the context, whose
        number of messages is the answer's `dropped_messages`.

        With `chat_handler` or a `chat_format` of llama_cpp's own, that answers, as in llama_cpp.
        """
        if max_completion_tokens is not None:
            if options.get("max_tokens") is not None:
                raise NativeError(
                    "max_completion_tokens: expected it or max_tokens, found both; leave out one"
                )
            options["max_tokens"] = max_completion_tokens
        if not self._has_layer(options.get("chat_template")):
            if options.get("logprobs") and options.get("top_logprobs") is None:
                options["top_logprobs"] = 0  # llama_cpp would ignore logprobs
            return self._answer_chat(*args, **options)
        request = ChatRequest(*args, **options)
        with self._model_lock.hold():
            self._check_open()
            if request.schema is not None:
                read_grammar(self, "response_format", schema_grammar(request.schema))
            rendered, tokens = self._render_chat(request)
            function = None
            if request.must_call and not rendered.has_grammar:
                layer, function = request.with_arguments_only()
                rendered = self._rendered(request.template, layer)
            sampling = AnswerSampling(rendered, request.thinking_tokens, request.end)
            sampling.check(self._model.model)
            given = request.completion
            answer = ChatAnswer(rendered, function)
            completion: Any = self.create_completion(
                prompt=tokens,
                **{
                    **given,
                    "stop": [*given["stop"], *rendered.stops],
                    "grammar": given["grammar"] or sampling,
                },
            )
            return answer.stream(completion) if given["stream"] else answer.whole(completion)

    def count_chat_tokens(self, *args: Any, **options: Any) -> int:
        """Return how many tokens `create_chat_completion` reads as its prompt with these arguments.

        Nothing is evaluated. MessagesError as there; NativeError if the model has no chat template.
        """
        if not self._has_layer(options.get("chat_template")):
            raise NativeError(
                "count_chat_tokens: expected a model with a chat template, found none; pass one as "
                "chat_template"
            )
        request = ChatRequest(*args, **options)
        with self._model_lock.hold():
            self._check_open()
            return len(self._render_chat(request)[1])

    def _has_layer(self, template: str | None) -> bool:
        """Whether llama-server's chat layer answers, rather than a handler of llama_cpp."""
        own = self.chat_handler is None and self.chat_format in self._chat_handlers
        return own or template is not None

    def _render_chat(self, request: ChatRequest) -> tuple[Rendered, list[int]]:
        """Return a rendered conversation and its tokens."""
        rendered = self._rendered(request.template, request.layer)
        return rendered, self.tokenize(rendered.prompt.encode(), add_bos=False, special=True)

    def _rendered(self, template: str | None, layer: dict[str, Any]) -> Rendered:
        return self.chat_template(template).render(layer, self._model.model, self.n_ctx())

    def chat_template(self, source: str | None = None) -> ChatTemplate:
        """Return a chat template for this model; its own, or one with another source.

        ModelRefusedError if it is malformed.
        """
        key = self.chat_format if source is None else ""
        if key in self._templates:
            return self._templates[key]
        tools = None
        if source is None:
            default = key == "chat_template.default"
            source = self.metadata["tokenizer.chat_template" if default else f"tokenizer.{key}"]
            tools = self.metadata.get("tokenizer.chat_template.tool_use") if default else None
        bos, eos = (
            "" if token == -1 else self._model.token_get_text(token)
            for token in (self.token_bos(), self.token_eos())
        )
        made = ChatTemplate(source, tools_template=tools, bos=bos, eos=eos)
        if key:
            self._templates[key] = made
        return made

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the text of tokens; in an answer with those that its format has as text."""
        if special or self._preserved.isdisjoint(tokens):
            return bytes(super().detokenize(tokens, prev_tokens, special))
        return b"".join(
            super(MTPLlama, self).detokenize([*group], prev_tokens, preserved)
            for preserved, group in groupby(tokens, self._preserved.__contains__)
        )

    def _create_completion(
        self,
        *args: Any,
        max_tokens: int | None = 16,
        logprobs: int | None = None,
        echo: bool = False,
        stream: bool = False,
        stopping_criteria: Any = None,
        **options: Any,
    ) -> Generator[Any, None, None]:
        """Complete a prompt; a `max_tokens` of 0 evaluates it only, negative ones have no limit."""
        if logprobs is not None and logprobs < 0:
            raise NativeError(f"logprobs: expected 0 or more, found {logprobs}")
        nothing = max_tokens == 0
        criteria = [lambda *_: nothing or self._model_lock.stopped, *(stopping_criteria or ())]
        record = None
        if logprobs is not None and (self._logits_all or not self._plain):
            record, logprobs = TokenLogprobs(logprobs, prompt=echo), None
        grammar, preserved = options.get("grammar"), frozenset[int]()
        if isinstance(grammar, AnswerSampling):
            preserved = self.single_tokens(grammar.rendered.preserved_tokens)
            options["grammar"] = grammar if grammar.constrains else None
        options |= {
            "max_tokens": 1 if nothing else max_tokens,
            "logprobs": logprobs,  # llama_cpp says what a model without a session needs for them
            "stream": stream,
            "stopping_criteria": llama_cpp.StoppingCriteriaList(criteria),
        }
        chunks: Any = super()._create_completion(*args, **options)
        prompt = args[0] if args else options["prompt"]
        answer = Answer(self, prompt, record, echo=echo, nothing=nothing)
        read = answer.stream(chunks) if stream else answer.whole(chunks)
        return self._under_lease(self._recorded(record, preserved, read))

    def _recorded(
        self,
        record: TokenLogprobs | None,
        preserved: frozenset[int],
        chunks: Generator[Any, None, None],
    ) -> Generator[Any, None, None]:
        """Collect log-probabilities in `record` while a completion is read.

        preserved: special tokens that its text has.
        """
        self._record, self._preserved = record, preserved
        try:
            yield from chunks
        finally:
            self._record, self._preserved = None, frozenset()

    def single_tokens(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the tokens of those texts that are a token each, special ones included."""
        found = (self.tokenize(text.encode(), add_bos=False, special=True) for text in texts)
        return frozenset(tokens[0] for tokens in found if len(tokens) == 1)

    def stop(self) -> None:
        """End the generation that another thread runs; without one, nothing happens.

        It ends after the step that is being computed, or after the batch of its prompt. The
        completion has the text so far, and "stop" as its finish_reason.
        """
        self._model_lock.stop()

    def _bind(self, method: Any) -> Any:
        """Bind a method to this model, or llama_cpp.Llama's method if there is no session."""
        return getattr(super(), method.__name__) if self._plain else method.__get__(self)

    def _under_lease(self, inner: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
        """Read a stream under one lease; it ends when another call takes the model."""
        if self._model_lock.is_ours():
            yield from inner
            return
        lease = self._model_lock.acquire(inner.close)
        try:
            answer = None
            while True:
                self._check_open()
                with self._model_lock.run(lease):
                    try:
                        item = inner.send(answer)
                    except StopIteration:
                        return
                answer = yield item
        finally:
            inner.close()
            self._model_lock.release(lease)

    def _check_open(self) -> None:
        if self._closed:
            raise NativeError("the model is closed")

    @_streaming
    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        grammar: Any = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield the tokens that follow `tokens`, as llama_cpp.Llama.generate does, with drafting.

        Each token is an accepted draft or was chosen by the sampler; the distribution is the same
        as without drafting.
        """
        if grammar is not None and not isinstance(grammar, AnswerSampling):
            read_grammar(self, "grammar", grammar._grammar)
        failures: list[BaseException] = []
        with DeferredInterrupts():
            self._sampler = self._init_sampler(
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                typical_p=typical_p,
                temp=temp,
                repeat_penalty=repeat_penalty,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                tfs_z=tfs_z,
                mirostat_mode=mirostat_mode,
                mirostat_tau=mirostat_tau,
                mirostat_eta=mirostat_eta,
                penalize_nl=penalize_nl,
                logits_processor=_guarded(logits_processor, failures),
                grammar=grammar,
            )
        # Greedy decoding needs no table of candidates.
        greedy = (
            temp == 0.0
            and repeat_penalty == 1.0
            and frequency_penalty == 0.0 == presence_penalty
            and logits_processor is None
            and grammar is None
        )
        # Rejection sampling requires a chain whose distribution is known.
        by_rejection = (
            self._rejection
            and self.depth != 0
            and temp > 0.0
            and typical_p == 1.0
            and mirostat_mode == 0
            and repeat_penalty == 1.0
            and frequency_penalty == 0.0 == presence_penalty
            and logits_processor is None
            and grammar is None
            and not self._logits_all
            and self._record is None
            and self._head is not None
            and self._head.draws
        )
        if by_rejection:
            seed = secrets.randbits(64) if _is_random(self._seed) else self._seed
            self.session.set_sampling(temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        # Python has to see each token before the next one is sampled, or has to store its scores.
        record = self._record
        stepwise = logits_processor is not None or self._logits_all or record is not None
        try:
            if record is not None and record.wants_prompt:
                self._eval_recorded(list(tokens), record)
            elif reset:
                self._eval_prompt(self._reuse_prefix(list(tokens)), keep=self._prompts.most > 0)
            else:
                self._eval_prompt(tokens, keep=False)
            if self._model_lock.stopped:
                return
            if self._requires_eval:
                raise NativeError("prompt: expected at least one token, found none")
            forced: Sequence[int] | None = None
            while True:
                self._requires_eval = True  # after a cycle the logits are not the last token's
                sampled = self._sample_on(greedy, by_rejection, stepwise, failures)
                try:
                    for token in sampled:
                        if self._model_lock.stopped:
                            return
                        if stopping_criteria is not None and stopping_criteria(
                            self._input_ids, self._scores[-1, :]
                        ):
                            return
                        forced = yield token
                        if forced:
                            break
                finally:
                    sampled.close()
                self.eval([token, *(forced or ())])
        finally:
            self._drop_unread()

    @_exclusive
    def set_cache(self, cache: Any) -> None:
        """Set llama_cpp's cache of states, such as LlamaRAMCache or LlamaDiskCache; None: no cache.

        A completion continues from the state with the most tokens of its prompt. States of other
        models and settings are not used. `session_dir` does the same without pickled files.
        """
        super().set_cache(None if cache is None else StateCache(self, cache))

    @_exclusive
    def save_state(self) -> Any:
        """Return llama_cpp.Llama's state, with that of the drafts as bytes in `mtp_head`.

        `mtp_earlier` has the checkpoints of earlier prompts by length, if the model is recurrent.
        """
        self._sync_session()
        state: Any = super().save_state()
        state.mtp_logits_all = self._logits_all
        state.mtp_head = b""
        fed = self._head is not None and self._head.next_position()
        if fed or (self._max_lookup and self.session.length()):
            with self.session.save(CheckpointKind.HEAD) as saved:
                state.mtp_head = saved.to_bytes()
        state.mtp_earlier = self._prompts.to_arrays(self.session) if self.session.length() else {}
        return state

    @_exclusive
    def load_state(self, state: Any) -> None:
        """Load a state, with that of the drafts if it has one (llama_cpp.Llama's states have none).

        Raises ContextFullError if it has more tokens than the context, RuntimeError if llama.cpp
        rejects the state, which leaves nothing evaluated, and NativeError if it lacks logits that
        this model needs, if it has fewer tokens than it says, or if the part of the drafts is
        rejected, which leaves the trunk's state loaded.
        """
        if state.n_tokens > self.n_ctx():
            raise ContextFullError(
                f"load_state: n_ctx: expected at least the {state.n_tokens} tokens of the state, "
                f"found {self.n_ctx()}"
            )
        if self._logits_all and not getattr(state, "mtp_logits_all", True):
            raise NativeError(
                "load_state: expected the state of a model with logits_all=True, found one without "
                "the logits of its tokens"
            )
        loaded = copy(state)
        loaded.input_ids = np.zeros(self.n_ctx(), np.intc)  # the state's may be of another n_ctx
        loaded.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
        loaded.scores = state.scores[-len(self.scores) :]  # as many rows as there is room for
        try:
            super().load_state(loaded)
        except BaseException:
            self.session.sync()
            self.reset()
            raise
        self.session.sync()
        if self.session.length() < state.n_tokens:
            length = self.session.length()
            self.reset()
            raise NativeError(
                f"load_state: expected a state of {state.n_tokens} tokens, found one of {length}"
            )
        drafting = getattr(state, "mtp_head", b"")
        if drafting and (self._head is not None or self._max_lookup):
            with Checkpoint.from_bytes(drafting) as saved:
                self.session.restore(saved)
        earlier = getattr(state, "mtp_earlier", {})
        self._prompts.load(self.session, list(earlier), list(earlier.values()))

    def save_session(
        self, path: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Write the evaluated tokens and all that the model computed for them to a file.

        extra: a JSON object that `load_session` returns. An older file stays as it was until the
        new one is complete. Raises NativeError if nothing is evaluated, and OutputError if the file
        cannot be written. docs/sessions.md describes the file.
        """
        with self._model_lock.hold():
            self._check_open()
            session = self.session
            self._sync_session()
            tokens = self._input_ids
            if len(tokens) == 0:
                raise NativeError("save_session: expected evaluated tokens, found none")
            with session.save(CheckpointKind.WHOLE) as saved:
                data = saved.to_array()
            earlier = self._prompts.to_arrays(session)
            write_session(Path(path), tokens, data, identity_of(self), extra or {}, earlier)

    def load_session(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Replace what is evaluated by the session in a file; return its `extra`.

        A prompt that begins with the session's tokens is read from their end. Pictures get new ids,
        because those of another process may mean others here. Raises FormatError
        for a damaged file, RequestError for the session of another model or of other settings, and
        ContextFullError for more tokens than the context holds. All of them leave the model usable.
        """
        with self._model_lock.hold():
            self._check_open()
            session = self.session
            if self._logits_all:
                raise NativeError("load_session: expected logits_all=False, found True")
            file = Path(path)

            def check(header: SessionHeader) -> None:
                check_identity(file, header.identity, identity_of(self))
                if header.n_tokens >= self.n_ctx():
                    raise ContextFullError(
                        f"{file}: n_ctx: expected more than the {header.n_tokens} tokens of the "
                        f"session, found {self.n_ctx()}"
                    )

            saved = read_session(file, check)
            if saved.tokens.max() >= self._n_vocab:
                raise FormatError(
                    f"{file}: tokens: expected ids below {self._n_vocab}, found "
                    f"{saved.tokens.max()}"
                )
            try:
                with Checkpoint.from_bytes(saved.checkpoint, borrow=True) as checkpoint:
                    length, kind = checkpoint.length, checkpoint.kind
                    if length != len(saved.tokens) or kind is not CheckpointKind.WHOLE:
                        raise FormatError(
                            f"{file}: checkpoint: expected a whole one of {len(saved.tokens)} "
                            f"tokens, found {kind.name.lower()} of {length}"
                        )
                    session.restore(checkpoint)
            except NativeError as error:
                if session.length() != self._n_tokens:
                    self.reset()
                raise type(error)(f"{file}: {error}") from None
            try:
                self._prompts.load(session, saved.header.earlier, saved.earlier)
            except NativeError as error:
                self.reset()
                raise type(error)(f"{file}: {error}") from None
            self.input_ids[:length] = saved.tokens
            for picture in np.unique(saved.tokens[saved.tokens < 0]):
                self._pictures += 1
                self.input_ids[:length][saved.tokens == picture] = -self._pictures
            self._n_tokens = length
            self._requires_eval = True
            return saved.header.extra

    def __getstate__(self) -> Any:
        """Return the constructor's arguments, which is how llama_cpp.Llama is pickled."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, **self._mtp_options}

    # ---------------------------------------------------------------------- implementation

    def _reuse_prefix(self, tokens: list[int]) -> list[int]:
        """Reuse the longest evaluated prefix of `tokens` if possible; return the other tokens.

        At least one token is returned if its logits are needed. The recurrent state can be rolled
        back only by a few tokens or to the prompt's checkpoint; otherwise everything is evaluated
        again.
        """
        if not self._requires_eval and tokens == self._input_ids.tolist():
            self._prompt_reuse = PromptReuse(len(tokens), len(tokens), "")
            return []  # the last token's logits are available
        common = shared_length(self._input_ids, tokens[:-1])
        kept, shared, unfit = self.n_tokens, common, ""
        if self._store is not None and self.n_tokens - common >= MIN_CHECKPOINTED_PROMPT:
            self._store_session()
            common = min(common, self.n_tokens)
        while 0 < common < self.n_tokens and self.input_ids[common - 1] == self._cut(common):
            common -= 1  # to the beginning of a picture
        if 0 < common < self.session.length():
            common = self._shorten(common)
        if self._store is not None and len(tokens) - common >= MIN_CHECKPOINTED_PROMPT:
            self._n_tokens = common
            common, unfit = self._store.load(self, tokens, common)
        _check_text(tokens[common:])
        if common == 0:
            self.reset()
        self.n_tokens = common
        self._requires_eval = True
        self._prompt_reuse = explain(len(tokens), common, kept, shared, unfit)
        return tokens[common:]

    def _shorten(self, most: int) -> int:
        """Cut the session to `most` tokens, or to the last checkpoint before; return its length.

        0 if there is none: the session is then as it was, or empty.
        """
        try:
            self.session.remove(most)
        except NativeError:
            return self._prompts.restore(self.session, most)
        return most

    def _open_store(self, folder: SessionFolder) -> None:
        """Write sessions to a folder, also when Python ends without closing the model."""
        if self._plain:
            raise NativeError("session_dir: expected a model with a session, found one without")
        self._store = SessionStore(self, folder)
        self._at_exit = partial(_store_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def _close_store(self) -> None:
        if self._store is not None:
            atexit.unregister(self._at_exit)
            if self._session is not None and not self._session.closed:
                self._store_session()
            self._store = None

    def _store_session(self) -> None:
        """Write a long enough conversation to session_dir, before its place is taken.

        A sliding window can be continued only from where it was written. The next prompt may render
        the last answer differently, as without its thoughts, so the session is written a second
        time as of the prompt's checkpoint, where this leaves it.
        """
        if self._store is None or self.n_tokens < MIN_CHECKPOINTED_PROMPT:
            return
        self._store.store(self)
        length = self._prompts.restore(self.session, self.n_tokens) if self._store.windowed else 0
        if length:
            self.n_tokens = length
            self._requires_eval = True
            if length >= MIN_CHECKPOINTED_PROMPT:
                self._store.store(self)

    def _sync_session(self) -> None:
        """Remove tokens beyond n_tokens: a stream may have stopped between accepted drafts.

        If the recurrent state cannot be rolled back that far, all tokens are evaluated again.
        """
        if self.session.length() == self.n_tokens:
            return
        try:
            self.session.remove(self.n_tokens)
        except NativeError:
            tokens = self._input_ids.tolist()
            self.session.remove(0)
            if min(tokens, default=0) < 0:
                self.n_tokens = 0
            _check_text(tokens)
            if tokens:
                self.session.decode(tokens)

    def _cut(self, position: int) -> int | None:
        """The picture's id if `position` is in one; else None."""
        found = int(self.input_ids[position])
        return found if found < 0 else None

    def _follow(self, length: int) -> None:
        """Follow llama_cpp's handlers, which evaluate pictures without the session.

        length: positions from here on are free. The positions of a picture get an id of its own, so
        that no prompt takes it for another one or for text.
        """
        known = self.session.length()
        self.session.skip(length)
        self._pictures += 1
        self.input_ids[known:length] = -self._pictures
        self._requires_eval = True

    def _batches_of(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """Yield tokens in batches.

        The session decodes no more at once, and llama.cpp has the logits of the last batch only.
        """
        most = min(self.n_batch, llama_cpp.llama_n_ubatch(self._ctx.ctx))
        for start in range(0, len(tokens), most):
            yield list(tokens[start : start + most])

    def _eval_prompt(self, tokens: Sequence[int], *, keep: bool) -> None:
        """Evaluate a prompt, until `stop` is called.

        keep: if it is long, save a checkpoint for the next prompt.
        """
        if keep and len(tokens) >= MIN_CHECKPOINTED_PROMPT:
            self._eval_until_stopped(tokens[:-CHECKPOINT_MARGIN])
            if self._model_lock.stopped:
                return
            self._prompts.add(self.session, self.session.save(CheckpointKind.HOST))
            tokens = tokens[-CHECKPOINT_MARGIN:]
        self._eval_until_stopped(tokens)

    def _eval_until_stopped(self, tokens: Sequence[int]) -> None:
        self._sync_session()
        for batch in self._batches_of(tokens):
            self.eval(batch)
            if self._model_lock.stopped:
                return

    def _eval_recorded(self, tokens: list[int], record: TokenLogprobs) -> None:
        """Evaluate a prompt from its beginning and record the log-probabilities of its tokens."""
        _check_text(tokens)
        self._store_session()
        self.reset()
        if tokens:
            record.begin_prompt(tokens[0])
        most = max(LOGITS_BYTES // (4 * self._n_vocab), 1)
        for start in range(0, len(tokens), most):
            for batch in self._batches_of(tokens[start : start + most]):
                at = self.n_tokens
                self._decode(batch, all_logits=True)
                following = tokens[at + 1 : at + 1 + len(batch)]
                for first in range(0, len(following), ROWS):
                    some = following[first : first + ROWS]
                    rows = [self._logits(first + i) for i in range(len(some))]
                    record.add_prompt(np.stack(rows), some)
                if self._model_lock.stopped:
                    return

    def _sample_on(
        self, greedy: bool, by_rejection: bool, stepwise: bool, failures: list[BaseException]
    ) -> Generator[int, None, None]:
        """Yield tokens endlessly, starting from the logits of the last decode.

        When a token is yielded, n_tokens and input_ids hold everything before it. failures:
        exceptions of logits processors that were raised inside the sampler; re-raised here.
        """
        session = self.session
        sampler: Any = self._sampler
        if greedy:
            token = session.argmax()
        elif by_rejection:
            token = session.sample()
        else:
            token = self._sample(-1)
        if failures:
            raise failures[0]
        record = self._record
        if record is not None:
            record.add_generated(self._logits(-1), token)
        while True:
            self._origin = 0
            yield token
            at = self.n_tokens
            if not stepwise:
                if by_rejection:
                    new = session.step_sampled(token, self.depth)
                else:
                    chain = None if greedy else sampler.sampler
                    new = session.step(token, self.depth, sampler=chain)
                self.input_ids[at : at + len(new)] = [token, *new[:-1]]
                step = 0 if len(new) > 1 and session.origin(1) == FROM_TEXT else 1
                self._origin = 0 if step else FROM_TEXT
                for token in new[:-1]:
                    self._origin += step
                    self._n_tokens += 1
                    yield token
                self._n_tokens += 1
                token = new[-1]
                continue
            drafts = session.begin(token, self.depth)
            self.input_ids[at] = token
            accepted = 0
            try:
                while True:
                    row = session.row(accepted)
                    if self._logits_all:
                        self._store_scores(at + accepted, row)
                    self._n_tokens = at + 1 + accepted
                    token = session.argmax(row) if greedy else self._sample(row)
                    if failures:
                        raise failures[0]
                    if record is not None:
                        record.add_generated(self._logits(row), token)
                    if accepted == len(drafts) or token != drafts[accepted]:
                        break
                    self._origin = session.origin(accepted + 1)
                    yield token
                    self.input_ids[self.n_tokens] = token
                    accepted += 1
            finally:
                if not session.closed:
                    session.end(accepted)

    def _sample(self, row: int) -> int:
        """Sample a token. An interrupt in Python code that is called from C would be lost."""
        sampler: Any = self._sampler
        self.session.argmax(row)  # raises an error if the logits contain NaNs
        with DeferredInterrupts():
            token: int = sampler.sample(self._ctx, row)
        return token

    def _record_scores(self, record: TokenLogprobs, at: int, token: int) -> None:
        """Record a token that follows position `at` of a model without a session."""
        if record.wants_prompt and not record.prompt:
            ids = self.input_ids[: at + 1].tolist()
            record.begin_prompt(ids[0])
            for first in range(0, at, ROWS):
                some = slice(first, min(first + ROWS, at))
                record.add_prompt(self.scores[some], ids[some.start + 1 : some.stop + 1])
        record.add_generated(self.scores[at], token)

    def _logits(self, row: int) -> NDArray[np.float32]:
        """The logits of a row of the last batch, valid until the next one; -1 is the last row."""
        logits = llama_cpp.llama_get_logits_ith(self._ctx.ctx, row)
        return np.ctypeslib.as_array(logits, shape=(self._n_vocab,))

    def _store_scores(self, position: int, row: int) -> None:
        self.scores[position, :] = self._logits(row)

    def _drop_unread(self) -> None:
        """After a generation, remove accepted tokens that were not read, if that is possible."""
        if self._session is None or self._session.closed:
            return
        with suppress(NativeError):
            self._session.remove(self.n_tokens)


def _store_at_exit(model: weakref.ref[MTPLlama]) -> None:
    llm = model()
    if llm is not None and not llm._closed:
        llm._close_store()


def _check_text(tokens: Sequence[int]) -> None:
    """NativeError if tokens stand for a picture, which can only be evaluated by its handler."""
    if min(tokens, default=0) < 0:
        raise NativeError(
            "prompt: expected text, found the place of a picture that is no longer in the context; "
            "ask with the picture again"
        )


def read_grammar(llm: MTPLlama, name: str, text: str) -> Any:
    """Return a GBNF grammar for `llm`; NativeError, which begins with `name`, if it is malformed.

    llama_cpp would go on without a sampler, and crash.
    """
    vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
    sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, text.encode(), b"root")
    if not sampler:
        raise NativeError(
            f"{name}: llama.cpp cannot read the grammar; it must define `root` and all rules that "
            "it uses, repeat nothing more than 2,000 times, and not be left-recursive"
        )
    llama_cpp.llama_sampler_free(sampler)
    return llama_cpp.llama_grammar.LlamaGrammar.from_string(text, verbose=False)


class _Closed:
    """Stands in for freed objects: any attribute access raises an error."""

    def __getattr__(self, name: str) -> Any:
        raise NativeError("the model is closed")


_CLOSED: Any = _Closed()


# Names that llama_cpp.Llama ignores: LangChain passes those of earlier versions, its server others.
_IGNORED = ("f16_kv", "low_vram", "mul_mat_q", "n_gqa", "n_parts", "rms_norm_eps", "rpc_servers")


def _check_names(model: type[MTPLlama], names: Iterable[str]) -> None:
    """TypeError for names of keyword arguments that no constructor of the class has."""
    known = {
        name
        for base in model.__mro__
        for name, parameter in signature(base).parameters.items()
        if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    }
    for name in names:
        if name not in known and name not in _IGNORED:
            near = get_close_matches(name, sorted(known), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{model.__name__}: expected arguments of MTPLlama and llama_cpp.Llama, found "
                f"{name!r}{hint}"
            )


def _settings(
    model: Path,
    device: str,
    use_profile: bool,
    depth: int | Literal["auto"] | None,
    fastmtp_size: int | None,
    rollback: str | None,
    draft_threads: int | None,
) -> tuple[DraftSettings, Costs]:
    """Return the settings: the given arguments, else the profile's, else the defaults."""
    found, note = find_profile(model, kernels(), device) if use_profile else (None, None)
    if note:
        warnings.warn(note, stacklevel=3)
    base = found.settings if found else DraftSettings()
    settings = DraftSettings(
        base.depth if depth is None else depth,
        base.fastmtp_size if fastmtp_size is None else fastmtp_size,
        base.rollback if rollback is None else rollback,
        base.draft_threads if draft_threads is None else draft_threads,
    )
    return settings, found.costs if found else Costs()


def _warn(model: str, text: str) -> None:
    warnings.warn(f"{model}: {text}", stacklevel=3)


def _batch_size(options: dict[str, Any]) -> int:
    """Return the batch size of a context with these llama_cpp.Llama options."""
    given = (options.get(name, 512) for name in ("n_ctx", "n_batch", "n_ubatch"))
    return min((n for n in given if n), default=512)


def _why_plain(model: Path, options: dict[str, Any], *, look_for_head: bool) -> str | None:
    """Return why a model must run without a session or head; None if it need not.

    Unreadable files are left to llama.cpp, which reports them.
    """
    for name in _WITHOUT_SESSION:
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


def _layout_hint(model: Path) -> str:
    """Say how to load a draft vocabulary that stock llama.cpp cannot load; "" for others."""
    try:
        with open_model(model) as opened:
            head = opened.head.report
    except (MtpGgufError, OSError):
        return ""
    if head.draft is None or head.stock:
        return ""
    return (
        f"; its draft vocabulary is stored as a {head.draft.layout.value}, which only a patched "
        "llama.cpp can load: `mtp-gguf info` says why the patches do not run; or load its trunk "
        "and pass this file as mtp_head"
    )


def _is_random(seed: int) -> bool:
    """Whether a seed means "random" to llama.cpp's samplers: -1 as an unsigned 32-bit number."""
    return seed % 2**32 == llama_cpp.LLAMA_DEFAULT_SEED


def _guarded(processors: Any, failures: list[BaseException]) -> Any:
    """Wrap logits processors to record exceptions, which cannot propagate through C."""
    if processors is None:
        return None

    def guard(processor: Any) -> Any:
        def call(ids: Any, scores: Any) -> Any:
            try:
                return processor(ids, scores)
            except BaseException as error:  # Ctrl-C too
                failures.append(error)
                return scores

        return call

    return llama_cpp.LogitsProcessorList([guard(processor) for processor in processors])


def _choose_attention(options: dict[str, Any], device: str) -> None:
    """Turn flash attention on by default where it is faster.

    It is with the patched kernels (docs/verification.md). Stock llama.cpp's flash attention is
    slower on a CPU than attention by matrix products.
    """
    if device == "CPU" and has_attention():
        options.setdefault("flash_attn", True)
