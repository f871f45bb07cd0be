"""Python programs in a process of their own, on llama.cpp's libraries of one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def on_libraries(
    folder: Path, words: Sequence[str | Path], timeout: int, **environment: str
) -> Any:
    """The last line that `python WORDS` prints, in the folder of the tests, as JSON."""
    ours = {"LLAMA_CPP_LIB_PATH": str(folder), "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | ours | environment,
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def walk(
    folder: Path,
    model: Path,
    seed: int,
    steps: int,
    tokens: int,
    timeout: int,
    **environment: str,
) -> Any:
    """What `rollback_walk` counted."""
    words = ["-m", "server.rollback_walk", model, str(seed), str(steps), str(tokens)]
    return on_libraries(folder, words, timeout, **environment)
