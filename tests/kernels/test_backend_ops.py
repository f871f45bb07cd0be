"""llama.cpp's own test of all operations: its CPU backend with our kernels, in each of the ways in
which they get there, against its reference implementations, which have none of them.

    pytest -m slow -s tests/kernels/test_backend_ops.py

builds the program first, some minutes for each way, and prints how many cases of each operation
there were. `-k` chooses a way, such as "b11549".
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from mtp_gguf.server import kernels
from mtp_gguf.server.build import Sources, cmake_options
from mtp_gguf.server.patches import add_head, apply, read_head_sources
from mtp_gguf.server.upstream_source import PIN, fetch_archive, unpack_llama_cpp

pytestmark = [pytest.mark.slow, pytest.mark.server]

PROGRAM = "test-backend-ops"
TOUCHED = {
    "MUL_MAT",
    "MUL_MAT_ID",
    "FLASH_ATTN_EXT",
    "GATED_DELTA_NET",
    "SSM_CONV",
    "CONCAT",
    "CPY",
    "MUL",
}


def _beside(program: Path) -> Mapping[str, str]:
    """The patched libggml-cpu loads the library from its own folder."""
    shutil.copy(kernels.library(), program.parent)
    return os.environ


def _preloaded(program: Path) -> Mapping[str, str]:
    return kernels.environment(program, os.environ)


def _installed(program: Path) -> Mapping[str, str]:
    kernels.install(program.parent)
    return os.environ


@dataclass(frozen=True)
class Way:
    """How the kernels get into the program. plug_in: returns the program's environment."""

    plug_in: Callable[[Path], Mapping[str, str]]
    patched: bool = False
    base: str = PIN
    options: tuple[str, ...] = ()


ALL_VARIANTS = ("-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DGGML_NATIVE=OFF")
WAYS = {
    "patched": Way(_beside, patched=True),
    "preloaded": Way(_preloaded),
    "all-variants": Way(_installed, options=ALL_VARIANTS),
    "b11549-patched": Way(_beside, patched=True, base="b11549"),
    "b11549-preloaded": Way(_preloaded, base="b11549"),
}


def _build(way: Way, folder: Path) -> Path:
    """Upstream's program, built as `mtp-gguf build-server` builds the rest."""
    tree = folder / "llama.cpp"
    unpack_llama_cpp(fetch_archive(way.base), tree, name=way.base)
    if way.patched:
        apply(Sources(way.base).patches(), tree)
        add_head(read_head_sources(), tree)
    objects = folder / "build"
    options = cmake_options(["-DLLAMA_BUILD_TESTS=ON", *way.options], Sources(way.base))
    for command in (
        ["cmake", "-S", str(tree), "-B", str(objects), "-G", "Ninja", *options],
        ["cmake", "--build", str(objects), "--target", PROGRAM],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return objects / "bin" / PROGRAM


def _has_kernels(process: subprocess.Popen[bytes]) -> bool:
    """Whether a running process has loaded them."""
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None:
        if kernels.library().name in maps.read_text():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_results_are_those_of_the_reference(way: Way, tmp_path: Path) -> None:
    program = _build(way, tmp_path)
    variables = way.plug_in(program)
    log = tmp_path / "log"
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [program, "test", "-b", "CPU"], stdout=file, stderr=subprocess.STDOUT, env=variables
        ) as process,
    ):
        plugged_in = _has_kernels(process)
    code = process.returncode
    said = re.sub(r"\x1b\[[\d;]*m", "", log.read_text("utf-8", "replace"))
    assert plugged_in, said[:2000]
    assert re.findall(r"^mtp_kernels: .*", said, re.MULTILINE) == []  # not used, or differs
    cases = re.findall(r"^  (\w+)\(.*\): (OK|FAIL)", said, re.MULTILINE)
    counted = Counter(cases)
    for name in sorted({name for name, _ in cases}):
        print(f"{name}: {counted[name, 'OK']} passed, {counted[name, 'FAIL']} failed")
    assert [name for name, outcome in cases if outcome == "FAIL"] == []
    assert {name for name, _ in cases} >= TOUCHED
    passed = re.search(r"(\d+)/(\d+) tests passed", said)
    assert passed, said[-2000:]
    assert int(passed[1]) == int(passed[2]) > 0
    assert code == 0, said[-2000:]
