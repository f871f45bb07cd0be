"""benchmarks/gpu_bundle.py: what the check of a GPU needs, and the check that runs with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

from mtp_gguf.server.patches import read_patches
from support.commands import run_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_patches_leave_the_shared_libraries_alone() -> None:
    """So the bundle has one libggml and one CUDA backend for llama.cpp with and without patches."""
    changed = [
        name.decode()
        for patch in read_patches()
        for name in re.findall(rb"^diff --git a/(\S+)", patch.data, re.MULTILINE)
    ]
    assert "ggml/src/ggml-backend.cpp" in changed
    shared = re.compile(r"ggml/src/(ggml-cuda/|ggml-backend-(reg|dl|impl)\.|ggml-(impl|common)\.h)")
    assert not [name for name in changed if shared.match(name)]


def test_packages_are_those_that_torch_and_transformers_do_not_bring() -> None:
    """With what these need themselves, such as urllib3, and in the versions used here."""
    program = "from gpu_bundle import lacking; print(*lacking('3.12'))"
    found = dict(word.split("==") for word in run_python(program, cwd=BENCHMARKS).split())
    assert found.keys() >= {"gguf", "psutil", "prompt-toolkit", "pytest", "requests", "urllib3"}
    assert not found.keys() & {"numpy", "torch", "transformers", "tokenizers", "tomli", "mtp-gguf"}
    assert found["psutil"] == version("psutil")


@pytest.mark.thorough
def test_a_bundle_is_all_that_a_check_needs(patched_server: Path, tmp_path: Path) -> None:
    """Made of libraries for the CPU, and run by another Python than this environment's."""
    bundle, there = tmp_path / "bundle", tmp_path / "there"
    command = [sys.executable, str(BENCHMARKS / "gpu_bundle.py"), str(bundle)]
    command += ["--stock", str(patched_server.parent), "--without-packages", "--preset", "0"]
    subprocess.run(command, check=True, stdout=subprocess.PIPE)
    venv.create(there, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(there)}))
    # The other packages, without their .pth files, one of which may lead to mtp-gguf.
    (packages / "other.pth").write_text(sysconfig.get_path("purelib"))
    environment = {**os.environ, "PYTHON": str(there / "bin" / "python")}
    words = ["--backend", "cpu", "--shapes", "tiny", "--steps", "text,calls"]
    tools = tmp_path / "tools"  # neither xz nor a compiler
    tools.mkdir()
    for name in ("bash", "cp", "dirname", "mkdir", "rm", "sed"):
        (tools / name).symlink_to(str(shutil.which(name)))
    environment["PATH"] = str(tools)

    def check(checkout: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(bundle / "check"), str(tmp_path / "results"), *words],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    other = tmp_path / "checkout"  # with a patch that has changed since
    other.mkdir()
    settings = (BENCHMARKS.parent / "pyproject.toml").read_text(encoding="utf-8")
    (other / "pyproject.toml").write_text(settings, encoding="utf-8")
    for room in ["src", *re.findall(r'^"mtp_gguf/.*" = "(.*)"', settings, re.MULTILINE)]:
        shutil.copytree(BENCHMARKS.parent / room, other / room)
    with next((other / "patches").glob("0108-*.patch")).open("a", encoding="utf-8") as patch:
        patch.write("changed\n")
    refused = check(other)
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert refused.stderr.splitlines() == [
        f"{bundle / 'check'}: expected the patches of this checkout, found others; "
        "call .ci/gpu-bundle again"
    ]

    done = check(BENCHMARKS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "results" / "gpu.md").read_text().splitlines()
    rows = [line[2:].split(" | ") for line in lines if line.startswith("| ")]
    measured = [row[0] for row in rows if row[0] not in ("depth", "decoding", "---")]
    assert measured[:6] == ["0", "1", "2", "3", "4", "auto"]
    assert measured[6:] == ["greedy", "rejection sampling", "four sequences, greedy"]
    assert {row[1] for row in rows if row[0].isdecimal() or row[0] == "auto"} == {"64"}
    program = "from mtp_gguf.native.runtime import plugged_kernels, runtime; print(runtime.folder)"
    environment["PYTHONPATH"] = str(bundle / "programs" / "site")
    found = subprocess.check_output(
        [environment["PYTHON"], "-c", program], env=environment, text=True
    )
    assert found.strip() == str(bundle / "programs/site/mtp_gguf/native/lib/fast")
    # The libraries are loaded by ctypes, so that any version of Python runs them.
    assert not [*(bundle / "programs").rglob("*cpython-*.so")]
