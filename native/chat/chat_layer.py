"""llama.cpp's chat layer: conversations in a model's chat template, and answers in its format.

`libmtp_chat` (native/chat) has the code that llama-server answers with. It is loaded for the first
conversation, and runs with every llama.cpp that llama_cpp has loaded. An installation without it,
as on Windows, renders conversations with llama_cpp's own code and reads answers as text.
"""

import ctypes
import json
import weakref
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_int, c_int32, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from mtp_gguf.gguf_tools.files.json_text import parse_json

from ..checks.model_file import TEMPLATE_ERRORS, template_fault
from ..errors import LibraryMismatchError, MessagesError, ModelRefusedError, NativeError
from ..runtime import library_file, llama_cpp, native_library

API_VERSION = 2
_TEMPLATE, _ANSWER = 2, 3  # MTP_CHAT_ERROR_TEMPLATE, MTP_CHAT_ERROR_ANSWER
_ERRORS: Mapping[int, type[Exception]] = {_TEMPLATE: ModelRefusedError, _ANSWER: NativeError}
UNLIMITED = -1  # tokens of thinking
# What an installation without the layer refuses: keys of a request, with the names of arguments.
_ONLY_WITH_LAYER: Mapping[str, str] = {
    "tools": "tools",
    "json_schema": "response_format",
    "truncation": "truncation",
    **{name: name for name in ("reasoning_effort", "reasoning_format", "continue_final_message")},
}
_SAMPLER: Any = llama_cpp.llama_cpp.llama_sampler_p_ctypes


