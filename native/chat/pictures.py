"""Prompts with pictures: llama_cpp's handler of vision towers evaluates them for a MTPLlama."""

import base64
import ctypes
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.errors import RequestError, raising
from mtp_gguf.gguf_tools.profile import identify

from ..checks.model_file import check_name
from ..errors import ContextFullError
from ..llama.mtp_llama import MTPLlama
from ..runtime import llama_cpp
from .generate import Renderer

LARGEST_PICTURE = 64 << 20  # bytes of a file
_DATA_URL = "data:image/*;base64,"
# The handler's errors for a full context; a picture takes more cells of it than positions.
_FULL = ("Prompt exceeds n_ctx", "Failed to evaluate chunk")
_ERROR = 4  # GGML_LOG_LEVEL_ERROR


class Pictures:
    """The vision tower of a model, from an mmproj file; it is loaded for the first picture.

    Messages are OpenAI's: the content of one with pictures is a list of parts, such as
    `{"type": "text", "text": "…"}` and the ones that `read` returns.
    """

    def __init__(self, llm: MTPLlama, mmproj: Path) -> None:
        check_name(mmproj)
        self._llm = llm
        self._handler: Any = llama_cpp.llama_chat_format.MTMDChatHandler(
            clip_model_path=str(mmproj), verbose=False, use_gpu=llm.model_params.n_gpu_layers != 0
        )
        _keep_log_quiet(self._handler._mtmd_cpp)
        # The last conversation up to the end of its last picture: `_digest`, and ids.
        self._known = ""
        self._ids: list[int] = []
        self._sizes: dict[str, int] = {}  # tokens of pictures, by URL

    def read(self, path: Path) -> dict[str, Any]:
        """Return the picture in a file as a part of a message.

        RequestError if the file cannot be read, or has no picture in a format that llama.cpp reads.
        """
        with raising(RequestError, f"{path}: cannot be read"), path.open("rb") as file:
            data = file.read(LARGEST_PICTURE + 1)
        if not 0 < len(data) <= LARGEST_PICTURE:
            raise RequestError(
                f"{path}: expected a picture of 1 to {LARGEST_PICTURE} bytes, found {len(data)} "
                "or more"
            )
        self._load()
        try:
            bitmap = self._handler._create_bitmap_from_bytes(data)
        except ValueError:
            raise RequestError(
                f"{path}: expected a picture, such as a PNG or JPEG, found something else"
            ) from None
        self._handler._mtmd_cpp.mtmd_bitmap_free(bitmap)
        url = _DATA_URL + base64.b64encode(data).decode()
        return {"type": "image_url", "image_url": {"url": url}}

    def prompt(
        self, messages: Sequence[dict[str, Any]], render: Renderer, **variables: Any
    ) -> tuple[str, list[int]]:
        """Return a conversation with pictures as text and as the ids for `MTPLlama.generate`.

        The pictures are evaluated at once; a conversation that continues the one in the context
        keeps them there. Their places have negative ids. render: of the model's chat template, with
        `variables`. ContextFullError if the conversation does not fit the context; RequestError if
        the template, the tower or a picture is refused.
        """
        self._load()
        llm, marker = self._llm, self._handler._mtmd_cpp.mtmd_default_marker().decode()
        text = render(self._handler._get_template_messages(messages, marker), **variables)
        before, _, after = text.rpartition(marker)
        tail = llm.tokenize(after.encode(), add_bos=False, special=True)
        known = self._digest(before, self._handler.get_image_urls(messages))
        if known == self._known:
            ids = [*self._ids, *tail]
            if self._follows(ids):
                return text, ids
        ids = self._evaluated(messages, variables)
        self._known = ""
        if ids[-len(tail) :] == tail:
            self._known, self._ids = known, ids[: -len(tail)]
        return text, ids

    def marked(
        self, messages: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return messages with a marker in place of each picture, and `media` of mtp_chat.h."""
        self._load()
        marker = self._handler._mtmd_cpp.mtmd_default_marker().decode()
        sizes = [*map(self._size, self._handler.get_image_urls(messages))]
        marked = self._handler._get_template_messages(messages, marker)
        return marked, {"marker": marker, "tokens": sizes}

    def _size(self, url: str) -> int:
        """Return how many tokens a picture has, which is not evaluated for it."""
        if url not in self._sizes:
            mtmd = self._handler._mtmd_cpp
            bitmap = self._handler._create_bitmap_from_bytes(self._handler.load_image(url))
            chunks = mtmd.mtmd_input_chunks_init()
            try:
                marker = mtmd.mtmd_default_marker()
                text = mtmd.mtmd_input_text(text=marker, text_len=len(marker), parse_special=True)
                bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
                given = (chunks, ctypes.byref(text), bitmaps, 1)
                if mtmd.mtmd_tokenize(self._handler.mtmd_ctx, *given):
                    raise RequestError("a picture: llama.cpp cannot prepare it")
                self._sizes[url] = mtmd.mtmd_helper_get_n_tokens(chunks)
            finally:
                mtmd.mtmd_input_chunks_free(chunks)
                mtmd.mtmd_bitmap_free(bitmap)
        return self._sizes[url]

    def record(self) -> dict[str, Any]:
        """Return what `restore` needs, as values that JSON holds."""
        return {"digest": self._known, "length": len(self._ids)}

    def restore(self, record: Any) -> None:
        """Continue a session of the same conversation, which the model has just loaded.

        record: of `record`; if it is not, the pictures are evaluated again with the next message.
        """
        self._known, self._ids = "", []
        match record:
            case {"digest": str(digest), "length": int(length)} if 0 < length <= self._llm.n_tokens:
                self._known = digest
                self._ids = self._llm.input_ids[:length].tolist()

    def _digest(self, text: str, pictures: Sequence[str]) -> str:
        tower = identify(Path(self._handler.clip_model_path))
        parts = [tower.size, tower.fingerprint, text, *pictures]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _follows(self, ids: list[int]) -> bool:
        """Whether the context holds a beginning of these ids that includes their pictures."""
        length = self._llm.n_tokens
        if length < len(self._ids) or min(self._ids) >= 0:
            return False  # llama_cpp.Llama itself gives pictures no ids
        return bool(ids[:length] == self._llm.input_ids[:length].tolist())

    def _evaluated(
        self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]
    ) -> list[int]:
        """Evaluate a conversation from its beginning; return its ids."""
        try:
            # The stream evaluates the prompt at once, and generates nothing until it is read.
            self._handler(llama=self._llm, messages=messages, stream=True, **variables).close()
        except ValueError as error:
            if str(error).startswith(_FULL):
                raise ContextFullError(
                    "the message with its pictures: expected one that fits a context of "
                    f"{self._llm.n_ctx()} tokens, found a longer one"
                ) from None
            raise RequestError(f"the message with its pictures: {error}") from None
        ids: list[int] = self._llm.input_ids[: self._llm.n_tokens].tolist()
        return ids

    def _load(self) -> None:
        """Load the tower; RequestError if llama.cpp refuses it."""
        _errors.clear()
        try:
            self._handler._init_mtmd_context(self._llm)
        except ValueError as error:
            reason = _errors[-1] if _errors else error
            raise RequestError(
                f"{self._handler.clip_model_path}: llama.cpp cannot load the vision tower: {reason}"
            ) from None


def has_pictures(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether a conversation has pictures."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(part.get("type") == "image_url" for part in parts)


_errors: list[str] = []  # that mtmd has logged


def _remember(level: int, text: bytes, _: Any) -> None:
    if level == _ERROR:
        _errors.append(text.decode(errors="replace").strip())


_log: Any = llama_cpp.llama_log_callback(_remember)


@cache
def _keep_log_quiet(mtmd: Any) -> None:
    """Keep mtmd's log, which llama_cpp leaves on, from standard error; remember its errors."""
    for set_log in (mtmd.mtmd_log_set, mtmd.mtmd_helper_log_set):
        set_log(_log, None)
