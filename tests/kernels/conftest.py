"""The sweep of `sweep.py` on the patched libraries, once for each instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from mtp_gguf.gguf_tools.server.build import find_build
from mtp_gguf.gguf_tools.server.find import VARIABLE

Arrays = dict[str, Any]


class Sweep(Protocol):
    """Runs the sweep with a value of GGML_CPU_LANES, each once."""

    def __call__(self, lanes: str) -> Arrays:
        """What it computed, by name; empty leaves the variable unset, "0" is for none."""


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The folder of ggml's libraries with our patches."""
    stated = os.environ.get(VARIABLE)
    built = find_build()
    if stated:
        return Path(stated).resolve().parent
    if not built:
        pytest.skip(f"no patched llama.cpp: run `mtp-gguf build-server`, or set {VARIABLE}")
    return built.libraries


@pytest.fixture(scope="session")
def has_kernels() -> bool:
    """Whether the kernels can run on this CPU, asked of Linux and not of them; else they should."""
    cpuinfo = Path("/proc/cpuinfo")
    return not cpuinfo.exists() or " avx2 " in cpuinfo.read_text()


@pytest.fixture(scope="session")
def sweep(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """See Sweep."""
    out = tmp_path_factory.mktemp("kernels")

    @cache
    def run(lanes: str) -> Arrays:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GGML_")}
        if lanes:
            environment["GGML_CPU_LANES"] = lanes
        file = out / f"{lanes or 'best'}.npz"
        command = [sys.executable, "-m", "kernels.sweep", str(libraries), str(file)]
        done = subprocess.run(
            command,
            env=environment,
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        with np.load(file) as arrays:
            return dict(arrays)

    def with_lanes(lanes: str) -> Arrays:
        return run(lanes)

    return with_lanes
