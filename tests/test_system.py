"""Which processors run the kernels of patches/."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_gguf.gguf_tools import system


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "runs"),
    [
        ("x86_64", "flags\t\t: fpu avx avx2\n", True),
        ("x86_64", "flags\t\t: fpu avx\n", False),
        ("aarch64", "Features\t: fp asimddp i8mm\n", True),
        ("aarch64", "Features\t: fp asimd\n", False),
        ("arm64", None, True),
        ("riscv64", "isa : rv64\n", False),
    ],
)
def test_who_runs_the_patched_kernels(
    machine: str, cpuinfo: str | None, runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo, "ascii")
    monkeypatch.setattr(system, "_CPUINFO", file)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert system.runs_patched_kernels() == runs