@dataclass(frozen=True)
class Rendered:
    """A conversation in a chat template, up to where the answer begins.

    text: of the layer, as JSON.
    """

    text: str

    @cached_property
    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = parse_json(self.text)
        return values

    @property
    def prompt(self) -> str:
        """The conversation as the model reads it, with special tokens as text."""
        return str(self._values["prompt"])

    @property
    def stops(self) -> list[str]:
        """Texts that end the answer, besides the tokens that end every text."""
        return list(self._values["stops"])

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar constrains the answer, or a part of it."""
        return bool(self._values["grammar"])

    @property
    def dropped_messages(self) -> int:
        """How many of the messages were left out, because the conversation outgrew the context."""
        return int(self._values["dropped_messages"])

    @property
    def preserved_tokens(self) -> list[str]:
        """Special tokens that an answer in this format has as text."""
        return list(self._values["preserved_tokens"])


class ChatTemplate:
    """A model's chat template.

    tools_template: the template for conversations with tools, if the model has another one. bos,
    eos: the texts of these tokens. ModelRefusedError if a template is malformed.
    """

    def __init__(
        self, source: str, *, tools_template: str | None = None, bos: str = "", eos: str = ""
    ) -> None:
        self._handle = c_void_p()
        self._formatter: Any = None
        if available():
            texts = map(_bytes, (source, bos, eos))
            weakref.finalize(self, _library().mtp_chat_close, self._handle).atexit = False
            _check(_library().mtp_chat_open(*texts, ctypes.byref(self._handle)))
        else:
            try:
                self._formatter = llama_cpp.llama_chat_format.Jinja2ChatFormatter(
                    template=source, bos_token=bos, eos_token=eos
                )
            except TEMPLATE_ERRORS as error:
                raise ModelRefusedError(template_fault(error)) from None
        self._with_tools = (
            None if tools_template is None else ChatTemplate(tools_template, bos=bos, eos=eos)
        )

    def render(self, request: Mapping[str, Any], model: Any = None, n_ctx: int = 0) -> Rendered:
        """Render a request to llama-server's /v1/chat/completions (include/mtp_chat.h).

        model, n_ctx: the llama_model and its context for a request whose `truncation` is "auto".
        MessagesError, a sentence that names the place, if the request is malformed or if the
        template refuses it.
        """
        if request.get("tools") and self._with_tools is not None:
            return self._with_tools.render(request, model, n_ctx)
        if self._formatter is not None:
            return self._render_text(request)
        try:
            text = json.dumps(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise MessagesError(f"messages: expected values of JSON, found: {error}") from None
        size = c_size_t()
        given = (self._handle, _bytes(text), ctypes.cast(model, c_void_p), n_ctx)
        _check(_library().mtp_chat_render(*given, ctypes.byref(size)))
        return Rendered(_result(_library().mtp_chat_result, self._handle, size.value))

    def _render_text(self, request: Mapping[str, Any]) -> Rendered:
        for key, name in _ONLY_WITH_LAYER.items():
            if request.get(key) not in (None, False, [], {}, "disabled"):
                raise _needs_layer(name)
        messages = request.get("messages")
        if not isinstance(messages, list) or not messages:
            raise MessagesError(f"messages: expected a list of messages, found {messages!r:.80}")
        variables = request.get("chat_template_kwargs") or {}
        try:
            joined = [
                {**message, "content": _joined(message.get("content"))} for message in messages
            ]
            prompt = self._formatter(messages=joined, **variables).prompt
        except Exception as error:  # a template is code from the model file: anything may be raised
            raise MessagesError(
                f"messages: expected what the model's chat template can render, found: {error}"
            ) from None
        values = {
            "prompt": prompt,
            "grammar": "",
            "stops": [],
            "preserved_tokens": [],
            "dropped_messages": 0,
        }
        return Rendered(json.dumps(values))


class AnswerReader:
    """Reads an answer to `rendered` in the format of the model's family, while it is generated."""

    def __init__(self, rendered: Rendered) -> None:
        self._handle = c_void_p()
        self._text = ""
        if available():
            text = _bytes(rendered.text)
            weakref.finalize(self, _library().mtp_chat_answer_close, self._handle).atexit = False
            _check(_library().mtp_chat_answer_open(text, ctypes.byref(self._handle)))

    def add(self, text: str, *, is_last: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Read more text; return the message so far and its changes as deltas of OpenAI's API.

        is_last: whether the answer is complete. NativeError if it is in another format.
        """
        if not self._handle:
            self._text += text
            return {"role": "assistant", "content": self._text}, [{"content": text}] if text else []
        lib, data, size = _library(), _bytes(text), c_size_t()
        _check(lib.mtp_chat_answer_add(self._handle, data, len(data), is_last, ctypes.byref(size)))
        result = parse_json(_result(lib.mtp_chat_answer_result, self._handle, size.value))
        return result["message"], result["deltas"]


@dataclass(frozen=True)
class AnswerSampling:
    """What constrains the tokens of an answer; it stands in for a grammar of llama_cpp.

    thinking_tokens: how many tokens of thinking to allow. end: a text that is put before the end of
    thinking then.
    """

    rendered: Rendered
    thinking_tokens: int = UNLIMITED
    end: str = ""

    def __post_init__(self) -> None:
        if self.thinking_tokens != UNLIMITED and not available():
            raise _needs_layer("reasoning_budget_tokens")

    @property
    def constrains(self) -> bool:
        """Whether there is anything to constrain."""
        return available() and (self.rendered.has_grammar or self.thinking_tokens != UNLIMITED)

    def make(self, model: Any) -> c_void_p:
        """Return a llama_sampler for a llama_model, which the caller frees; NULL for none.

        MessagesError if a grammar cannot express the schemas.
        """
        sampler = c_void_p()
        _check(
            _library().mtp_chat_sampler(
                ctypes.cast(model, c_void_p),
                _bytes(self.rendered.text),
                self.thinking_tokens,
                _bytes(self.end),
                ctypes.byref(sampler),
            )
        )
        return sampler

    def check(self, model: Any) -> None:
        """MessagesError if there is no such sampler for a llama_model."""
        if self.constrains and (made := self.make(model)):
            llama_cpp.llama_sampler_free(ctypes.cast(made, _SAMPLER))


def _needs_layer(name: str) -> MessagesError:
    return MessagesError(
        f"{name}: expected none, because this installation lacks libmtp_chat, found some; use "
        "`mtp-gguf serve`, or an installation that has the library"
    )


def _joined(content: Any) -> Any:
    """The text of a content in parts; any other content as it is."""
    if not isinstance(content, list):
        return content
    return "\n".join(part["text"] for part in content)


def available() -> bool:
    """Whether this installation has the layer; on Windows none is made."""
    return library_file("mtp_chat").is_file()


def sample_answers() -> None:
    """Let llama_cpp's sampler chains take an `AnswerSampling` where they take a grammar."""
    chain: Any = llama_cpp._internals.LlamaSampler
    add_grammar = chain.add_grammar

    def add(sampler: Any, model: Any, grammar: Any) -> None:
        if not isinstance(grammar, AnswerSampling):
            add_grammar(sampler, model, grammar)
        elif made := grammar.make(model.model):
            llama_cpp.llama_sampler_chain_add(sampler.sampler, ctypes.cast(made, _SAMPLER))

    chain.add_grammar = add


def _result(function: Any, handle: c_void_p, size: int) -> str:
    out = ctypes.create_string_buffer(size + 1)
    _check(function(handle, out, len(out)))
    return out.value.decode(errors="replace")


def _bytes(text: str) -> bytes:
    """UTF-8, in which a null character, which ends a text of C, is another one."""
    return text.replace("\0", "\ufffd").encode(errors="replace")


def _check(status: int) -> None:
    if status:
        message = _library().mtp_chat_last_error().decode(errors="replace")
        raise _ERRORS.get(status, MessagesError)(message)


@cache
def _library() -> Any:
    path = native_library("mtp_chat")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryMismatchError(f"{path}: cannot be loaded: {error}") from None
    loaded.mtp_chat_api_version.restype = c_int32
    if (found := loaded.mtp_chat_api_version()) != API_VERSION:
        raise LibraryMismatchError(
            f"{path}: expected version {API_VERSION} of its functions, found {found}; install "
            "mtp-gguf again"
        )
    texts, sizes = c_char_p, POINTER(c_size_t)
    loaded.mtp_chat_last_error.restype = c_char_p
    loaded.mtp_chat_close.restype = loaded.mtp_chat_answer_close.restype = None
    for name, arguments in {
        "open": (texts, texts, texts, POINTER(c_void_p)),
        "close": (c_void_p,),
        "render": (c_void_p, texts, c_void_p, c_size_t, sizes),
        "result": (c_void_p, texts, c_size_t),
        "answer_open": (texts, POINTER(c_void_p)),
        "answer_close": (c_void_p,),
        "answer_add": (c_void_p, texts, c_size_t, c_int, sizes),
        "answer_result": (c_void_p, texts, c_size_t),
        "sampler": (c_void_p, texts, c_int32, texts, POINTER(c_void_p)),
    }.items():
        getattr(loaded, f"mtp_chat_{name}").argtypes = arguments
    return loaded
