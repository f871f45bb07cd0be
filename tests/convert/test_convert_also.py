"""`mtp-gguf convert --also`: several precisions in one run, each as from its own run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mtp_gguf.convert.plans.plan import path_of_another
from support.checkpoint_edits import edit_tensors
from support.checkpoints import SMALL, SPECS, Spec
from support.commands import held, invoke
from support.conversions import converted, refused
from support.models import Models
from support.upstream.imatrix import write_imatrix

ALSO = "Q5_K_M", "Q8_0", "F16"
MIXTURE = SPECS["moe-mixed"]


def alone(model: Path, path: Path, quant: str, *options: object) -> bytes:
    """The file of a run for one precision."""
    converted(model, path, "--quant", quant, "--overwrite", *options)
    return path.read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("spec", [SMALL, MIXTURE], ids=lambda spec: spec.name)
@pytest.mark.parametrize("threads", [1, 16])
def test_each_is_the_file_of_a_run_of_its_own(
    spec: Spec, threads: int, models: Models, output: Path, tmp_path: Path
) -> None:
    model = models.checkpoint(spec)
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", spec)
    options = ["--mtp-type", "Q6_K", "--fastmtp", "100", "--imatrix", imatrix]
    options += ["--fastmtp-layout", "table", "--tensor-type", "ffn_up=Q8_0"]
    also = ["--also", ",".join(ALSO[:2]), "--also", ALSO[2]]
    arguments = [model, "-o", output / "x.gguf", "--threads", threads, *also]
    result = invoke("convert", *arguments, *options)
    assert result.exit_code == 0, result.output
    names = {"Q4_K_M": "x.gguf", **{quant: f"x-{quant}.gguf" for quant in ALSO}}
    files = held(output)
    assert {*files} == {*names.values()}
    for quant, name in names.items():
        assert files[name] == alone(model, tmp_path / "alone.gguf", quant, *options), quant
        assert f"{output / name}: " in result.stdout
        assert f"{quant}:\n" in result.stdout


def test_the_head_by_itself(models: Models, output: Path, tmp_path: Path) -> None:
    model = models.checkpoint(MIXTURE)
    head = ["--mtp-type", "Q6_K", "--fastmtp", "100"]
    words = [model, "-o", output, "--also", "Q5_K_M", "--sidecar", "Q5_K_M", *head]
    plan = json.loads(invoke("convert", *words, "--dry-run", "--json").stdout)
    assert not held(output)
    assert invoke("convert", *words).exit_code == 0
    _, trunk, sidecar = (Path(p["files"][0]["path"]) for p in (plan, *plan["also"]))
    assert len(held(output)) == 3
    assert sidecar.name == f"mtp-{trunk.name}"
    assert sidecar.read_bytes() == alone(model, tmp_path / "x.gguf", "Q5_K_M", "--head-only", *head)


def test_a_head_by_itself_needs_a_checkpoint_with_one(models: Models, output: Path) -> None:
    gguf = output.parent / "x-F16.gguf"
    converted(models.checkpoint(SMALL), gguf, "--quant", "F16")
    for words in ((gguf,), (models.checkpoint(SMALL), "--no-mtp"), (gguf, "--mmproj-only")):
        done = invoke("convert", *words, "-o", output / "x.gguf", "--sidecar", "Q8_0")
        assert done.exit_code in (1, 2)
        assert "--sidecar" in done.stderr
    assert not held(output)


def test_from_a_gguf_and_in_shards(models: Models, output: Path, tmp_path: Path) -> None:
    source = tmp_path / "source-BF16.gguf"
    converted(models.checkpoint(SMALL), source, "--quant", "BF16", "--mtp-type", "BF16")
    options = "--split-max-size", "700K", "-o", output / "x-Q4_K_M.gguf"
    assert invoke("convert", source, "--also", "Q8_0", *options).exit_code == 0
    assert len([*output.glob("x-Q4_K_M-*.gguf")]) < len([*output.glob("x-Q8_0-*.gguf")])
    for quant in ("Q4_K_M", "Q8_0"):
        apart = tmp_path / quant
        apart.mkdir()
        options = "--split-max-size", "700K", "-o", apart / f"x-{quant}.gguf"
        assert invoke("convert", source, "--quant", quant, *options).exit_code == 0
        parts = held(apart)
        assert parts
        assert parts.items() <= held(output).items()
    assert len(held(output)) == sum(len(held(tmp_path / q)) for q in ("Q4_K_M", "Q8_0"))


def test_each_weight_is_read_once(
    models: Models, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtp_gguf.convert.checkpoints.source_rows import SourceRows  # noqa: PLC0415

    read, whole = [], SourceRows.read

    def counted(self: SourceRows, target: object, start: int, stop: int) -> object:
        read.append((target.name, start, stop))  # type: ignore[attr-defined]
        return whole(self, target, start, stop)  # type: ignore[arg-type]

    monkeypatch.setattr(SourceRows, "read", counted)
    arguments = [models.checkpoint(SMALL), "-o", output / "x.gguf", "--also", ",".join(ALSO)]
    assert invoke("convert", *arguments).exit_code == 0
    assert len(read) == len({*read})


def test_plan_names_all_files(models: Models, output: Path) -> None:
    arguments = [models.checkpoint(SMALL), "-o", output, "--also", ",".join(ALSO)]
    text = invoke("convert", *arguments, "--dry-run").stdout
    plan = json.loads(invoke("convert", *arguments, "--dry-run", "--json").stdout)
    assert not held(output)
    plans = [plan, *plan["also"]]
    assert [p["quant"] for p in plans] == ["Q4_K_M", *ALSO]
    paths = [f["path"] for p in plans for f in p["files"]]
    assert all(f"{path}: " in text for path in paths)
    assert all(Path(p).name.endswith(f"-{q['quant']}.gguf") for p, q in zip(paths, plans))  # noqa: B905
    written = json.loads(invoke("convert", *arguments, "--json").stdout)
    assert plan.items() <= written.items()
    assert sorted(map(str, output.iterdir())) == sorted(paths)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.gguf", "model-Q8_0.gguf"),
        ("model-Q4_K_M.gguf", "model-Q8_0.gguf"),
        ("model.q4_k_m.gguf", "model.q8_0.gguf"),
        ("Q4_K_M-of-Q4_K_M-2.gguf", "Q4_K_M-of-Q8_0-2.gguf"),
        ("model-Q4_K_Mixed.gguf", "model-Q4_K_Mixed-Q8_0.gguf"),
        ("xQ4_K_M.gguf", "xQ4_K_M-Q8_0.gguf"),
        ("model-Q4_K_M_L.gguf", "model-Q4_K_M_L-Q8_0.gguf"),
        ("model", "model-Q8_0"),
    ],
)
def test_names(name: str, expected: str) -> None:
    assert path_of_another(Path("a") / name, "Q4_K_M", "Q8_0") == Path("a") / expected


@pytest.mark.parametrize("name", ["x.gguf", "x-Q8_0.gguf"])
def test_none_may_exist(name: str, models: Models, output: Path) -> None:
    (output / name).write_text("precious")
    arguments = [models.checkpoint(SMALL), "-o", output / "x.gguf", "--also", "Q8_0"]
    refused(arguments, f"{name}: exists", "--overwrite", output=output)
    assert invoke("convert", *arguments, "--overwrite").exit_code == 0
    assert {*held(output)} == {"x.gguf", "x-Q8_0.gguf"}


def test_none_may_be_the_source(models: Models, output: Path) -> None:
    source = output / "x-F16.gguf"
    converted(models.checkpoint(SMALL), source, "--quant", "F16", "--mtp-f16")
    arguments = [source, "-o", output / "x.gguf", "--also", "F16", "--overwrite"]
    refused(arguments, "x-F16.gguf: is the input", output=output)


def test_a_fault_in_one_leaves_none(models: Models, output: Path) -> None:
    """Q2_K_S wants an imatrix: said before anything is written. A folder in the way: after."""
    arguments = [models.checkpoint(SMALL), "-o", output / "x.gguf"]
    refused([*arguments, "--also", "Q8_0,IQ2_XS"], "imatrix", output=output)
    (output / "x-Q8_0.gguf").mkdir()
    refused([*arguments, "--also", "F16,Q8_0"], "x-Q8_0.gguf", "folder", output=output)
    (output / "x-Q8_0.gguf").rmdir()


def test_weights_too_large_for_one_leave_none(models: Models, output: Path) -> None:
    model, name = models.copy(SMALL, output.parent), "model.layers.1.mlp.up_proj.weight"
    edit_tensors(model, lambda t: t.update({name: np.full_like(t[name], 1e30)}))
    arguments = [model, "-o", output / "x.gguf", "--quant", "BF16", "--also", "F16"]
    refused(arguments, "cannot be written as F16", "too large", output=output)
