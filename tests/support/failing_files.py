"""Calls on the files of a folder that fail as long as a test wants it, by a preloaded library."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import preloading

_NUMBERS = ("open", "read", "write", "list", "opens", "stats")
_LONG = struct.Struct("l")


class FailingFiles:
    """What the programs that are started next do in `folder`.

    Its numbers are the error of open, read, write and list, or 0, and the count of opens and stats.
    """

    def __init__(self, folder: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        control = scratch / "failing_files"
        control.write_bytes(bytes(len(_NUMBERS) * _LONG.size))
        with control.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        library = preloading.build("failing_files", scratch)
        monkeypatch.setenv("LD_PRELOAD", str(library))
        monkeypatch.setenv("FAILING_FILES", str(control))
        monkeypatch.setenv("FAILING_FOLDER", str(folder))

    def __getitem__(self, name: str) -> int:
        return int(_LONG.unpack_from(self._memory, _NUMBERS.index(name) * _LONG.size)[0])

    def __setitem__(self, name: str, value: int) -> None:
        _LONG.pack_into(self._memory, _NUMBERS.index(name) * _LONG.size, value)


def failing(code: int) -> Callable[..., Any]:
    """A call that fails with this error."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail
