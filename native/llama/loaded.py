"""A model that is loaded: its trunk, head and session, and who uses them."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Generator
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from mtp_gguf.gguf_tools.depth_file import depth_file
from mtp_gguf.gguf_tools.errors import MtpGgufError
from mtp_gguf.gguf_tools.machine.huge_pages import read_in_huge_pages
from mtp_gguf.gguf_tools.machine.processors import computing_threads
from mtp_gguf.gguf_tools.model import open_model, shard_paths
from mtp_gguf.gguf_tools.profile import AUTO

from .. import log
from .._bindings import library
from .._interrupts import DeferredInterrupts
from ..checks.head_types import AUTO as AUTO_TYPE
from ..checks.head_types import TypeChoice, choose_type
from ..checks.model_file import TEMPLATE_ERRORS, template_fault
from ..errors import ModelRefusedError, NativeError
from ..head import Head, check_head
from ..libraries.exact import kernels
from ..libraries.replay import keeps_snapshots
from ..lookup_files import open_lookup_files
from ..runtime import llama_cpp, runtime
from ..session import NO_STATS, MtpStats, Rollback, Session
from .model_lock import ModelLock
from .options import Options

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Self = TypeVar("_Self", bound="LoadedModel")


def exclusive(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Run a method under one lease; without a session, run llama_cpp.Llama's own method."""

    @wraps(method)
    def call(llm: Any, /, *args: _P.args, **options: _P.kwargs) -> _R:
        with llm._model_lock.hold():
            llm._check_open()
            return cast("_R", llm._bind(method)(*args, **options))

    return call


