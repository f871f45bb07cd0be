"""Loads and runs a model once in a subprocess.

    python -m mtp_gguf.native.trial MODEL [HEAD]

Checks of the header cannot find everything that llama.cpp crashes on; here only the subprocess
crashes.
"""

import signal
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

from mtp_gguf.gguf_tools.errors import MtpGgufError

from ._subprocess import run_module

_CONTEXT = 64
_DEPTH = 2
_THREADS = 2  # enough for a handful of tokens
_PROMPT = [1, 2, 3, 4, 5]
_TOKENS = 6  # a few cycles of drafting
_REFUSED = 3  # exit code of the subprocess if it has printed an error message
_SHOWN = 300  # maximum characters shown of llama.cpp's output


def try_model(model: Path, head: Path | None = None) -> str | None:
    """Load a GGUF and draft with it in a subprocess; return None on success, else the reason.

    head: another file to take the head from. This takes about as long as loading the model.
    """
    words = [str(path.absolute()) for path in (model, head) if path is not None]
    done = run_module("mtp_gguf.native.trial", *words)
    if done.returncode == 0:
        return None
    if done.returncode == _REFUSED:
        return done.stdout.strip()
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    said = next((line for line in lines if "GGML_ASSERT" in line), "".join(lines[-1:]))
    return (
        f"{model}: it crashes the process that loads it ({_ending(done.returncode)}): "
        f"{said[-_SHOWN:] or 'no error message'}"
    )


def _ending(code: int) -> str:
    """Describe how a process ended."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


def main() -> int:
    """Load and draft; the exit code tells the parent process what happened."""
    from .llama import MTPLlama  # noqa: PLC0415  (loads llama.cpp)

    model, head = sys.argv[1], next(iter(sys.argv[2:]), None)
    try:
        # Unless verbose, llama_cpp hides standard error, and with it ggml's reason for an abort.
        llm = MTPLlama(
            model,
            depth=_DEPTH,
            mtp_head=head,
            profile=False,
            n_ctx=_CONTEXT,
            n_threads=_THREADS,
            n_threads_batch=_THREADS,
            verbose=True,
        )
        with closing(llm):
            list(islice(llm.generate(_PROMPT, temp=0.0), _TOKENS))
    except MtpGgufError as error:
        print(error)
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
