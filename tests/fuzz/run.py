"""Coverage-guided fuzzing of the two readers, with atheris.

    python tests/fuzz/run.py gguf -max_total_time=600

What follows the target's name goes to libFuzzer. Without a corpus folder among it, the golden
files and their malformed variants are the corpus. Stops at the first fault with its traceback, and
leaves the bytes in a file crash-…, which can be given as an argument to see it again.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import FunctionType

sys.path.insert(0, str(Path(__file__).parents[1]))

import atheris  # type: ignore[import-untyped]
from fuzz.corpus import DICTIONARY, write_corpus
from fuzz.targets import TARGETS

INSTRUMENTED = {
    "json.decoder",
    *(f"mtp_gguf.gguf_tools.files.{name}" for name in ("format", "safetensors")),
    *(f"mtp_gguf.gguf_tools.heads.{name}" for name in ("head", "fastmtp")),
}


def instrument() -> None:
    """Have the readers' functions report coverage.

    `atheris.instrument_imports` does nothing, silently, behind an editable install's loader.
    """
    for name in INSTRUMENTED:
        import_module(name)  # so that a module that has moved fails here
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__module__ in INSTRUMENTED:
            atheris.instrument_func(function)


def main() -> None:
    if sys.argv[1:2] not in [[name] for name in TARGETS]:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(TARGETS)} [libFuzzer's options]")
    name = sys.argv[1]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    given = [argument for argument in sys.argv[2:] if not argument.startswith("-")]
    if not given:
        given = [str(folder / "corpus")]
        write_corpus(name, folder / "corpus")
    dictionary = folder / "dictionary"
    dictionary.write_text(DICTIONARY)
    options = [argument for argument in sys.argv[2:] if argument.startswith("-")]
    instrument()
    atheris.Setup(
        [sys.argv[0], f"-dict={dictionary}", "-max_len=4096", *options, *given], TARGETS[name]
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