def streaming(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Run a generator under one lease, from its first item to its end; otherwise the same."""

    @wraps(method)
    def read(llm: Any, /, *args: _P.args, **options: _P.kwargs) -> _R:
        return cast("_R", llm._under_lease(llm._bind(method)(*args, **options)))

    return read


class LoadedModel(llama_cpp.Llama):
    """A Llama with an MTP head and a session, loaded as an `Options` says.

    What follows uses one of them at a time: a method or stream has the model under a lease.
    """

    _closed = True  # nothing to free before __init__

    def __init__(self, how: Options, given: dict[str, Any], /) -> None:
        """Load trunk and head.

        given: llama_cpp.Llama's arguments. ModelRefusedError, with llama.cpp's last log lines, if a
        model cannot be loaded.
        """
        self._model_lock = ModelLock(wait=how.arguments.busy == "wait")
        self._closed = False
        self._session: Session | None = None
        self._head: Head | None = None
        self._without_session = how.without_session
        self._mode = how.rollback
        self._batches = how.batches
        self._overrides = how.overrides
        self._max_lookup = how.max_lookup
        self._mtp_options = dict(vars(how.arguments))
        self.type_choice: TypeChoice | None = None  # of mtp_type "auto"
        self.depth = how.depth
        self.max_depth = how.max_depth
        try:
            if not given.get("vocab_only") and given.get("use_mmap", True):
                read_in_huge_pages(shard_paths(Path(how.path)))
            # Until llama_cpp owns the objects that llama.cpp creates, an interrupt would leak them.
            with DeferredInterrupts() as self._interrupts:
                self._load(how, given)
        except BaseException:
            self.close()
            raise

    def _load(self, how: Options, given: dict[str, Any]) -> None:
        """Load trunk and head; the two properties below change the trunk's parameters."""
        arguments = how.arguments
        self._head_file = arguments.mtp_head or how.path
        self._head_options: dict[str, Any] = {
            "trunk": how.path if arguments.mtp_head else None,
            "device": how.device,
            "fastmtp_size": arguments.fastmtp_size or 0,
        }
        for name in ("n_threads", "n_threads_batch"):
            given[name] = given.get(name) or computing_threads()
        verbose = given.setdefault("verbose", False)
        log.listen(verbose)
        mtp_type = self._choose_type(how, given) if self.max_depth > 0 else None
        if self.max_depth > 0 and (how.device != "CPU" or mtp_type):
            check_head(self._head_file, **self._head_options, mtp_type=mtp_type)
        try:
            super().__init__(how.path, **given)
        except ValueError as error:
            hint = _layout_hint(Path(how.path))
            raise ModelRefusedError(f"{error}{hint}{log.indented_log()}") from None
        except TEMPLATE_ERRORS as error:
            raise ModelRefusedError(f"{how.path}: {template_fault(error)}") from None
        guessed = not given.get("chat_format") and self.chat_handler is None
        if guessed and "chat_template.default" in self._chat_handlers:
            self.chat_format = "chat_template.default"  # the model's own
        if self.lora_path and not self._lora_adapter:  # a null pointer, which llama_cpp would use
            raise ModelRefusedError(
                f"{self.lora_path}: expected a LoRA adapter that fits {how.path}; llama.cpp "
                f"refused it{log.indented_log()}"
            )
        log.listen(verbose)  # drops the lines of loading, which do not explain later errors
        if self._ctx.memory is None or llama_cpp.llama_model_has_encoder(self._model.model):
            self._without_session = True  # a session needs a decoder with a memory
        if self._without_session:
            return
        # llama.cpp rounds n_ctx up, but llama_cpp.Llama allocates for the requested size.
        self.input_ids = np.zeros(self.n_ctx(), np.intc)
        # Without logits_all nothing is written to scores; a single row is enough for readers.
        self.scores = np.zeros((self.n_ctx() if self._logits_all else 1, self._n_vocab), np.single)
        if self.max_depth > 0:
            self._head_options["n_threads"] = arguments.draft_threads or self.n_threads
            self._head = self._open_head(mtp_type)
            self._stack.callback(self._head.close)
            self._limit_depth(how.path, self._head.max_depth)
        drafts = self.max_depth or self._max_lookup
        if self._mode is Rollback.SNAPSHOT and drafts and not keeps_snapshots(self._ctx.ctx):
            self._mode = Rollback.CHECKPOINT
        self._session = self._open_session(self._head, self.max_depth)
        self._stack.callback(self._session.close)
        self._session.set_costs(how.costs.verify_ms, how.costs.draft_ms)
        if self.depth == AUTO:
            names = (
                *("n_threads", "n_gpu_layers", "type_k", "type_v", "flash_attn", "lora_path"),
                *("split_mode", "tensor_split", "main_gpu"),
            )
            remembered = depth_file(
                [Path(path) for path in (how.path, arguments.mtp_head) if path],
                runtime.folder,
                *(str(given.get(name)) for name in names),
                *(str(value) for value in vars(arguments).values()),
            )
            if remembered:
                self._session.remember_depth(remembered)
        if arguments.lookup_files:
            corpus = open_lookup_files(
                [Path(file) for file in arguments.lookup_files],
                self._session.tokenizer(),
                self._n_vocab,
                lambda text: self.tokenize(text, add_bos=False, special=False),
            )
            self._stack.callback(corpus.close)
            self._session.set_corpus(corpus)

    def _open_head(self, mtp_type: str | None) -> Head:
        """Load the model's head once more, with matrices in this type; the caller closes it."""
        return Head(
            self._head_file,
            **self._head_options,
            n_ctx=self.n_ctx(),
            model=self._model.model,
            mtp_type=mtp_type,
        )

    def _open_session(self, head: Head | None, max_depth: int) -> Session:
        """Open a session of the trunk with a head; the caller closes it."""
        return Session(
            self._ctx.ctx,
            head,
            max_depth=max_depth,
            rollback=self._mode,
            max_rows=self._batches.max_rows,
            min_rows=self._batches.min_rows,
            max_lookup=self._max_lookup,
        )

    def _choose_type(self, how: Options, given: dict[str, Any]) -> str | None:
        """Return the type for the head's matrices; None for as stored. "auto" measures."""
        wanted = how.arguments.mtp_type
        if wanted is None or wanted.lower() != AUTO_TYPE:
            return wanted
        names = ("n_threads", "n_gpu_layers", "split_mode", "tensor_split", "main_gpu")
        self.type_choice = choose_type(
            Path(how.path),
            Path(how.arguments.mtp_head) if how.arguments.mtp_head else None,
            kernels(),
            {
                **{name: given[name] for name in names if given.get(name) is not None},
                "mtp_device": how.device,
                "fastmtp_size": how.arguments.fastmtp_size,
                "draft_threads": how.arguments.draft_threads,
                "n_cpu_moe": how.arguments.n_cpu_moe,
                "tensor_overrides": how.arguments.tensor_overrides,
            },
        )
        return self.type_choice.name

    def _limit_depth(self, model_path: str, most: int) -> None:
        """Draft at most as many tokens as the head can, with a warning if more were asked for."""
        if self.depth != AUTO and self.depth > most:
            warnings.warn(
                f"{model_path}: depth: expected at most {most}, the number of the head's layers, "
                f"each of which drafts one token, found {self.depth}; drafting {most}",
                stacklevel=2,
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
        if not self._without_session:
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
        if not self._without_session:
            params.n_rs_seq = max(drafts, self._batches.min_rows - 1)
        self._context_params = params

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
        return NO_STATS if self._without_session and not self._closed else self.session.stats()

    def is_end(self, token: int) -> bool:
        """Whether a token ends the generation (end of text or end of turn)."""
        return bool(llama_cpp.llama_vocab_is_eog(self._model.vocab, token))

    def close(self) -> None:
        """Free session, head, context and model; a second call does nothing.

        While another thread uses the session, NativeError is raised and nothing is freed.
        """
        # Python would print and drop an interrupt that is handled inside a destructor.
        with DeferredInterrupts():
            if self._session is not None:
                self._session.close()
            if hasattr(self, "_stack"):
                self._abandon_failed_context()
                super().close()
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

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> Any:
        """Return the constructor's arguments, which is how llama_cpp.Llama is pickled."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, **self._mtp_options}

    def stop(self) -> None:
        """End the generation that another thread runs; without one, nothing happens.

        It ends after the step that is being computed, or after the batch of its prompt. The
        completion has the text so far, and "stop" as its finish_reason.
        """
        self._model_lock.stop()

    def _bind(self, method: Any) -> Any:
        """Bind a method to this model, or llama_cpp.Llama's method if there is no session."""
        return getattr(super(), method.__name__) if self._without_session else method.__get__(self)

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


class _Closed:
    """Stands in for freed objects: any attribute access raises an error."""

    def __getattr__(self, name: str) -> Any:
        raise NativeError("the model is closed")


_CLOSED: Any = _Closed()


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
