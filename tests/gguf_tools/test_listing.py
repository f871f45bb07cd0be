"""`mtp-gguf list-tensors` on real conversions and on invalid files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.files.format import TensorSpec, Value, ValueType, lay_out, open_gguf
from mtp_gguf.gguf_tools.files.safetensors import open_safetensors
from mtp_gguf.gguf_tools.files.tensor_types import F32
from mtp_gguf.gguf_tools.model import ListedTensor, list_tensors, shard_path, shard_paths
from support.checkpoints import SMALL, SPECS
from support.commands import check_refusal, invoke, run_python
from support.golden_gguf import CASES, assembled, u64
from support.models import Models

DRAFT = 64


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    """A conversion with an F16 head and a draft vocabulary by ids."""
    return models.convert(SMALL, "--mtp-f16", "--fastmtp", str(DRAFT))


@pytest.fixture(scope="module")
def shards(models: Models) -> list[Path]:
    """The same in shards."""
    options = ("--mtp-f16", "--fastmtp", str(DRAFT), "--split-max-size", "300K")
    found = sorted(models.convert(SMALL, *options).parent.iterdir())
    assert len(found) > 2
    return found


def listed(*arguments: object) -> str:
    result = invoke("list-tensors", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: object) -> Any:
    return json.loads(listed(*arguments, "--json"), parse_constant=pytest.fail)


def shown_names(*arguments: object) -> list[str]:
    """The names in the table: the lines with an offset."""
    lines = listed(*arguments).splitlines()
    return [line.split()[0] for line in lines if re.search(r"  @ +\d+$", line)]


def refused(*arguments: object, code: int = 1) -> str:
    result = invoke("list-tensors", *arguments)
    assert result.stdout == ""
    return check_refusal(result.exit_code, result.stderr, code=code)


def names_of(model: Path) -> list[str]:
    with open_gguf(model) as file:
        return [t.name for t in file.tensors]


# ----------------------------------------------------------------------------- the table


def test_lists_every_tensor_as_the_gguf_package_does(model: Path) -> None:
    theirs = [
        (t.name, t.tensor_type.name, [int(n) for n in t.shape], int(t.n_bytes), int(t.data_offset))
        for t in GGUFReader(model).tensors
    ]
    ours = as_json(model)["tensors"]
    assert [(t["name"], t["type"], t["shape"], t["nbytes"], t["offset"]) for t in ours] == theirs
    assert shown_names(model) == [name for name, *_ in theirs]


def test_a_line_and_the_closing_lines(model: Path) -> None:
    lines = listed(model).splitlines()
    with open_gguf(model) as file:
        tensor = file.by_name["blk.2.nextn.eh_proj.weight"]
    (line,) = [line for line in lines if line.startswith(tensor.name)]
    assert " ".join(line.split()) == f"{tensor.name} F16 [512, 256] 262 kB @ {tensor.offset}"
    base, head, summary = lines[-3:]
    assert re.fullmatch(r"base: \d+ tensors, \d+ kB \(\d+ Q4_K, .*\)", base)
    assert re.fullmatch(r"head: 15 tensors, \d\.\d+ MB \(8 F16, 7 F32\)", head)
    head = "can draft: MTP head in block 2 (8 F16)"
    assert summary == f"{head}, FastMTP 64 tokens, layout ids, the last 16 follow the text"


def test_mtp_shows_the_head_alone(model: Path) -> None:
    assert shown_names(model, "--mtp") == [n for n in names_of(model) if n.startswith("blk.2.")]
    assert shown_names(model, "--mtp", "--filter", "attn_q_norm") == ["blk.2.attn_q_norm.weight"]


@pytest.mark.parametrize("pattern", [r"attn_(q|k)\.weight$", "^output", "(?i)EH_PROJ", ""])
def test_filter_searches_names(model: Path, pattern: str) -> None:
    expected = [name for name in names_of(model) if re.search(pattern, name)]
    assert shown_names(model, "--filter", pattern) == expected
    assert [t["name"] for t in as_json(model, "--filter", pattern)["tensors"]] == expected


@pytest.mark.parametrize("pattern", ["EH_PROJ", "no such name"])
def test_filter_that_matches_nothing(model: Path, pattern: str) -> None:
    assert repr(pattern) in refused(model, "--filter", pattern)


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "(?P<", "a{99999999999999999999}"])
def test_filter_that_is_no_pattern(model: Path, pattern: str) -> None:
    message = refused(model, "--filter", pattern, code=2)
    assert "is not a regular expression" in message


def test_sorts(model: Path) -> None:
    tensors = as_json(model)["tensors"]

    def ordered(sort: str) -> list[dict[str, Any]]:
        found = as_json(model, "--sort", sort)["tensors"]
        assert sorted(found, key=repr) == sorted(tensors, key=repr)
        return list(found)

    assert ordered("file") == tensors
    assert [t["offset"] for t in tensors] == sorted(t["offset"] for t in tensors)
    names = [t["name"] for t in ordered("name")]
    assert names == sorted(names)
    sizes = [t["nbytes"] for t in ordered("size")]
    assert sizes == sorted(sizes, reverse=True)
    types = [t["type"] for t in ordered("type")]
    assert types == sorted(types)
    assert refused(model, "--sort", "colour", code=2)


# ---------------------------------------------------------------------------------- JSON


def test_json_of_a_gguf(model: Path) -> None:
    report = as_json(model)
    assert list(report) == ["tensors", "head", "acceptance"]
    with open_gguf(model) as file:
        first = file.tensors[0]
    assert report["tensors"][0] == {
        "name": first.name,
        "shape": list(first.shape),
        "type": first.type.name,
        "nbytes": first.nbytes,
        "offset": first.offset,
        "part": "base",
        "file": "model.gguf",
    }
    assert {t["part"] for t in report["tensors"]} == {"base", "head"}
    draft = report["head"].pop("draft")
    assert report["head"] == {
        "ready": True,
        "reason": "MTP head in block 2",
        "block": 2,
        "types": {"F16": 8},
        "stock": True,
        "ours": True,
        "shared": False,
        "in_use": {"size": DRAFT, "ring": DRAFT // 4, "layout": "ids"},
    }
    assert list(draft) == ["layout", "size", "source", "coverage"]
    assert (draft["layout"], draft["size"]) == ("ids", DRAFT)


def test_json_without_a_head(models: Models) -> None:
    model = models.convert(SMALL, "--no-mtp")
    assert as_json(model)["head"] == {
        "ready": False,
        "reason": "the file has no MTP head; mtp-gguf graft adds one",
        "block": None,
        "types": {},
        "draft": None,
        "stock": False,
        "ours": False,
        "shared": False,
        "in_use": None,
    }
    assert as_json(model, "--mtp")["tensors"] == []


# -------------------------------------------------------------------- summaries of layouts


def summary_line(*arguments: object) -> str:
    return listed(*arguments).splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "start", "end"),
    [
        (["--mtp-f16"], "can draft: MTP head in block 2 (8 F16)", "full vocabulary"),
        (
            ["--mtp-f16", "--fastmtp", str(DRAFT)],
            "can draft: MTP head in block 2 (8 F16)",
            "FastMTP 64 tokens, layout ids, the last 16 follow the text",
        ),
        (
            ["--mtp-f16", "--fastmtp", str(DRAFT), "--fastmtp-layout", "table"],
            "can draft: MTP head in block 2 (8 F16)",
            "FastMTP 64 tokens, layout table; stock llama.cpp cannot load this layout",
        ),
        (
            ["--mtp-f16", "--fastmtp", str(DRAFT), "--fastmtp-layout", "sidecar"],
            "can draft: a head alone, MTP head in block 2 (8 F16)",
            "FastMTP 64 tokens, layout sidecar; stock llama.cpp cannot load this layout",
        ),
        (
            ["--head-only"],
            "can draft: a head alone, MTP head in block 2 (8 Q8_0)",
            "full vocabulary",
        ),
        (["--no-mtp"], "cannot draft: the file has no MTP head", "mtp-gguf graft adds one"),
    ],
    ids=["head", "ids", "table", "sidecar", "head only", "no head"],
)
def test_conclusion_on_real_conversions(
    models: Models, options: list[str], start: str, end: str
) -> None:
    said = summary_line(models.convert(SMALL, *options))
    assert said.startswith(start)
    assert said.endswith(end)


@pytest.mark.parametrize("layout", ["table", "sidecar"])
def test_the_draft_vocabulary_is_a_part_of_its_own(models: Models, layout: str) -> None:
    model = models.convert(SMALL, "--fastmtp", str(DRAFT), "--fastmtp-layout", layout)
    parts = {t["name"]: t["part"] for t in as_json(model)["tensors"]}
    rows = {"table": "blk.2.nextn.shared_head_head.weight", "sidecar": "output.weight"}[layout]
    assert {n for n, part in parts.items() if part == "draft vocabulary"} == {"d2t", rows}
    assert {"d2t", rows} <= set(shown_names(model, "--mtp"))


# -------------------------------------------------------------------------------- shards


def without_place(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in t.items() if k not in ("offset", "file")} for t in tensors]


@pytest.mark.parametrize("index", [0, 1, -1])
def test_any_shard_stands_for_the_model(model: Path, shards: list[Path], index: int) -> None:
    whole, split = as_json(model), as_json(shards[index])
    assert without_place(split["tensors"]) == without_place(whole["tensors"])
    assert split["head"] == whole["head"]
    assert {t["file"] for t in split["tensors"]} == {p.name for p in shards}


def linked(shards: list[Path], folder: Path) -> list[Path]:
    """The shards under the same names in a folder of their own."""
    for shard in shards:
        os.link(shard, folder / shard.name)
    return [folder / shard.name for shard in shards]


def test_a_missing_shard_is_named(shards: list[Path], tmp_path: Path) -> None:
    copies = linked(shards, tmp_path)
    copies[1].unlink()
    assert refused(copies[0]) == (
        f"mtp-gguf: {copies[0]}: expected {len(shards)} shards, {copies[1].name} is missing "
    )


def test_a_shard_of_another_place_is_refused(shards: list[Path], tmp_path: Path) -> None:
    copies = linked(shards, tmp_path)
    copies[2].unlink()
    os.link(shards[1], copies[2])
    assert refused(copies[0]) == (
        f"mtp-gguf: {copies[2]}: split.no: expected 2 by the file's name, found 1 "
    )


def test_a_shard_under_another_name_is_refused(shards: list[Path], tmp_path: Path) -> None:
    os.link(shards[0], tmp_path / "model.gguf")
    assert refused(tmp_path / "model.gguf").endswith(
        f"split.count: expected 1 by the file's name, found {len(shards)} "
    )


def write_gguf(path: Path, metadata: dict[str, Value], names: list[str]) -> Path:
    layout = lay_out(metadata, [TensorSpec(name, (2,), F32) for name in names])
    path.write_bytes(layout.header + bytes(layout.size - len(layout.header)))
    return path


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for index in range(2):
        split = {"split.no": index, "split.count": 2}
        metadata = {key: Value(ValueType.U16, number) for key, number in split.items()}
        write_gguf(shard_path(tmp_path / "m.gguf", index, 2), metadata, ["same", f"own.{index}"])
    first, second = sorted(tmp_path.iterdir())
    assert refused(first) == f"mtp-gguf: {second}: tensor 'same' is also in {first} "


@pytest.mark.parametrize(("index", "count"), [(1, 0), (3, 2), (0, 2)])
def test_impossible_shard_numbers(tmp_path: Path, index: int, count: int) -> None:
    path = tmp_path / f"m-{index:05}-of-{count:05}.gguf"
    with pytest.raises(FormatError) as error:
        shard_paths(path)
    assert str(error.value) == (
        f"{path}: expected a shard of 1 to {count} by its name, found {index}"
    )


@pytest.mark.parametrize(
    "name", ["model.gguf", "m-1-of-2.gguf", "-00001-of-00002.gguf", "m-٠٠٠٠١-of-٠٠٠٠٢.gguf"]
)
def test_other_names_are_no_shards(tmp_path: Path, name: str) -> None:
    assert shard_paths(tmp_path / name) == [tmp_path / name]


# --------------------------------------------------------------------------- safetensors


@pytest.fixture(scope="module")
def sharded_checkpoint(models: Models) -> Path:
    spec = next(s for s in SPECS.values() if s.shards > 1 and s.mtp)
    return models.checkpoint(spec)


def test_lists_a_safetensors_file(models: Models) -> None:
    path = models.checkpoint(SMALL) / "model.safetensors"
    file = open_safetensors(path)
    file.source.close()
    assert list_tensors(path).tensors == tuple(
        ListedTensor(
            t.name,
            t.shape,
            t.dtype,
            t.nbytes,
            t.offset,
            "head" if t.name.startswith("mtp.") else "base",
            "model.safetensors",
        )
        for t in file.tensors.values()
    )
    report = as_json(path)
    assert report["head"] is None
    head = sum(t["part"] == "head" for t in report["tensors"])
    assert summary_line(path) == f"can draft once converted: {head} mtp.* tensors found"
    assert set(shown_names(path, "--mtp")) == {n for n in file.tensors if n.startswith("mtp.")}


def test_lists_a_checkpoint_folder(sharded_checkpoint: Path) -> None:
    files = sorted(sharded_checkpoint.glob("*.safetensors"))
    assert len(files) > 1
    expected = [t for path in files for t in list_tensors(path).tensors]
    assert list(list_tensors(sharded_checkpoint).tensors) == expected
    assert {t.file for t in expected} == {p.name for p in files}


def test_says_that_a_checkpoint_has_no_head(models: Models) -> None:
    spec = next(s for s in SPECS.values() if not s.mtp)
    assert summary_line(models.checkpoint(spec)) == "cannot draft: no mtp.* tensors found"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("mtp.fc.weight", "head"),
        ("model.mtp.fc.weight", "head"),
        ("model.language_model.mtp.fc.weight", "head"),
        ("model.layers.0.mtp.weight", "base"),
        ("smtp.weight", "base"),
    ],
)
def test_names_of_heads_in_checkpoints(tmp_path: Path, name: str, part: str) -> None:
    header = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    assert [t.part for t in list_tensors(path).tensors] == [part]


def test_a_missing_safetensors_shard_is_named(sharded_checkpoint: Path, tmp_path: Path) -> None:
    """With the index, and without it by the numbers in the names."""
    files = sorted(sharded_checkpoint.glob("*.safetensors"))
    linked(files, tmp_path)
    (tmp_path / files[0].name).unlink()
    says = f"mtp-gguf: {tmp_path}: expected {len(files)} files, '{files[0].name}' is missing "
    assert refused(tmp_path) == says
    os.link(
        sharded_checkpoint / "model.safetensors.index.json",
        tmp_path / "model.safetensors.index.json",
    )
    assert refused(tmp_path) == says


def test_files_beside_the_index_are_not_listed(sharded_checkpoint: Path, tmp_path: Path) -> None:
    for path in sharded_checkpoint.iterdir():
        os.link(path, tmp_path / path.name)
    os.link(next(sharded_checkpoint.glob("*.safetensors")), tmp_path / "consolidated.safetensors")
    assert list_tensors(tmp_path) == list_tensors(sharded_checkpoint)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ('{"weight_map":{"a":"../model.safetensors"}}', "'../model.safetensors' is missing"),
        ('{"weight_map":{"a":7}}', "'7' is missing"),
        ('{"weight_map":[]}', "expected a JSON object whose weight_map has file names"),
        ("{}", "expected a JSON object whose weight_map has file names"),
        ("[" * 10_000, "expected a JSON object whose weight_map has file names"),
        ("\xff", "expected a JSON object whose weight_map has file names"),
    ],
    ids=["outside the folder", "number", "list", "no map", "deep", "no JSON"],
)
def test_an_index_that_lies(models: Models, tmp_path: Path, index: str, says: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for place in (tmp_path, folder):
        os.link(models.checkpoint(SMALL) / "model.safetensors", place / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(index, encoding="latin-1")
    assert says in refused(folder)


# --------------------------------------------------------------------- names that deceive

NAMES = {
    "escape sequence": ("a\x1b[31mred", r"a\x1b[31mred"),
    "new line": ("a\nbase: 9 tensors", r"a\nbase: 9 tensors"),
    "carriage return": ("a\rb", r"a\rb"),
    "reversed text": ("a\u202egpj.exe", r"a\u202egpj.exe"),
    "C1 control": ("a\x9b31m", r"a\x9b31m"),
    "line separator": ("a\u2028b", r"a\u2028b"),
    "letters of the world": ("blk.模型é", "blk.模型é"),
}


@pytest.mark.parametrize(("name", "shown"), NAMES.values(), ids=NAMES)
def test_names_do_not_steer_the_terminal(tmp_path: Path, name: str, shown: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, [name])
    out = listed(path)
    assert out.startswith(f"{shown}  F32  [2]")
    assert len(out.splitlines()) == 3  # the tensor, its part, the summary
    assert [t["name"] for t in as_json(path)["tensors"]] == [name]
    assert "\x1b" not in listed(path, "--json")


def test_metadata_does_not_steer_the_terminal(tmp_path: Path) -> None:
    evil = Value(ValueType.STRING, "\x1b[2J\udcff")
    path = write_gguf(tmp_path / "model.gguf", {"general.architecture": evil}, ["t"])
    assert "\x1b" not in listed(path)
    assert summary_line(path).startswith(
        "cannot draft: llama.cpp has no MTP head for architecture '\\x1b[2J\\udcff'"
    )
    as_json(path)


def test_refusals_do_not_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(
        assembled({"key 2 length": u64(4), "key 2": b"\x1b[2J", "type 2": b"\xff" * 4})
    )
    assert "\\x1b[2J" in refused(path)


# -------------------------------------------------------------------- what is not a model


@pytest.mark.parametrize("case", CASES[::10], ids=lambda case: case.name)
def test_broken_files_end_in_one_sentence(tmp_path: Path, case: Any) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(case.data)
    assert refused(path) == re.sub(r"\s+", " ", f"mtp-gguf: {path}: {case.sentence}\n")


def test_a_broken_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + b"{}")
    assert "header length: expected 2 to 2 bytes, found 18446744073709551615" in refused(path)
    assert "header length" in refused(tmp_path)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    assert refused(missing).startswith(
        f"mtp-gguf: {missing}: expected a file or folder, found none"
    )
    none = "expected model.safetensors or model.safetensors.index.json with its shards, found none "
    assert refused(tmp_path) == f"mtp-gguf: {tmp_path}: {none}"
    (tmp_path / "a.gguf").touch()
    assert refused(tmp_path).endswith(f"found none; name a GGUF in it: {tmp_path}/a.gguf ")
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    assert refused(pipe) == f"mtp-gguf: {pipe}: expected a file, found a device or pipe "
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    assert refused(folder).endswith(none)
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    assert "loop.gguf: " in refused(loop)


# --------------------------------------------------------------------------------- speed


def test_listing_does_not_import_what_it_does_not_need(model: Path) -> None:
    """Importing NumPy would take longer than the listing itself."""
    run_python(
        "import sys\n"
        "from mtp_gguf.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "heavy = 'numpy gguf tokenizers huggingface_hub llama_cpp safetensors ml_dtypes'\n"
        "assert not {*heavy.split()} & {*sys.modules}",
        *("list-tensors", model),
    )
