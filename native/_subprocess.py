"""Modules of this package run in processes of their own."""

import os
import subprocess
import sys
import tempfile


def run_module(
    module: str, *words: str, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module words`; its output is kept, and nothing is read.

    It runs in an empty folder, because that is where Python looks for modules first: paths among
    the words must be absolute. OSError and subprocess.TimeoutExpired as subprocess.run has them.
    """
    with tempfile.TemporaryDirectory(prefix="mtp-gguf-") as empty:
        return subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=empty,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
        )
