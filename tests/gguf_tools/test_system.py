"""Which processors run the kernels of patches/."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_gguf.bench.plan import Amount, Plan
from mtp_gguf.cli.bench_table import plan_lines
from mtp_gguf.gguf_tools.machine import system


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
    assert system.runs_kernels() == runs


def test_a_busy_machine_is_said_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far above what this process can use itself; a load of its own is none."""
    monkeypatch.setattr(system, "usable_cores", lambda: 4)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    amount = Amount(prompts=1, tokens=24, rounds=1)
    for load, notes in ((4.2, 0), (5.9, 0), (20.7, 1)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        lines = [*plan_lines(Plan(amount, (), (), 60.0), 60.0)]
        assert sum("other programs keep this machine busy" in line for line in lines) == notes
