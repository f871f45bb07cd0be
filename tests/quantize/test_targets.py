"""Every instruction set, forced in a subprocess; and invalid names of instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_gguf.quantize import quantizer

COMPARE = ("-m", "support.quantize.compare")


def run(target: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"MTP_QUANTIZE_TARGET": target},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("target", quantizer.targets())
def test_bytes(target: str) -> None:
    result = run(target, *COMPARE, "--kernel", target)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", quantizer.targets()[:-1])
@pytest.mark.parametrize("values", ["30000", pytest.param("10000000", marks=pytest.mark.slow)])
def test_not_finite(values: str, target: str) -> None:
    """NaN and infinity are treated as ggml treats them, unless it was built to abort on them."""
    result = run(target, *COMPARE, "--values", values, "--not-finite")
    if result.returncode < 0:
        pytest.skip("this build of ggml asserts that values are finite")
    assert result.returncode == 0, result.stdout + result.stderr


def test_unknown_target() -> None:
    code = (
        "import numpy as np\n"
        "from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME\n"
        "from mtp_gguf.quantize import quantizer\n"
        "quantizer.quantize_rows(BY_NAME['Q4_K'], np.zeros((1, 256), np.float32))\n"
    )
    result = run("mmx", "-c", code)
    assert result.returncode == 1
    assert "MTP_QUANTIZE_TARGET: expected one of " in result.stderr
