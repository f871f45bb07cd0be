"""MTPLlama and llama_cpp.Llama on one thread, and the tokens that they generate."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from mtp_gguf.native import MTPLlama
from mtp_gguf.native.runtime import llama_cpp

TESTS = Path(__file__).parents[1]
SMALL: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1}


def random_tokens(n: int, seed: int | list[int], below: int = 700) -> list[int]:
    """Tokens that depend on the seed alone, whatever the version of NumPy."""
    return [int(t) for t in np.random.PCG64(seed).random_raw(n) % np.uint64(below)]


def load(path: Path, **options: Any) -> closing[MTPLlama]:
    """A model that a `with` block closes: SMALL, unless `options` say otherwise."""
    return closing(MTPLlama(str(path), **{**SMALL, **options}))


def plain(path: Path, **options: Any) -> closing[llama_cpp.Llama]:
    """The same of llama_cpp itself."""
    return closing(llama_cpp.Llama(str(path), **{**SMALL, "verbose": False, **options}))


def take(llm: llama_cpp.Llama, n: int, prompt: list[int], **options: Any) -> list[int]:
    """The n tokens after a prompt, greedy unless `options` say otherwise."""
    with closing(llm.generate(prompt, **{"temp": 0.0, **options})) as stream:
        return list(itertools.islice(stream, n))


def in_another_process(
    program: str, *arguments: object, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a Python program that may import the modules of the tests; how it ended."""
    words = [sys.executable, "-c", program, *map(str, arguments)]
    pipes: Any = {"capture_output": True, "text": True}
    return subprocess.run(words, check=False, cwd=TESTS, timeout=timeout, **pipes)
