"""Runs `mtp-gguf convert`, which must succeed or be refused.

`refused` checks every failure in the same way: the exit code, one sentence with the given words on
standard error, no traceback, and an unchanged output folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gguf import ReaderTensor

from support import commands
from support.commands import succeed
from support.gguf_files import tensors_of


def converted(model: Path, output: Path, *options: object) -> dict[str, ReaderTensor]:
    """Convert, which must succeed; the tensors of the one file written."""
    succeed("convert", model, "-o", output, *options)
    return tensors_of(output)


def refuse(model: Path, output: Path, *words: str, options: tuple[object, ...] = ()) -> str:
    """`refused`, for a conversion of `model` into a file of the folder `output`."""
    arguments = [model, "-o", output / "out.gguf", "--quant", "F16", *options]
    return refused(arguments, *words, output=output)


def refused(arguments: Sequence[object], *words: str, output: Path, code: int = 1) -> str:
    """Run a conversion that must fail, and give its message.

    words: what the message must say. output: the folder that must stay as it is.
    """
    return commands.refused(output, "convert", *arguments, words=words, code=code)
