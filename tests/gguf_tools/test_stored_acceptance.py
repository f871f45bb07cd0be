"""The measured acceptance that files state: written, read, and recognized as another file's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from mtp_gguf.convert.heads import acceptance as measuring
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.format import Value, ValueType, encoded_keys, open_gguf
from mtp_gguf.gguf_tools.files.rewrite import OutputSpec, TensorCopy, copies, write
from mtp_gguf.gguf_tools.heads.acceptance import (
    LEAST,
    Acceptance,
    Counts,
    Stored,
    read_stored,
    reserved,
    store,
)
from mtp_gguf.gguf_tools.model import ACCEPTANCE_PREFIX, Metadata, header_keys, open_model
from mtp_gguf.native.checks.acceptance import measure_acceptance
from mtp_gguf.native.llama.mtp_llama import MTPLlama
from mtp_gguf.server.model import choose_head
from mtp_gguf.server.model import open_model as open_served
from support.commands import invoke, succeed
from support.gguf_files import loads, value_of
from support.models import DEMO
from support.range_server import Web


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("made") / "demo.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(measuring.VARIABLE, "1")
        patch.setattr(measuring, "_SECONDS", 300.0)  # the same chains on a busy machine, too
        fields = json.loads(succeed("convert", DEMO, "-o", path, "--mtp-f16", "--json"))
    return path, fields


@pytest.fixture(scope="module")
def made(converted: tuple[Path, dict[str, Any]]) -> Path:
    """The converted demo with its acceptance."""
    return converted[0]


@pytest.fixture(scope="module")
def printed(converted: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    """Its acceptance as `convert --json` printed it."""
    [found] = converted[1]["acceptance"].values()
    return dict(found)


def stated(path: Path) -> Stored:
    with open_model(path) as model:
        return read_stored(model)


def keys_of(path: Path) -> Metadata:
    with open_model(path) as model:
        return header_keys(model.first)


WITHOUT: Mapping[str, None] = dict.fromkeys(reserved())  # acceptance


def changed(
    source: Path, target: Path, keys: Mapping[str, Value | None] | None = None, name: str = ""
) -> Path:
    """A copy with all keys, as other programs make it, but these; None removes a key.

    name: of a tensor that differs in it.
    """
    with open_model(source) as model:
        metadata = {**header_keys(model.first), **(keys or {})}
        tensors = list(copies(model))
        for at, tensor in enumerate(tensors):
            if tensor.name == name:
                data = np.frombuffer(model.read(tensor.name), np.uint8) ^ 1
                tensors[at] = TensorCopy(tensor.spec, data=data.tobytes())
        remaining = {key: value for key, value in metadata.items() if value is not None}
        write(target, OutputSpec(remaining, tuple(tensors)))
    return target


def test_convert_stores_what_it_prints(made: Path, printed: dict[str, Any]) -> None:
    assert printed["share"] > LEAST
    assert printed["greedy"]["drafted"] == printed["sampled"]["drafted"] == [140] * 4
    for way in ("greedy", "sampled"):
        counts = printed[way]
        assert value_of(made, f"{ACCEPTANCE_PREFIX}{way}.drafted") == counts["drafted"]
        assert value_of(made, f"{ACCEPTANCE_PREFIX}{way}.accepted") == counts["accepted"]
        assert counts["accepted"] == sorted(counts["accepted"], reverse=True)
    stored = stated(made).acceptance
    assert stored is not None
    assert stored.fields().items() <= printed.items()


def test_fingerprints_stay_the_same(made: Path) -> None:
    """A file that was measured by another version is recognized: 8 bytes of BLAKE2b."""
    found = {"trunk": blake2b(digest_size=8), "head": blake2b(digest_size=8)}
    reader = GGUFReader(made)
    head = f"blk.{int(reader.fields['qwen35.block_count'].contents()) - 1}."
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.name):
        digest = found["head" if tensor.name.startswith(head) else "trunk"]
        data, shape = tensor.data.tobytes(), tuple(map(int, tensor.shape))
        digest.update(f"{tensor.name} {tensor.tensor_type.name} {shape}\n".encode())
        middle = max(len(data) - 64, 0) // 2
        digest.update(data[middle : middle + 64])
    for part, digest in found.items():
        assert value_of(made, f"{ACCEPTANCE_PREFIX}{part}") == digest.hexdigest()


def test_commands_show_it(made: Path, printed: dict[str, Any], tmp_path: Path) -> None:
    text = stated(made).text
    assert text is not None
    assert "greedy " in text
    for command in (("list-tensors", made, "--mtp"), ("info", made), ("doctor", made)):
        assert f"acceptance: {text}\n" in succeed(*command)
        shown = json.loads(succeed(*command, "--json"))["acceptance"]
        assert (shown["share"], shown["checked"]) == (printed["share"], True)
    assert open_served(made).acceptance == text
    other = changed(made, tmp_path / "other.gguf", name="blk.0.ffn_down.weight")
    assert "not that of this file: " in succeed("list-tensors", other, "--mtp")
    assert json.loads(succeed("info", other, "--json"))["acceptance"]["fault"]
    bare = changed(made, tmp_path / "bare.gguf", WITHOUT)
    assert "acceptance" not in succeed("info", bare)
    assert json.loads(succeed("doctor", bare, "--json"))["acceptance"] is None


@pytest.mark.thorough
def test_measured_anew_it_is_the_same(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_SECONDS", 300.0)
    fields = json.loads(succeed("doctor", made, "--load", "--json"))
    for way in ("greedy", "sampled"):
        assert fields["measured_acceptance"][way] == fields["acceptance"][way]
    here = measure_acceptance(made, seconds=300).fields()  # MTPLlama, in this process
    assert here["greedy"] == fields["acceptance"]["greedy"]
    assert "measured now: acceptance: greedy " in succeed("doctor", made, "--load")


def test_a_remote_file_is_not_compared(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError("bytes of tensors are read")

    monkeypatch.setattr("mtp_gguf.gguf_tools.heads.acceptance._digest", refuse)
    monkeypatch.setenv("NO_PROXY", "*")
    with Web(made.parent) as web:
        found = succeed("list-tensors", web.url(made.name), "--mtp")
    assert "as the file states; not compared with its tensors\n" in found


def test_other_programs_see_the_file_as_before(made: Path, tmp_path: Path) -> None:
    succeed("convert", DEMO, "-o", tmp_path / "plain.gguf", "--mtp-f16", "--no-check")
    assert loads(made)
    assert {*keys_of(made)} - {*keys_of(tmp_path / "plain.gguf")} == {*reserved()}
    plain = changed(made, tmp_path / "without.gguf", WITHOUT)
    assert plain.read_bytes() == (tmp_path / "plain.gguf").read_bytes()


def test_rewriting_a_file_drops_what_was_measured_with_it(made: Path, tmp_path: Path) -> None:
    succeed("fastmtp", "add", made, "-o", tmp_path / "listed.gguf", "--size", 512)
    assert not any(key.startswith(ACCEPTANCE_PREFIX) for key in keys_of(tmp_path / "listed.gguf"))


def test_another_list_in_place_is_said_to_have_another_acceptance(
    made: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(made, tmp_path / "listed.gguf"))
    words = "acceptance: not that of this file: the stated one was measured with another head "
    words += "or draft vocabulary; "
    assert words in succeed("fastmtp", "add", path, "--size", 512, "--in-place")
    assert words in succeed("fastmtp", "add", path, "--size", 512, "--in-place")
    assert words in succeed("fastmtp", "remove", path, "--in-place")


def test_what_was_measured_is_no_difference_between_models(made: Path, tmp_path: Path) -> None:
    bare = changed(made, tmp_path / "bare.gguf", WITHOUT)
    assert succeed("compare", made, bare).endswith("0 keys of the metadata differ\n")


def test_a_graft_is_the_conversion_with_its_acceptance(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(measuring.VARIABLE, "1")
    monkeypatch.setattr(measuring, "_SECONDS", 300.0)
    succeed("strip", made, "-o", tmp_path / "trunk.gguf")
    arguments = ("--from", DEMO, "--mtp-f16", "-o", tmp_path / "made.gguf")
    succeed("graft", tmp_path / "trunk.gguf", *arguments)
    assert (tmp_path / "made.gguf").read_bytes() == made.read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("options", [(), ("--fastmtp", "512", "--fastmtp-layout", "table")])
def test_a_head_alone_states_what_it_has_with_its_trunk(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(measuring.VARIABLE, "1")
    monkeypatch.setattr(measuring, "_SECONDS", 300.0)
    model, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    words = ("--mtp-f16", "--sidecar", "F16", "--json")
    fields = json.loads(succeed("convert", DEMO, "-o", model, *words, *options))["acceptance"]
    head = next(path for path in tmp_path.iterdir() if path != model)
    assert {*fields} == {str(model), str(head)}
    alone = stated(head)
    assert alone.alone
    assert not alone.checked
    assert alone.acceptance is not None
    assert alone.acceptance.share == fields[str(head)]["share"] > LEAST

    shown = succeed("list-tensors", head, "--mtp")
    assert "not compared with a trunk, mtp-gguf doctor TRUNK --head FILE" in shown
    examined = json.loads(succeed("doctor", model, "--head", head, "--load", "--json"))
    assert examined["acceptance"]["checked"]
    assert examined["acceptance"]["share"] == alone.acceptance.share
    assert examined["measured_acceptance"]["share"] == alone.acceptance.share
    serving = choose_head(open_served(model), head)
    assert serving.acceptance is not None
    assert serving.acceptance.endswith("measured on the corpus mtp-gguf 1")

    changed(model, other, name="blk.0.attn_norm.weight")
    examined = json.loads(invoke("doctor", other, "--head", head, "--json").stdout)
    told = "the stated one was measured with another"
    assert examined["acceptance"]["fault"] == f"{told} trunk"
    altered = changed(head, tmp_path / "altered.gguf", name="output_norm.weight")
    assert stated(altered).fault == f"{told} head or draft vocabulary"


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(measuring.VARIABLE, "1")
    monkeypatch.setattr(measuring, "_SECONDS", 0.0)
    succeed("convert", DEMO, "-o", tmp_path / "demo.gguf", "--split-max-size", "2M")
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) > 1
    found = stated(shards[-1])
    assert found.acceptance is not None
    assert found.acceptance.greedy.drafted == (8,) * 4
    with open_gguf(shards[1]) as second:
        assert not any(key.startswith(ACCEPTANCE_PREFIX) for key in second.keys)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("blk.0.ffn_down.weight", "trunk"),
        ("token_embd.weight", "trunk"),
        ("blk.4.attn_q.weight", "head"),
        ("blk.4.nextn.enorm.weight", "head"),
    ],
)
def test_counts_of_other_tensors_are_not_shown(
    name: str, part: str, made: Path, tmp_path: Path
) -> None:
    found = stated(changed(made, tmp_path / "other.gguf", name=name))
    assert found.acceptance is None
    assert found.text is not None
    assert f"measured with another {part}" in found.text


def test_counts_without_the_draft_vocabulary_are_not_shown(made: Path, tmp_path: Path) -> None:
    ids = {"mtp_gguf.fastmtp.token_ids": Value(ValueType.U32, range(100))}
    found = stated(changed(made, tmp_path / "other.gguf", ids))
    assert "another head" in found.fault


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("greedy.accepted", Value(ValueType.U32, (200, 1, 1, 1)), "at most [140, 140, 140, 140]"),
        ("greedy.accepted", Value(ValueType.U32, (1, 1)), "expected 4 counts"),
        ("sampled.drafted", Value(ValueType.F32, (1.0,) * 4), "expected 4 counts"),
        ("greedy.drafted", Value(ValueType.STRING, "140"), "expected 4 counts"),
        ("version", Value(ValueType.STRING, "1"), "expected a whole number"),
        ("trunk", Value(ValueType.U32, (1,) * 4), "expected one value"),
    ],
)
def test_hostile_keys(key: str, value: Value, words: str, made: Path, tmp_path: Path) -> None:
    found = stated(changed(made, tmp_path / "hostile.gguf", {ACCEPTANCE_PREFIX + key: value}))
    assert found.acceptance is None
    assert words in found.fault


def test_another_version_or_corpus_states_nothing(made: Path, tmp_path: Path) -> None:
    for key, value in (
        ("version", Value(ValueType.U32, 2)),
        ("corpus", Value(ValueType.STRING, "another")),
        ("corpus_version", Value(ValueType.U32, 2)),
    ):
        other = changed(made, tmp_path / "other.gguf", {ACCEPTANCE_PREFIX + key: value})
        assert stated(other).text is None


def test_only_reserved_keys_are_replaced(tmp_path: Path) -> None:
    counts = Counts((9, 9, 9, 9), (4, 3, 2, 1))
    plain = tmp_path / "plain.gguf"
    succeed("convert", DEMO, "-o", plain, "--no-check")
    before = plain.read_bytes()
    with pytest.raises(RequestError, match="expected reserved keys"):
        store(plain, Acceptance(counts, counts))
    assert plain.read_bytes() == before
    path = changed(plain, tmp_path / "reserved.gguf", reserved())
    empty = path.read_bytes()
    assert stated(path).text is None
    store(path, Acceptance(counts, counts))
    assert stated(path).acceptance == Acceptance(counts, counts)
    written = {k: v for k, v in keys_of(path).items() if k.startswith(ACCEPTANCE_PREFIX)}
    rest = path.read_bytes().partition(encoded_keys(written))[2]
    assert rest == empty.partition(encoded_keys(reserved()))[2]


def test_what_cannot_be_run_is_said_and_states_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(measuring.VARIABLE, "1")
    monkeypatch.setenv("MTP_GGUF_DISABLE", "1")
    result = invoke("convert", DEMO, "-o", tmp_path / "demo.gguf")
    assert result.exit_code == 0
    assert "acceptance not measured: drafting is switched off" in result.stdout
    assert stated(tmp_path / "demo.gguf").text is None


def test_intervals() -> None:
    counts = Counts((140, 140, 140, 0), (70, 140, 0, 0))
    assert counts.interval(0) == pytest.approx((0.418, 0.582), abs=1e-3)  # Wilson's, by hand
    assert counts.interval(1) == pytest.approx((0.973, 1.0), abs=1e-3)
    assert counts.interval(2) == pytest.approx((0.0, 0.027), abs=1e-3)
    assert counts.interval(3) == (0.0, 1.0)


def first_drafts(path: Path) -> int:
    """How many tokens depth auto drafts to be verified before there is any outcome."""
    with MTPLlama(str(path), depth="auto", lookup=False, profile=False, n_ctx=64) as llm:
        llm.session.set_costs([20, 26, 30, 34], [2, 4, 6])
        llm.session.decode([1, 2, 3])
        drafts = llm.session.begin(4, "auto")
        llm.session.end(0)
        return len(drafts)


def test_depth_auto_begins_with_a_bad_heads_figure(made: Path, tmp_path: Path) -> None:
    def stating(accepted: Value | None) -> Path:
        keys: dict[str, Value | None] = {**WITHOUT}
        if accepted is not None:
            keys["mtp.acceptance.greedy.drafted"] = Value(ValueType.U32, (140,) * 4)
            keys["mtp.acceptance.greedy.accepted"] = accepted
        return changed(made, tmp_path / "stating.gguf", keys)

    usual = first_drafts(stating(None))
    assert usual > 0
    assert first_drafts(stating(Value(ValueType.U32, (1, 0, 0, 0)))) == 0
    assert first_drafts(stating(Value(ValueType.U32, (50, 0, 0, 0)))) == usual
    for hostile in (
        Value(ValueType.U32, (141, 0, 0, 0)),
        Value(ValueType.U32, ()),
        Value(ValueType.STRING, "0"),
        Value(ValueType.F32, (0.0,) * 4),
    ):
        assert first_drafts(stating(hostile)) == usual
