"""Which kernel multiplies is measured where it runs, and kept in the user's cache."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native.runtime import native_library
from support import llama_libraries
from support.llama_libraries import CHOICE, stock_libraries
from support.models import ROOT

SOURCES = ROOT / "native" / "kernels"
# The sum of products of the same 16 MB of floats, more than are needed to choose; what was known
# before, and after them
MULTIPLY = """
import json, sys
import numpy as np
from pathlib import Path
from support.kernels.ggml_calls import F32, Ggml
ggml = Ggml(*map(Path, sys.argv[1:3]))
def chosen():
    found = ggml.plugged.choices()
    assert all((c.type, c.columns, c.rows, c.experts, c.threads) == KIND for c in found), found
    return [c.kernel for c in found]
KIND = ("f32", 1, "short", False, 2)
before = chosen()
weights = np.random.default_rng(1).standard_normal((2048, 2048), np.float32)
x = np.random.default_rng(2).standard_normal((1, 2048), np.float32)
inputs = [(F32, (2048, 2048), weights), (F32, (2048, 1), x)]
def total(count):
    def build(context, tensors):
        found = ggml.base.ggml_mul_mat(context, *tensors)
        for _ in range(count - 1):
            found = ggml.base.ggml_add(context, found, ggml.base.ggml_mul_mat(context, *tensors))
        return found
    return ggml.run(2, build, inputs)
found = total(int(sys.argv[3]))
one = expected = total(1)
right = np.allclose(one, (x @ weights.T).ravel(), atol=0.01)
for _ in range(int(sys.argv[3]) - 1):
    expected = expected + one
right = bool(right and (found == expected).all())  # to the bit
print(json.dumps([before, chosen(), right, ggml.plugged.left_to_ggml()]))
"""
ENOUGH = 40

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or shutil.which("c++") is None, reason="needs a C++ compiler"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, has_kernels: bool) -> Path:
    """The library with three candidates: one that sleeps, the right one, and a wrong one."""
    if not has_kernels:
        pytest.skip("this CPU has no AVX2, or no dot products")
    made = tmp_path_factory.mktemp("library") / native_library("mtp_kernels").name
    candidates = Path(__file__).parents[1] / "support" / "kernels" / "slow_candidates.cpp"
    include = stock_libraries().parents[1] / "include"
    command = [
        *("c++", "-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-o", made),
        *(f"-I{folder}" for folder in (SOURCES / "include", SOURCES / "src", include)),
        *(candidates, *SOURCES.glob("src/*.cpp"), "-ldl", "-pthread"),
    ]
    subprocess.run([str(word) for word in command], check=True)
    return made


@pytest.fixture
def multiply(library: Path, tmp_path: Path) -> Callable[..., Any]:
    """Multiply in another process whose cache is the test's folder."""

    def run(count: int = ENOUGH, words: str = "MUL_MAT", cache: Path = tmp_path) -> Any:
        settings = {CHOICE: words, "XDG_CACHE_HOME": str(cache)}
        stock = stock_libraries()
        return llama_libraries.answer(stock, MULTIPLY, stock, library, count, **settings)

    return run


def table_in(folder: Path) -> Path:
    """The only file with a table."""
    [table] = (folder / "mtp-gguf" / "kernels").iterdir()
    return table


def with_checksum(body: str) -> str:
    """A table of these lines, as the library writes it: with the FNV-1a hash of 64 bits."""
    found = 0xCBF29CE484222325
    for byte in body.encode():
        found = (found ^ byte) * 0x100000001B3 % 2**64
    return f"mtp_kernels choices {found:016x}\n{body}"


def test_the_fastest_right_one_is_chosen_and_kept(
    multiply: Callable[..., Any], tmp_path: Path
) -> None:
    before, after, right, left = multiply()
    assert (before, after) == ([], ["FAST"])
    assert right
    [excluded] = left
    assert "MUL_MAT of f32 is not computed with WRONG: its results differ" in excluded
    table = table_in(tmp_path)
    written = table.read_text("ascii")
    assert written == with_checksum(written.partition("\n")[2])
    before, after, right, _ = multiply(1)  # of another process, which measures nothing
    assert before == after == ["FAST"]
    assert table.read_text("ascii") == written
    assert right


def test_a_table_makes_slow_at_most(multiply: Callable[..., Any], tmp_path: Path) -> None:
    """One that somebody wrote, with the right checksum; it is corrected when that is asked for."""
    multiply()
    table = table_in(tmp_path)
    body = table.read_text("ascii").partition("\n")[2]
    table.write_text(with_checksum(body.replace("FAST", "SLOW")), "ascii")
    _, after, right, _ = multiply(3)
    assert after == ["SLOW"]
    assert right
    table.write_text(with_checksum(body.replace("FAST", "WRONG")), "ascii")
    assert multiply(3)[2]
    before, after, _, _ = multiply(words="anew")
    assert (before, after) == ([], ["FAST"])
    assert " FAST " in table.read_text("ascii")


