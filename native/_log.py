"""llama.cpp's log, kept quiet: the last lines wait for an exception that wants them."""

import ctypes
import sys
from collections import deque

import llama_cpp

KEPT_LINES = 12

_lines: deque[str] = deque(maxlen=KEPT_LINES)
_state = {"verbose": False}


def _keep(_level: int, text: bytes, _user_data: object) -> None:
    line = text.decode(errors="replace")
    if _state["verbose"]:
        sys.stderr.write(line)
    if line.strip(" .\n"):
        _lines.append(line.rstrip("\n"))


_CALLBACK = llama_cpp.llama_log_callback(_keep)  # lives as long as llama.cpp may call it


def listen(verbose: bool) -> None:
    """Take over llama.cpp's log; verbose: print it as well."""
    _state["verbose"] = verbose
    _lines.clear()
    llama_cpp.llama_log_set(_CALLBACK, ctypes.c_void_p(0))


def last_lines() -> str:
    """The last lines, each on a line of its own, indented; "" when there are none."""
    return "".join(f"\n  {line}" for line in _lines)
