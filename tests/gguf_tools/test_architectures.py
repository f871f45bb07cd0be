"""The file tools on every architecture that llama.cpp gives a NextN block.

The files are synthetic (`upstream.nextn_models`), made and tried by stock llama.cpp: whether it
loads what the tools write, and drafts the same with it.

All tensors of all architectures: python -m pytest -m slow THIS_FILE
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import TensorCopy
from mtp_gguf.gguf_tools.heads.nextn import ARCHITECTURES, BLOCKS, OUR_ARCHITECTURES
from mtp_gguf.gguf_tools.model import Metadata, open_model
from support.commands import held, invoke, refused, succeed
from support.gguf_files import drop, edited
from support.upstream.nextn_models import LAYERS, drafts, trunk_layers, trunk_tokens, write_models

OTHERS = [name for name in ARCHITECTURES if name not in OUR_ARCHITECTURES]
EVERYDAY = ("glm4moe", "mimo2")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("nextn"), ARCHITECTURES)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES]
)
def test_the_table(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    """Exactly the tensors of its row are those without which llama.cpp does not draft."""
    block = f"blk.{trunk_layers(name)}."
    with open_model(files[name]) as model:
        tensors = [tensor for tensor in model.tensors if tensor.startswith(block)]
    copies = [
        edited(files[name], tmp_path / f"{i}.gguf", tensors=drop(tensor))
        for i, tensor in enumerate(tensors)
    ]
    ours = []
    for copy in copies:
        with open_model(copy) as model:
            ours.append(model.head.report.ready)
    theirs = [drafted is not None for drafted in drafts(copies)]
    assert ours.count(False) > len(BLOCKS[name].required) // 2
    differing = {t for t, a, b in zip(tensors, ours, theirs, strict=True) if a is not b}
    assert differing == {f"{block}{suffix}.weight" for suffix in TOLERATED.get(name, ())}


# Without these llama.cpp runs another network than the model's (ungated, say), and drafts badly.
TOLERATED = {
    "step35": ("ffn_gate_inp", "ffn_gate_exps", "ffn_gate_shexp"),
    "hy_v3": ("ffn_gate_inp", "ffn_gate_shexp"),
}


def test_the_documentation_has_a_row_for_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "surgery.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1].strip(" `") for line in page.splitlines() if "step by step |" in line
    ]
    assert rows == OTHERS


@pytest.mark.thorough
def test_round_trips(files: dict[str, Path], tmp_path: Path) -> None:
    """strip, extract and graft: llama.cpp runs the trunk and drafts with the head as before."""
    results = []
    for name in ARCHITECTURES:
        trunk, head, whole = (tmp_path / f"{name}-{part}.gguf" for part in ("t", "h", "w"))
        assert "cannot draft: the file has no MTP head" in succeed(
            "strip", files[name], "-o", trunk
        )
        assert "a head alone, MTP head in block" in succeed("extract", files[name], "-o", head)
        text = succeed("graft", trunk, "--from", head, "-o", whole)
        blocks = LAYERS.get(name, 1)
        first = trunk_layers(name)
        where = f"block {first}" if blocks == 1 else f"blocks {first} to {first + blocks - 1}"
        assert f"can draft: MTP head in {where}" in text
        same = succeed("compare", files[name], whole)
        assert " same\n0 keys of the metadata differ" in same
        results.append((files[name], head, whole, trunk))
    originals, heads, wholes, trunks = (list(paths) for paths in zip(*results, strict=True))
    expected = drafts(originals)
    assert None not in expected
    assert drafts(heads) == expected
    assert drafts(wholes) == expected
    assert trunk_tokens(trunks) == trunk_tokens(originals)


def test_doctor(files: dict[str, Path]) -> None:
    for name in OTHERS:
        found = json.loads(succeed("doctor", files[name], "--json"))
        assert found["can_draft"], name
        commands = [command.split()[0:2] for command in found["runs_with"]]
        assert [c[0] for c in commands] == ["llama-server", "mtp-gguf"], name
        assert not found["findings"], name


def test_heads_that_no_checkpoint_gives(files: dict[str, Path], tmp_path: Path) -> None:
    """doctor names no graft that would be refused."""
    trunk = tmp_path / "trunk.gguf"
    sources = {"hy_v3": "OTHER.gguf", "glm4moe": "ORIGINAL", "step35": "ORIGINAL"}
    for name, source in sources.items():
        succeed("strip", files[name], "-o", trunk, "--overwrite")
        found = json.loads(invoke("doctor", trunk, "--json").output)
        assert f"--from {source}" in found["findings"][0]["fix"]


def test_listing(files: dict[str, Path]) -> None:
    for name in OTHERS:
        listed = json.loads(succeed("list-tensors", files[name], "--mtp", "--json"))
        blocks = {int(t["name"].split(".")[1]) for t in listed["tensors"]}
        first = trunk_layers(name)
        assert blocks == set(range(first, first + LAYERS.get(name, 1))), name
        assert listed["head"]["ready"], name
        assert not listed["head"]["ours"], name


def test_heads_of_other_models(files: dict[str, Path], tmp_path: Path) -> None:
    trunk = tmp_path / "trunk.gguf"
    succeed("strip", files["glm4moe"], "-o", trunk)
    out = ("-o", tmp_path / "x.gguf")
    words: tuple[str, ...] = ("is mimo2, but", "is glm4moe: its head does not fit")
    refused(tmp_path, "graft", trunk, "--from", files["mimo2"], *out, words=words)
    words = ("has an MTP head in block 2 already",)
    refused(tmp_path, "graft", files["glm4moe"], "--from", files["glm4moe"], *out, words=words)

    wide = {"glm4moe.expert_count": Value(ValueType.U32, 4)}
    other = edited(files["glm4moe"], tmp_path / "other.gguf", metadata=wide)
    words = ("has expert_count 4, but", "its head does not fit")
    refused(tmp_path, "graft", trunk, "--from", other, *out, words=words)


@pytest.mark.parametrize(("name", "claimed"), [("glm4moe", 2), ("step35", 2), ("step35", 4)])
def test_numbers_of_layers(name: str, claimed: int, files: dict[str, Path], tmp_path: Path) -> None:
    claim = {f"{name}.nextn_predict_layers": Value(ValueType.U32, claimed)}
    path = edited(files[name], tmp_path / "x.gguf", metadata=claim)
    found = json.loads(invoke("doctor", path, "--json").output)
    assert found["findings"][0]["code"] == "layers"
    assert f"found {claimed} by" in found["findings"][0]["text"]


def test_one_of_three_heads_is_incomplete(files: dict[str, Path], tmp_path: Path) -> None:
    broken = drop("blk.3.attn_output.")
    path = edited(files["step35"], tmp_path / "x.gguf", tensors=broken)
    words = ("no complete MTP head: attn_output.weight is missing",)
    refused(tmp_path, "extract", path, "-o", tmp_path / "y.gguf", words=words)


def test_draft_vocabularies(files: dict[str, Path], tmp_path: Path) -> None:
    out = ("-o", tmp_path / "x.gguf")
    ours = "qwen35, qwen35moe, qwen3next, glm4moe, step35"
    words: tuple[str, ...] = (f"draft vocabularies are for {ours}, found mimo2",)
    refused(tmp_path, "fastmtp", "add", files["mimo2"], "-n", "32", *out, words=words)
    words = ("expected layout ids for step35", "found table")
    table = ("--layout", "table", *out)
    refused(tmp_path, "fastmtp", "add", files["step35"], "-n", "32", *table, words=words)
    words = ("expected layout ids for step35", "found sidecar")
    options = ("--fastmtp", "32", "--fastmtp-layout", "sidecar", "--quant", "Q8_0", *out)
    refused(tmp_path, "convert", files["step35"], *options, words=words)


def test_an_embedded_vision_tower_stays_behind(files: dict[str, Path], tmp_path: Path) -> None:
    def embed(tensors: dict[str, TensorCopy]) -> None:
        norm = tensors["output_norm.weight"]
        tensors["v.post_ln.weight"] = replace(
            norm, spec=replace(norm.spec, name="v.post_ln.weight")
        )

    path = edited(files["qwen35"], tmp_path / "x.gguf", tensors=embed)
    succeed("extract", path, "-o", tmp_path / "head.gguf")
    with open_model(tmp_path / "head.gguf") as model:
        assert "v.post_ln.weight" not in model.tensors
        assert model.head.report.ready


def test_unknown_architectures(files: dict[str, Path], tmp_path: Path) -> None:
    """A NextN block of an architecture that llama.cpp does not draft with: listed, not touched."""

    def rename(keys: Metadata) -> None:
        for key in [key for key in keys if key.startswith("glm4moe.")]:
            keys[key.replace("glm4moe", "exaone-moe")] = keys.pop(key)
        keys["general.architecture"] = Value(ValueType.STRING, "exaone-moe")

    path = edited(files["glm4moe"], tmp_path / "unknown.gguf", metadata=rename)
    listed = json.loads(succeed("list-tensors", path, "--json"))
    assert {t["part"] for t in listed["tensors"] if t["name"].startswith("blk.2.")} == {"head"}
    assert not listed["head"]["ready"]
    said = "llama.cpp does not draft with block 2, a NextN block of 'exaone-moe'"
    assert said in succeed("list-tensors", path)
    before = held(tmp_path)
    for command in (["strip"], ["extract"], ["graft", "--from", files["glm4moe"]]):
        refused(
            tmp_path, *command, path, "-o", tmp_path / "x.gguf", words=("exaone-moe", "block 2")
        )
    result = invoke("doctor", path)
    assert result.exit_code == 1
    assert said in result.output
    assert held(tmp_path) == before


def test_up_does_not_tune(files: dict[str, Path]) -> None:
    """`tune` measures our runtime, which does not draft with it."""
    result = invoke("up", files["mimo2"], "--dry-run", "--skip", "serve")
    assert result.exit_code == 0, result.output + result.stderr
    assert "tune: nothing to do, llama-server drafts with this architecture" in result.stdout


def test_doctor_names_no_conversion_that_convert_refuses(files: dict[str, Path]) -> None:
    """An architecture that `convert` does not know has no command for its mmproj file."""
    model = files["glm4moe"]
    result = invoke("doctor", model, "--mmproj", model)
    assert "expected an mmproj file, found architecture 'glm4moe'" in result.stdout
    assert "mtp-gguf convert" not in result.stdout
