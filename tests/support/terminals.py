"""Programs that run on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def on_a_terminal(
    command: Sequence[object], *streams: str, timeout: float = 120, **options: Any
) -> str:
    """What a program shows, which must succeed. streams: those that are the terminal's."""
    ours, theirs = pty.openpty()
    options |= dict.fromkeys(streams or ("stdin", "stdout", "stderr"), theirs)
    with subprocess.Popen([*map(str, command)], **options) as child:
        os.close(theirs)
        raw = b""
        with suppress(OSError):  # EIO: the other side has closed
            while piece := os.read(ours, 1 << 16):
                raw += piece
        assert child.wait(timeout) == 0, raw
    os.close(ours)
    return raw.decode(errors="replace").replace("\r\n", "\n")
