"""llama.cpp's own test of all operations on the patched tree: its CPU backend, which loads our
kernels, against its reference implementations, which have none of them.

    pytest -m slow -s tests/kernels/test_backend_ops.py

builds the program first, and prints how many cases of each operation there were.
`MTP_GGUF_TEST_BACKEND_OPS` names a program that is there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from mtp_gguf.native.runtime import native_library
from mtp_gguf.server.build import cmake_options
from mtp_gguf.server.patches import add_head, apply, read_head_sources, read_patches
from mtp_gguf.server.upstream_source import fetch_archive, unpack_llama_cpp

pytestmark = [pytest.mark.slow, pytest.mark.server]

VARIABLE = "MTP_GGUF_TEST_BACKEND_OPS"
PROGRAM = "test-backend-ops"
TOUCHED = {
    "MUL_MAT",
    "MUL_MAT_ID",
    "FLASH_ATTN_EXT",
    "GATED_DELTA_NET",
    "SSM_CONV",
    "CONCAT",
    "CPY",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Upstream's program, built as `mtp-gguf build-server` builds the rest."""
    if stated := os.environ.get(VARIABLE):
        found = shutil.which(stated)
        assert found, f"{VARIABLE}={stated} is no program"
        return Path(found)
    tree = tmp_path_factory.mktemp("ops") / "llama.cpp"
    unpack_llama_cpp(fetch_archive(), tree)
    apply(read_patches(), tree)
    add_head(read_head_sources(), tree)
    objects = tree.with_name("build")
    options = cmake_options(["-DLLAMA_BUILD_TESTS=ON"])
    for command in (
        ["cmake", "-S", str(tree), "-B", str(objects), "-G", "Ninja", *options],
        ["cmake", "--build", str(objects), "--target", PROGRAM],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    shutil.copy(native_library("mtp_kernels"), objects / "bin")  # where libggml-cpu loads it
    return objects / "bin" / PROGRAM


def test_results_are_those_of_the_reference(program: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        code = subprocess.run(
            [program, "test", "-b", "CPU"], stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    said = re.sub(r"\x1b\[[\d;]*m", "", log.read_text("utf-8", "replace"))
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
