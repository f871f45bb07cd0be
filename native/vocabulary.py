"""The tokenizer of a GGUF file, by llama.cpp, without loading weights.

llama.cpp implements the pre-tokenizer of every model it can run, so a corpus is split into the same
tokens that the model will see.
"""

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.loadable import vocabulary_faults

from ._bindings import check, library

_THREADS = 4  # tokenizing releases the GIL


@dataclass(frozen=True, eq=False)
class Encoding:
    """The tokens of a text."""

    ids: NDArray[np.int32]


class Vocabulary:
    """A GGUF's tokenizer, a context manager. RequestError if llama.cpp cannot load it."""

    def __init__(self, path: Path) -> None:
        from .runtime import llama_cpp  # noqa: PLC0415  (loads the libraries)

        for fault in vocabulary_faults(path):
            raise RequestError(f"{path}: {fault}")
        self._api: Any = llama_cpp
        llama_cpp.llama_log_set(_silence(), ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise RequestError(f"{path}: llama.cpp cannot load its tokenizer")
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.size = int(llama_cpp.llama_vocab_n_tokens(self._vocabulary))
        # The token that the model's texts begin with, if they do.
        begins = llama_cpp.llama_vocab_get_add_bos(self._vocabulary)
        self.bos = int(llama_cpp.llama_vocab_bos(self._vocabulary)) if begins else None

    def __enter__(self) -> "Vocabulary":
        return self

    def __exit__(self, *_: object) -> None:
        if self._model:
            self._api.llama_model_free(self._model)
            self._model = None

    def fingerprint(self) -> int:
        """Return the fingerprint of the tokens' texts, which is that of a session on the model."""
        texts = (ctypes.c_char_p * self.size)(*map(self._text, range(self.size)))
        out = ctypes.c_uint64()
        check(library().mtp_tokenizer_fingerprint(texts, self.size, ctypes.byref(out)))
        return out.value

    def _text(self, token: int) -> bytes:
        if self._api.llama_vocab_type(self._vocabulary) == self._api.LLAMA_VOCAB_TYPE_NONE:
            return b""
        text: bytes = self._api.llama_vocab_get_text(self._vocabulary, token)
        return text

    def encode(self, text: str | bytes, *, special: bool = True) -> NDArray[np.int32]:
        """Return the tokens of `text`; none are added.

        special: recognize special tokens in it.
        """
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        return tokenize(self._vocabulary, data, special=special)

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> Sequence[Encoding]:
        """Return the tokens of each text; `add_special_tokens` must be false."""
        assert not add_special_tokens
        with ThreadPoolExecutor(_THREADS) as pool:
            return [Encoding(ids) for ids in pool.map(self.encode, texts)]


def tokenize(vocabulary: Any, text: bytes, *, special: bool) -> NDArray[np.int32]:
    """Return the tokens of `text` by a vocabulary of llama.cpp; RequestError if that fails."""
    from .runtime import llama_cpp  # noqa: PLC0415  (loads the libraries)

    room = max(len(text), 1)
    while True:
        tokens = np.empty(room, np.int32)
        pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        count = llama_cpp.llama_tokenize(vocabulary, text, len(text), pointer, room, False, special)
        if count >= 0:
            return tokens[:count]
        if -count <= room:
            raise RequestError(f"llama.cpp cannot tokenize a text of {len(text)} bytes")
        room = -count  # a byte may be several tokens


@cache
def _silence() -> Any:
    """Return a log callback that prints nothing; cached, as llama.cpp keeps a pointer to it."""
    from .runtime import llama_cpp  # noqa: PLC0415

    return llama_cpp.llama_log_callback(lambda *_: None)
