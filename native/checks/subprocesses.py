"""Runs modules of this package in a subprocess."""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

from mtp_gguf.gguf_tools.errors import MtpGgufError

REFUSED = 3  # exit code of a subprocess that has printed an error message


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


def print_found(measure: Callable[[], Any]) -> int:
    """Run in the subprocess: print what is measured as JSON, or a sentence why it cannot be.

    Returns the exit code.
    """
    warnings.simplefilter("ignore")  # the sentence must be the first line
    try:
        found = measure()
    except (MtpGgufError, ImportError, OSError, RuntimeError) as error:
        # llama_cpp raises the last three if its libraries cannot be loaded.
        sys.stderr.write(f"{error}\n")
        return REFUSED
    sys.stdout.write(json.dumps(found) + "\n")
    return 0
