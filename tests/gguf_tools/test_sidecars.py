"""Head-only files of publishers: listed, diagnosed, grafted, written, and found beside a model."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
from gguf import GGUFReader

from mtp_gguf.gguf_tools.heads.head_files import (
    heads_beside,
    model_name,
    sidecar_name,
    type_in_name,
)
from mtp_gguf.gguf_tools.hub.resolve import local_gguf
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native import MTPLlama
from support.checkpoints import MOE, SPECS
from support.commands import invoke, refused, succeed
from support.gguf_files import value_of
from support.models import Models
from support.sidecars import BLOCK, OUTSIDE, SHARED_KEY, write_sidecar

DENSE = SPECS["dense-untied"]
UNIFORM = ("--quant", "Q8_0", "--mtp-f16")
KEY = f"qwen35.{SHARED_KEY}"


@pytest.fixture(params=[False, True], ids=["ggml-org", "unsloth"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def sidecar(shared: bool, models: Models, tmp_path: Path) -> Path:
    whole = models.convert(DENSE, *UNIFORM)
    return write_sidecar(whole, tmp_path / "mtp-Tiny-F16.gguf", shared=shared)


def findings(*arguments: object) -> dict[str, dict[str, str]]:
    fields = json.loads(invoke("doctor", *arguments, "--json").stdout)
    return {finding["code"]: finding for finding in fields["findings"]}


def test_a_sidecar_says_what_it_is_for(shared: bool, sidecar: Path, models: Models) -> None:
    listed = json.loads(succeed("list-tensors", sidecar, "--json"))
    assert len(listed["tensors"]) == (15 if shared else 15 + len(OUTSIDE))
    assert listed["head"]["ready"]
    assert listed["head"]["shared"] is shared
    assert listed["head"]["stock"] is not shared
    text = succeed("list-tensors", sidecar)
    assert ("shares its trunk's embedding" in text) is shared
    alone = findings(sidecar)
    assert {code for code, each in alone.items() if each["severity"] != "note"} == set()
    assert "qwen35 model that it was made from, with 4 layers, width" in alone["sidecar"]["text"]
    assert ("shared-head" in alone) is shared
    trunk = models.convert(DENSE, "--quant", "Q8_0", "--no-mtp")
    beside = Path(shutil.copy(trunk, sidecar.parent / "Tiny-Q8_0.gguf"))
    shutil.copy(trunk, sidecar.parent / "Tiny-00009-of-00002.gguf")  # no such shard: no candidate
    purpose = findings(sidecar)["sidecar"]
    assert "it fits Tiny-Q8_0.gguf beside it" in purpose["text"]
    assert purpose["fix"] == f"mtp-gguf doctor {beside} --head {sidecar}"
    together = findings(beside, "--head", sidecar)
    assert f"{sidecar} fits this model" in together["sidecar"]["text"]
    other = models.convert(MOE, "--quant", "Q8_0", "--no-mtp")
    assert findings(other, "--head", sidecar)["does-not-fit"]["severity"] == "fault"


def test_grafting_one_is_converting(sidecar: Path, models: Models, tmp_path: Path) -> None:
    trunk = models.convert(DENSE, "--quant", "Q8_0", "--no-mtp")
    made = tmp_path / "made.gguf"
    succeed("graft", "--no-check", trunk, "--from", sidecar, "-o", made)
    assert made.read_bytes() == models.convert(DENSE, *UNIFORM).read_bytes()
    assert value_of(made, KEY) is None


def test_extract_writes_both_layouts(shared: bool, sidecar: Path, models: Models) -> None:
    whole = Path(shutil.copy(models.convert(DENSE, *UNIFORM), sidecar.parent / "Tiny-Q8_0.gguf"))
    folder = sidecar.parent / "out"
    folder.mkdir()
    layout = "unsloth" if shared else "ggml-org"
    succeed("extract", whole, "--layout", layout, "-o", folder)
    [made] = folder.iterdir()
    assert made.name == ("mtp-Tiny-shared-F16.gguf" if shared else "mtp-Tiny-F16.gguf")
    assert value_of(made, KEY) is (True if shared else None)
    ours, theirs = ({t.name for t in GGUFReader(path).tensors} for path in (made, sidecar))
    assert ours == theirs


def test_a_sidecar_gives_up_what_its_trunk_has(models: Models, tmp_path: Path) -> None:
    head = models.convert(DENSE, *UNIFORM, "--head-only")
    succeed("extract", models.convert(DENSE, *UNIFORM), "-o", tmp_path / "a.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == head.read_bytes()
    small = tmp_path / "mtp-Tiny-shared-F16.gguf"
    succeed("extract", head, "--layout", "unsloth", "-o", small)
    assert {t.name for t in GGUFReader(small).tensors} == {f"blk.4.{s}" for s in BLOCK}
    refused(tmp_path, "extract", small, "-o", tmp_path / "b.gguf", words=("graft it first",))
    refused(tmp_path, "strip", small, "-o", tmp_path / "b.gguf", words=("is a head alone",))
    short = tmp_path / "short.gguf"
    words = ("--fastmtp", "256", "--fastmtp-layout", "sidecar")
    shutil.copy(models.convert(DENSE, *UNIFORM, *words), short)
    options = ("--layout", "unsloth", "-o", tmp_path / "b.gguf")
    refused(tmp_path, "extract", short, *options, words=("draft vocabulary (layout sidecar)",))


def test_tensors_decide_what_is_shared(models: Models, tmp_path: Path) -> None:
    """Not the key that announces it."""
    whole = models.convert(DENSE, *UNIFORM)
    path = write_sidecar(whole, tmp_path / "mtp-x.gguf", shared=True, flag=False)
    with open_model(path) as model:
        assert model.report.ready
        assert model.report.shared


def test_names() -> None:
    assert sidecar_name(Path("Qwen3.8-27B-UD-Q4_K_XL.gguf"), "Q4_0", shared=False) == (
        "mtp-Qwen3.8-27B-Q4_0.gguf"
    )
    shards = Path("Qwen3.8-Flash-Next-IQ4_XS-00001-of-00003.gguf")
    assert sidecar_name(shards, "Q8_0", shared=True) == "mtp-Qwen3.8-Flash-Next-shared-Q8_0.gguf"
    assert model_name(Path("mtp-Qwen3.8-Flash-Next-shared-Q8_0.gguf")) == "Qwen3.8-Flash-Next"
    assert type_in_name(Path("Qwen3.5-0.8B.gguf")) is None


def test_the_one_with_the_models_name_is_taken(models: Models, tmp_path: Path) -> None:
    whole = models.convert(DENSE, *UNIFORM)
    trunk = models.convert(DENSE, "--quant", "Q8_0", "--no-mtp")
    path = Path(shutil.copy(trunk, tmp_path / "Tiny-Q8_0.gguf"))

    def beside() -> list[str]:
        with open_model(path) as model:
            return [str(found.relative_to(tmp_path)) for found in heads_beside(model)]

    (tmp_path / "MTP").mkdir()
    write_sidecar(whole, tmp_path / "MTP" / "mtp-Tiny-shared-Q8_0.gguf", shared=True)
    assert beside() == ["MTP/mtp-Tiny-shared-Q8_0.gguf"]
    assert local_gguf(str(path)).head == tmp_path / "MTP" / "mtp-Tiny-shared-Q8_0.gguf"
    assert local_gguf(str(path), with_head=False).head is None
    write_sidecar(whole, tmp_path / "mtp-Other-Q8_0.gguf", shared=False)
    assert beside() == ["MTP/mtp-Tiny-shared-Q8_0.gguf"]
    write_sidecar(whole, tmp_path / "MTP" / "mtp-Tiny-Q8_0.gguf", shared=False)
    assert beside() == ["MTP/mtp-Tiny-Q8_0.gguf"]
    write_sidecar(whole, tmp_path / "mtp-Tiny-Q4_0.gguf", shared=False)
    assert beside() == ["mtp-Tiny-Q4_0.gguf", "MTP/mtp-Tiny-Q8_0.gguf"]


def test_python_finds_it_and_drafts_the_same(shared: bool, sidecar: Path, models: Models) -> None:
    trunk = models.convert(DENSE, "--quant", "Q8_0", "--no-mtp")
    model = Path(shutil.copy(trunk, sidecar.parent / "Tiny-Q8_0.gguf"))
    runs = []
    for path in (models.convert(DENSE, *UNIFORM), model):
        with MTPLlama(str(path), depth=2, n_ctx=256) as llama:
            tokens = [*islice(llama.generate([5, 6, 7, 8], temp=0.0), 24)]
            stats = llama.mtp_stats
            runs.append((tokens, stats.drafted, stats.accepted))
    assert runs[0] == runs[1]
    assert sum(runs[0][1]) > 0
