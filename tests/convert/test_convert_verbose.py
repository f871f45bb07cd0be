"""`mtp-gguf convert --verbose`: which code quantizes each type."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.quantize import quantizer
from support.checkpoints import SMALL
from support.commands import invoke, spawn
from support.models import Models
from support.quantize.cases import has_kernel
from support.upstream.imatrix import write_imatrix


def expected(name: str, weighted: bool = False) -> str:
    kind = BY_NAME[name]
    return quantizer.targets()[0] if has_kernel(kind, weighted) else "ggml"


def test_names_the_kernel_of_each_type(models: Models, tmp_path: Path) -> None:
    """Those with importance weights apart; nothing for F32, which is not quantized."""
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", SMALL)
    options = "--imatrix", imatrix, "--mtp-type", "Q5_1", "--also", "Q4_0,BF16"
    arguments = [models.checkpoint(SMALL), "-o", tmp_path / "x.gguf", *options, "--verbose"]
    found = json.loads(invoke("convert", *arguments, "--dry-run", "--json").stdout)["kernels"]
    labels = {
        (label.removesuffix(" with importance"), label.endswith("importance")) for label in found
    }
    assert {("Q4_K", True), ("Q4_0", True), ("Q5_1", False), ("BF16", False)} <= labels
    assert ("F32", False) not in labels
    assert {name.split(":")[0] for name in found.values()} <= {quantizer.targets()[0], "ggml"}
    for label, name in found.items():
        kind, _, weighted = label.partition(" with ")
        assert name.split(":")[0] == expected(kind, bool(weighted)), label
    result = invoke("convert", *arguments)
    assert result.exit_code == 0
    for label, name in found.items():
        assert f"quantizer of {label}: {name}\n" in result.stderr
    assert ", ".join(quantizer.targets()) in result.stderr


def test_is_silent_without(models: Models, tmp_path: Path) -> None:
    arguments = [models.checkpoint(SMALL), "-o", tmp_path / "x.gguf", "--dry-run"]
    result = invoke("convert", *arguments)
    assert "quantizer" not in result.stdout + result.stderr
    assert "kernels" not in json.loads(invoke("convert", *arguments, "--json").stdout)


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", quantizer.targets()[1:])
def test_of_a_forced_instruction_set(target: str, models: Models, tmp_path: Path) -> None:
    arguments = ["convert", models.checkpoint(SMALL), "-o", tmp_path / "x.gguf", "--verbose"]
    with spawn(*arguments, env=os.environ | {"MTP_QUANTIZE_TARGET": target}) as process:
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    kernels = re.findall(r"^quantizer of (\w+): (\w+)$", stderr, re.M)
    assert len(kernels) >= 2
    assert {name for _, name in kernels} == {target}
