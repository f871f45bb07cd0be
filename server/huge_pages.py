"""Weights in memory of the server's own, in pages of 2 MiB.

A mapped file is in pages of 4 KiB. A CPU has few entries for those, and its hardware prefetches
within a page only.
"""

import platform
from collections.abc import Mapping
from pathlib import Path

from mtp_gguf.gguf_tools.errors import RequestError

OPTION = "--huge-pages"
_TUNABLES = "GLIBC_TUNABLES"
# glibc asks the system for huge pages for what malloc hands out, "madvise" mode included (glibc
# manual, Memory Allocation Tunables).
_TUNABLE, _ASK = "glibc.malloc.hugetlb", "1"
_GLIBC = (2, 35)  # that has it
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """`variables` with what puts a program's large memory into huge pages.

    RequestError where the system has none.
    """
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < _GLIBC:
        found = f"{name} {version}".strip() or platform.system()
        raise RequestError(
            f"{OPTION}: expected Linux with glibc {'.'.join(map(str, _GLIBC))} or newer, found "
            f"{found}"
        )
    try:
        offered = _SYSTEM.read_text(encoding="ascii")
    except OSError:
        offered = "no such file"
    if "[always]" not in offered and "[madvise]" not in offered:
        raise RequestError(
            f"{OPTION}: expected [always] or [madvise] in {_SYSTEM}, found {offered.strip()}; "
            "an administrator turns huge pages on by writing madvise to it"
        )
    before = variables.get(_TUNABLES, "")
    if f"{_TUNABLE}=" in before:  # as the user has it
        return dict(variables)
    return {**variables, _TUNABLES: ":".join(filter(None, (before, f"{_TUNABLE}={_ASK}")))}
