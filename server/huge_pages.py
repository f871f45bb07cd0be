"""Weights in memory of the server's own, in pages of 2 MiB.

A mapped file is in pages of 4 KiB. A CPU has few entries for those, and its hardware prefetches
within a page only.
"""

import platform
from collections.abc import Mapping
from pathlib import Path

from mtp_gguf.gguf_tools.errors import RequestError

# What the system offers, the word in brackets: "always", "madvise" (on request) or "never"
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLES = "GLIBC_TUNABLES"
# With the value 1, malloc asks for huge pages (glibc manual, Memory Allocation Tunables).
_TUNABLE, _ASK = "glibc.malloc.hugetlb", "1"
_GLIBC = (2, 35)  # the first version with this tunable


def huge_page_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment `variables`, extended so that a program's large allocations use huge pages.

    RequestError if the system or its C library has none.
    """
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < _GLIBC:
        found = f"{name} {version}".strip() or platform.system()
        raise RequestError(
            f"--huge-pages: expected Linux with glibc {'.'.join(map(str, _GLIBC))} or newer, found "
            f"{found}"
        )
    try:
        offered = SWITCH.read_text(encoding="ascii")
    except OSError:
        offered = "no such file"
    if "[always]" not in offered and "[madvise]" not in offered:
        raise RequestError(
            f"--huge-pages: expected [always] or [madvise] in {SWITCH}, found {offered.strip()}; "
            "an administrator turns huge pages on by writing madvise to it"
        )
    before = variables.get(_TUNABLES, "")
    if f"{_TUNABLE}=" in before:  # the user's own choice
        return dict(variables)
    return {**variables, _TUNABLES: ":".join(filter(None, (before, f"{_TUNABLE}={_ASK}")))}
