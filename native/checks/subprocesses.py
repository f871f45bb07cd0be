"""Runs modules of this package in a subprocess."""

import os
import subprocess
import sys
import tempfile


def run_module(
    module: str, *words: str, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module words` with captured output and no standard input.

    It runs in an empty folder, because Python looks for modules in the current one first; paths
    among the words must be absolute. Raises OSError and subprocess.TimeoutExpired like
    subprocess.run.
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
