"""The acceptance rate of a file's head on a short text.

For each token of the text the head drafts the next one, which is compared with the trunk's most
likely token. Nothing is sampled, so repeated runs on one machine give the same rate.
"""

import json
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError

from .subprocesses import run_module

# Prose and code, in words that every vocabulary has.
TEXT = """\
The river is low in summer, and the children of the village walk across it to the old mill. When
the rain comes in autumn, the water rises, and they have to take the long way over the bridge.

def count_words(path):
    counts = {}
    with open(path) as file:
        for line in file:
            for word in line.split():
                counts[word] = counts.get(word, 0) + 1
    return counts


def main():
    for name in sys.argv[1:]:
        print(name, len(count_words(name)))
"""
_PROMPT = 12  # tokens before the first draft
_MOST_DRAFTS = 96  # enough to measure a rate of 0.5 to 0.05 (one standard deviation)
_LEAST_DRAFTS = 16
_CONTEXT = 256
# Memory besides the weights: context, compute buffers, llama.cpp and Python.
_OVERHEAD = 256 << 20
# The subprocess's time limit besides drafting: startup seconds, and bytes read per second.
_STARTING, _SLOW_DISK = 60.0, 50e6
_REFUSED = 3  # exit code of the subprocess if it has printed an error message


@dataclass(frozen=True)
class Acceptance:
    """Greedy verification would have accepted `accepted` of `drafted` first drafts."""

    drafted: int
    accepted: int
    seconds: float

    @property
    def share(self) -> float:
        """The acceptance rate."""
        return self.accepted / self.drafted


def memory_needed(path: Path) -> int:
    """Return the bytes of memory that measuring takes: the file's weights and overhead."""
    return path.stat().st_size + _OVERHEAD


def measure_in_subprocess(
    path: Path,
    *,
    seconds: float = 60.0,
    whole_vocabulary: bool = False,
    head: Path | None = None,
    text: Path | None = None,
    drafts: int = _MOST_DRAFTS,
) -> Acceptance:
    """Run `measure_acceptance` in a subprocess, so that a file may crash llama.cpp.

    Raises RequestError if nothing can be measured, or if loading takes longer than it would from a
    slow disk.
    """
    options = {
        "seconds": seconds,
        "whole_vocabulary": whole_vocabulary,
        "head": None if head is None else str(head.absolute()),
        "text": None if text is None else text.read_text(encoding="utf-8"),
        "drafts": drafts,
    }
    limit = _STARTING + path.stat().st_size / _SLOW_DISK + 2 * seconds
    try:
        words = (str(path.absolute()), json.dumps(options))
        child = run_module("mtp_gguf.native.acceptance", *words, timeout=limit)
    except subprocess.TimeoutExpired:
        raise RequestError(f"loading and drafting took longer than {limit:.0f} s") from None
    except OSError as error:
        raise RequestError(f"cannot start {sys.executable}: {error.strerror}") from None
    if child.returncode < 0:
        raise RequestError(f"llama.cpp crashed (signal {-child.returncode})")
    if child.returncode > 0:
        lines = child.stderr.strip().splitlines() or ["no reason given"]
        raise RequestError(lines[0] if child.returncode == _REFUSED else lines[-1])
    return Acceptance(**json.loads(child.stdout.splitlines()[-1]))


def measure_acceptance(
    path: Path,
    *,
    seconds: float = 60.0,
    whole_vocabulary: bool = False,
    head: Path | str | None = None,
    text: str | None = None,
    drafts: int = _MOST_DRAFTS,
) -> Acceptance:
    """Load the model on the CPU and measure for at most `seconds`, not counting loading.

    At least sixteen drafts are measured. whole_vocabulary: ignore the file's draft vocabulary
    (layout ids). head: a separate file with the head. text: in place of TEXT. drafts: the most to
    measure. Raises RequestError if nothing can be drafted, NativeError if llama.cpp or the
    head rejects the file.
    """
    from .llama import MTPLlama  # noqa: PLC0415  (loads llama.cpp)

    with MTPLlama(
        str(path),
        mtp_head=None if head is None else str(head),
        depth=1,
        n_ctx=max(_CONTEXT, 2 * drafts),
        n_batch=_CONTEXT,
        fastmtp_size=-1 if whole_vocabulary else 0,
    ) as llm:
        if llm.head is None:
            raise RequestError("drafting is switched off by MTP_GGUF_DISABLE")
        raw = (TEXT if text is None else text).encode()
        tokens = llm.tokenize(raw, add_bos=False)[: _PROMPT + drafts]
        if len(tokens) < _PROMPT + _LEAST_DRAFTS:
            raise RequestError(
                f"its tokenizer makes only {len(tokens)} tokens of the test text, "
                f"expected {_PROMPT + _LEAST_DRAFTS} or more"
            )
        session = llm.session
        session.decode(tokens[:_PROMPT])
        began = perf_counter()
        drafted = accepted = 0
        for token in tokens[_PROMPT:]:
            [draft] = session.begin(token, 1)
            accepted += draft == session.argmax(session.row(0))
            session.end(0)
            drafted += 1
            if drafted >= _LEAST_DRAFTS and perf_counter() - began > seconds:
                break
        return Acceptance(drafted, accepted, perf_counter() - began)


def _main() -> int:
    """Run in the subprocess: print a JSON object, or an error message and exit with _REFUSED."""
    path, options = sys.argv[1], json.loads(sys.argv[2])
    warnings.simplefilter("ignore")  # the sentence must be the first line
    try:
        found = measure_acceptance(Path(path), **options)
    except (MtpGgufError, ImportError, OSError, RuntimeError) as error:
        # llama_cpp raises the last three if its libraries cannot be loaded.
        sys.stderr.write(f"{error}\n")
        return _REFUSED
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
