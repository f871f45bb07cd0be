"""Every tool's checkpoint becomes upstream's bytes, or is refused in one sentence.

One row runs every day; all of them, with the packages of the `real-tools` extra, by

    pytest -m "slow or not slow" tests/real_tools

The rows of transformers 4 need TRANSFORMERS_4_PYTHON, a Python of an environment that has it; those
of llama.cpp's programs need `mtp-gguf build-server`. A row whose tool is missing is skipped and
says which. What does not run on a machine without a GPU is named in docs/tensors.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.checkpoints import Spec, write_checkpoint
from support.commands import check_refusal, invoke
from support.real_tools.make import MAKERS, MISSING, llama_program
from support.real_tools.rows import ROWS, SAME, Row
from support.upstream.compare import metadata_differences, tensor_differences
from support.upstream.convert_upstream import convert, quantize
from support.upstream.describe import Description, describe
from support.upstream.make_goldens import as_quantized

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra"),
]

# Without a head, which transformers does not keep; the tools quantize the matrices of the trunk.
SOURCE = Spec(
    "source", layers=2, interval=2, kv_heads=1, linear_dim=64, mtp=False, state_dtype="BF16"
)
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tools") / SOURCE.name, SOURCE)


def made(row: Row, source: Path, folder: Path) -> Path:
    """The checkpoint that the row's tool writes."""
    target = folder / "model"
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "support.real_tools.make", row.made, str(source), str(target)],
        cwd=folder,
        env={**os.environ, **quiet, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if done.returncode == MISSING:
        pytest.skip(f"a tool is missing: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return next(target.rglob("config.json"), target / "model").parent


def upstreams(model: Path, imatrix: Path | None, folder: Path) -> Description:
    theirs = folder / "theirs.gguf"
    if model.is_dir():
        return as_quantized(describe(convert(model, theirs, "f32", ["--no-mtp"])))
    if imatrix is None:
        return describe(quantize(model, theirs, "Q8_0"))
    words = [llama_program("llama-quantize"), "--imatrix", imatrix.name, str(model), str(theirs)]
    subprocess.run([*words, "Q4_K_M", "2"], cwd=imatrix.parent, check=True, capture_output=True)
    return describe(theirs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.made, marks=[] if row.daily else [pytest.mark.slow]) for row in ROWS],
)
def test_the_bytes_of_upstream_or_one_sentence(row: Row, source: Path, tmp_path: Path) -> None:
    model = made(row, source, tmp_path)
    out = tmp_path / "ours.gguf"
    whole = min(model.glob("model*.gguf"), default=model)
    imatrix = next(model.glob("imatrix.*"), None)
    options = ["--quant", "Q8_0" if whole.is_file() else "F32"]
    if imatrix:
        options = ["--quant", "Q4_K_M", "--imatrix", str(imatrix)]
    result = invoke("convert", whole, "-o", out, *options, "--no-mtp")
    if row.outcome != SAME:
        message = check_refusal(result.exit_code, result.stderr, row.outcome)
        assert not out.exists()
        if (model / "config.json").is_file() and "adapter" not in row.outcome:
            listed = " ".join(invoke("list-tensors", model).output.split())
            assert message.removeprefix("mtp-gguf: ").strip() in listed
        return
    assert result.exit_code == 0, result.output
    ours, theirs = describe(out), upstreams(whole, imatrix, tmp_path)
    found = [*tensor_differences(theirs.tensors, ours.tensors), *metadata_differences(theirs, ours)]
    assert not found, "\n".join(found)


def test_every_row_of_the_table_has_a_maker() -> None:
    assert [row.made for row in ROWS if row.made not in MAKERS] == []
