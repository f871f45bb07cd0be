"""If ggml rounds differently from the kernels, the self-test notices it and ggml quantizes.

Upstream's quantizers are compiled once more, so that products and sums fuse (as on ARM, or with
-march=native), and put before those of the ggml that llama_cpp has loaded.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_gguf.native.runtime import loaded_library
from mtp_gguf.quantize import quantizer
from support.quantize.cases import KINDS, X86_64
from support.upstream.sdist import llama_cpp_source

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() not in X86_64,
        reason="the reference is compiled for x86-64 and preloaded as on Linux",
    ),
]

REASON = "ggml: this build of it rounds differently from the kernel"
REPORT = """
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.quantize import quantizer
for name in {names}:
    print(name, quantizer.kernel(BY_NAME[name], False), sep="=")
"""


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Upstream's ggml-quants.c with fused products and sums, as a library to be preloaded."""
    source = llama_cpp_source() / "ggml"
    library = tmp_path_factory.mktemp("fused") / "libfused.so"
    flags = [
        "-O2",
        "-mfma",
        "-ffp-contract=fast",
        "-fPIC",
        "-shared",
        "-w",
        "-DNDEBUG",
        "-D_GNU_SOURCE",
    ]
    headers = [f"-I{source}/include", f"-I{source}/src"]
    rest = library.with_name("libggml-base.so.0")  # its soname, which a loader looks for
    rest.symlink_to(loaded_library("ggml-base"))
    code = str(source / "src" / "ggml-quants.c")
    linked = [str(rest), f"-Wl,-rpath,{rest.parent}"]
    subprocess.run(["cc", *flags, *headers, code, *linked, "-o", str(library)], check=True)
    return library


def run(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.thorough
def test_the_self_test_finds_it_out(fused: Path) -> None:
    names = [*(kind.name for kind in KINDS), "F16"]
    result = run(fused, "-c", REPORT.format(names=names))
    assert result.returncode == 0, result.stderr
    found = dict(line.split("=") for line in result.stdout.splitlines())
    assert [*found] == names
    best = os.environ.get("MTP_QUANTIZE_TARGET") or quantizer.targets()[0]
    for name, kernel in found.items():
        assert kernel == (best if name in ("Q8_0", "F16") else REASON), name


@pytest.mark.thorough
def test_the_bytes_are_its_own(fused: Path) -> None:
    result = run(fused, "-m", "support.quantize.compare", "--values", "30000")
    assert result.returncode == 0, result.stdout + result.stderr
