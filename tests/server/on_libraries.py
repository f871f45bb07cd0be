"""Programs of the tests that print one line of JSON, on the libraries of one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from patched_build import python_on


def answer(libraries: Path, code: str, *words: object, **environment: str) -> Any:
    """What the program `code` prints, on its last line."""
    printed = python_on(libraries, "-c", code, *words, timeout=600, **environment)
    return json.loads(printed.splitlines()[-1])


def walk(
    libraries: Path,
    model: Path,
    *,
    seed: int,
    steps: int,
    tokens: int,
    timeout: float = 3600,
    **environment: str,
) -> Any:
    """What `rollback_walk` counted."""
    words = ("-m", "server.rollback_walk", model, seed, steps, tokens)
    printed = python_on(libraries, *words, timeout=timeout, **environment)
    return json.loads(printed.splitlines()[-1])
