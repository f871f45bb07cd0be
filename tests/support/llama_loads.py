"""Tests whether llama.cpp loads files, runs their trunk and drafts with their head.

    cd tests; python -m support.llama_loads FILE...

prints "yes" or "no" for each file. Each file is tried in a forked child, which may abort.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]
_SECONDS = 60  # for a file of a few megabytes


def llama_loads(paths: Sequence[Path]) -> list[bool]:
    """Try each file with the stock libraries."""
    env = os.environ | {"PYTHONPATH": str(TESTS), "MTP_GGUF_LIBS": "stock"}
    command = [sys.executable, "-m", "support.llama_loads", *map(str, paths)]
    done = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True, check=True)
    return [line == "yes" for line in done.stdout.split()]


def _draft(path: str) -> None:
    from support.upstream import llama_mtp  # noqa: PLC0415

    llama_mtp.THREADS = 1  # several wait for each other where other tests run, too
    with llama_mtp.LlamaMtp(Path(path)) as model:
        hidden = model.trunk([1, 2, 3])[1]
        model.draft([1, 2, 3, 4], hidden, 2)


def main() -> None:
    """Fork for each file, so that an abort ends only that attempt."""
    import signal  # noqa: PLC0415

    from mtp_gguf.native import runtime  # noqa: F401, PLC0415  (once, for all forks)

    for path in sys.argv[1:]:
        child = os.fork()
        if not child:
            signal.alarm(_SECONDS)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            try:
                _draft(path)
            except BaseException:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("yes" if status == 0 else "no", flush=True)


if __name__ == "__main__":
    main()
