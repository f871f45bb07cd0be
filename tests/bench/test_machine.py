"""How much memory there is left, as a system and a container say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_gguf.gguf_tools import machine

MEMINFO = "MemTotal:       16000000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n"


@pytest.mark.parametrize(
    ("meminfo", "limit", "used", "free"),
    [
        (MEMINFO, None, None, 4_096_000),
        (MEMINFO, "max", "1000", 4_096_000),
        (MEMINFO, "5000000", "1000000", 4_000_000),
        (MEMINFO, "5000000", "6000000", 0),
        ("MemTotal: 1 kB\n", None, None, None),
        ("MemAvailable:\n", "70", "50", 20),
        (None, None, None, None),
    ],
)
def test_free_memory(
    meminfo: str | None,
    limit: str | None,
    used: str | None,
    free: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in (("meminfo", meminfo), ("memory.max", limit), ("memory.current", used)):
        if text is not None:
            (tmp_path / name).write_text(text, "ascii")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.free_memory() == free
