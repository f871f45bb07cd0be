"""Reads all weights of a model, and loads and runs it once, in a subprocess.

    python -m mtp_gguf.native.checks.trial MODEL [HEAD]

Checks of the header cannot find everything that llama.cpp crashes on; here only the subprocess
crashes.
"""

import signal
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

from mtp_gguf.gguf_tools.errors import MtpGgufError
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.profile import AUTO

from ..errors import NativeError
from .subprocesses import REFUSED, run_module

_CONTEXT = 64
_DEPTH = 2
_THREADS = 2  # enough for a handful of tokens
_PROMPT = [1, 2, 3, 4, 5]
_TOKENS = 6  # a few cycles of drafting
_SHOWN = 300  # maximum characters shown of llama.cpp's output


def try_model(model: Path, head: Path | None = None) -> str | None:
    """Load a GGUF and draft with it in a subprocess; return None on success, else the reason.

    head: another file to take the head from. A model without a head only runs. This takes about
    twice as long as loading the model.
    """
    words = [str(path.absolute()) for path in (model, head) if path is not None]
    done = run_module("mtp_gguf.native.checks.trial", *words)
    if done.returncode == 0:
        return None
    if done.returncode == REFUSED:
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


def _check_layers(model: str) -> None:
    """NativeError names the layer that makes the logits NaN or infinite, if one does."""
    from .finite import first_not_finite  # noqa: PLC0415  (loads llama.cpp)

    part = first_not_finite(Path(model), _PROMPT, _THREADS)
    if part is not None:
        raise NativeError(
            f"{model}: logits: expected finite numbers, found NaN or infinity, which {part} is the "
            "first to compute; its weights are finite, so some are too large: convert or download "
            "the file again"
        ) from None


def main() -> int:
    """Check, load and draft; the exit code tells the parent process what happened."""
    from ..llama.mtp_llama import MTPLlama  # noqa: PLC0415
    from .finite import check_weights  # noqa: PLC0415  (loads llama.cpp)

    model, head = sys.argv[1], next(iter(sys.argv[2:]), None)
    with open_model(Path(head or model)) as opened:
        drafts = opened.report.ready
    try:
        for path in sys.argv[1:]:
            check_weights(Path(path))
        # Unless verbose, llama_cpp hides standard error, and with it ggml's reason for an abort.
        llm = MTPLlama(
            model,
            depth=_DEPTH if drafts else AUTO,
            mtp_head=head,
            profile=False,
            n_ctx=_CONTEXT,
            n_threads=_THREADS,
            n_threads_batch=_THREADS,
            verbose=True,
        )
        with closing(llm):
            try:
                list(islice(llm.generate(_PROMPT, temp=0.0), _TOKENS))
            except NativeError:
                _check_layers(model)
                raise
        if not drafts:  # llama_cpp.Llama does not look at logits
            _check_layers(model)
    except MtpGgufError as error:
        print(error)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