@pytest.mark.thorough
def test_foreign_and_damaged_tables_are_measured_anew(
    multiply: Callable[..., Any], tmp_path: Path
) -> None:
    multiply()
    table = table_in(tmp_path)
    whole = table.read_text("ascii")
    key, line = whole.splitlines()[1:]
    body = whole.partition("\n")[2]
    tables = {
        "of another CPU": with_checksum(body.replace(key, f"{key}1")),
        "of another version": with_checksum(body.replace("key ", "key 0")),
        "with another checksum": whole.replace("FAST", "SLOW"),
        "cut off": whole[:-9],
        "without lines": whole.partition("\n")[0],
        "of a candidate that is none": with_checksum(body.replace("FAST", "BEST")),
        "of a type that is none": with_checksum(body.replace("f32 1", "f99 1")),
        "of threads that cannot be": with_checksum(body.replace("dense 2", "dense -2")),
        "of numbers that are none": with_checksum(body.replace(line, line[:22] + "FAST x y z")),
        "of long words": with_checksum(body + "q" * 5000 + " 1 short dense 2 FAST 1 1 1\n"),
        "empty": "",
    }
    for name, text in tables.items():
        table.write_text(text, "ascii")
        before, after, right, _ = multiply()
        known = name == "of long words"  # the other line is right
        assert ("FAST" in before) == known, name
        assert after == ["FAST"], name
        assert right
        assert " FAST " in table.read_text("ascii"), name
    with table.open("wb") as file:
        file.truncate(100 << 20)
    assert multiply()[1] == ["FAST"]
    assert table.stat().st_size < 1000


def test_where_no_table_can_be(multiply: Callable[..., Any], tmp_path: Path) -> None:
    """Each process measures for itself: a folder that is a file, a pipe, nobody's to write."""
    nowhere = tmp_path / "file"
    nowhere.write_bytes(b"")
    assert multiply(cache=nowhere)[1] == ["FAST"]
    assert nowhere.read_bytes() == b""
    multiply(cache=tmp_path)
    table = table_in(tmp_path)
    table.unlink()
    os.mkfifo(table)
    assert multiply(cache=tmp_path)[1] == ["FAST"]
    assert " FAST " in table_in(tmp_path).read_text("ascii")  # in its place
    table.unlink()
    table.mkdir()
    assert multiply(cache=tmp_path)[1] == ["FAST"]
    assert [path.name for path in table.parent.iterdir()] == [table.name]


def test_several_processes_share_a_table(library: Path, tmp_path: Path) -> None:
    settings = {CHOICE: "MUL_MAT", "XDG_CACHE_HOME": str(tmp_path)}
    stock = stock_libraries()
    words = [sys.executable, "-c", MULTIPLY, str(stock), str(library), str(ENOUGH)]
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT / "tests")}
    running = [
        subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) for _ in range(4)
    ]
    assert [process.wait(timeout=120) for process in running] == [0] * 4
    text = table_in(tmp_path).read_text("ascii")
    assert text == with_checksum(text.partition("\n")[2])


def test_nothing_is_measured_where_that_is_not_wanted(
    multiply: Callable[..., Any], tmp_path: Path
) -> None:
    _, after, right, _ = multiply(5, words="fixed")
    assert after == ["SLOW"]
    assert right
    assert not (tmp_path / "mtp-gguf").exists()


def test_no_make_of_cpu_decides_anything() -> None:
    """Choices are measured: the sources name no make, and ask for none."""
    makes = re.compile(r"__builtin_cpu_is|\bvendor|GenuineIntel|AuthenticAMD", re.IGNORECASE)
    found = {p.name: makes.findall(p.read_text("utf-8")) for p in SOURCES.rglob("*.[ch]*")}
    assert len(found) > 30
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="reads /proc/cpuinfo of x86-64",
)
def test_a_cpu_has_candidates_of_its_own_instructions_only(tmp_path: Path) -> None:
    program = tmp_path / "candidates"
    include = stock_libraries().parents[1] / "include"
    command = [
        *("c++", "-std=c++17", "-O1", "-o", program, SOURCES / "src" / "lanes" / "lanes.cpp"),
        Path(__file__).parents[1] / "support" / "kernels" / "candidates.cpp",
        *(f"-I{folder}" for folder in (SOURCES / "include", SOURCES / "src", include)),
    ]
    subprocess.run([str(word) for word in command], check=True)

    def found(*words: str) -> tuple[str, set[str]]:
        best, *sets = subprocess.run(
            [program, *words], check=True, capture_output=True, text=True
        ).stdout.split()
        return best, set(sets)

    flags = set(re.findall(r"^flags.*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)[0].split())
    needed = {
        "AVX512_VNNI": {"avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
        "AVX512": {"avx512bw", "avx512dq", "avx512vl"},
        "AVX_VNNI": {"avx_vnni"},
        "AVX2": {"avx2", "fma", "f16c"},
    }
    tiles = (
        {"AMX"} if needed["AVX512_VNNI"] <= flags else set()
    )  # the program says that it has them
    possible = [name for name, features in needed.items() if features <= flags]
    best, sets = found()
    assert best == (possible or ["none"])[0]
    assert sets == {*possible, *tiles}
    best, sets = found("no_avx512")
    assert not {name for name in (best, *sets) if name.startswith("AVX512")}
    assert sets == {name for name in possible if not name.startswith("AVX512")}
