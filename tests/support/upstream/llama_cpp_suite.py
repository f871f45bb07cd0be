"""A plugin of pytest that runs llama-cpp-python's own tests on local models and a class of ours.

    SUITE='{"class": "Llama", "models": {"FILE NAME": "PATH", …}, "texts": "PATH"}' \
        python -m pytest -p support.upstream.llama_cpp_suite test_llama.py

The models of the suite are downloads, and its texts are theirs. Here a download is a local file,
and a text that it states is what llama_cpp.Llama has written: with the class "Llama" texts are
noted, with "MTPLlama" they are compared with the notes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub

from mtp_gguf.native.runtime import llama_cpp

SUITE: dict[str, Any] = json.loads(os.environ["SUITE"])
TEXTS = Path(SUITE["texts"])

_position = 0


def stated(answer: Any) -> None:
    """Note a text of a completion, or compare it with what is noted."""
    global _position  # noqa: PLW0603  (the suite knows no fixture of ours)
    text = answer if isinstance(answer, str) else answer["choices"][0]["text"]
    notes = json.loads(TEXTS.read_text()) if TEXTS.exists() else []
    if SUITE["class"] == "Llama":
        TEXTS.write_text(json.dumps([*notes, text]))
        return
    assert text == notes[_position]
    _position += 1


def _local_file(_: str, filename: str) -> str:
    path: str = SUITE["models"][Path(filename).name]
    return path


def pytest_configure() -> None:
    setattr(huggingface_hub, "hf_hub_download", _local_file)  # noqa: B010 - of another type
    multiprocessing.cpu_count = lambda: 1
    if "scipy" not in sys.modules:  # imported by the suite, and not used
        special = ModuleType("scipy.special")
        special.log_softmax = None  # type: ignore[attr-defined]
        sys.modules |= {"scipy": ModuleType("scipy"), "scipy.special": special}
    if SUITE["class"] == "MTPLlama":
        from mtp_gguf.native import MTPLlama  # noqa: PLC0415

        llama_cpp.Llama = MTPLlama  # type: ignore[misc]
