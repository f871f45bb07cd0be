"""The report on whether a GGUF can draft, for every fault that a head can have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from mtp_gguf.gguf_tools.files.format import GgufFile, TensorSpec, Value, ValueType, lay_out
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME, F16, F32, I64, TensorType
from mtp_gguf.gguf_tools.heads.fastmtp import DraftLayout, StoredDraftVocabulary
from mtp_gguf.gguf_tools.heads.head import HeadReport, MtpHead, part_of
from mtp_gguf.gguf_tools.heads.nextn import BLOCKS, OUR_ARCHITECTURES
from support.byte_source import ByteSource

HEAD = 3  # block of the head: the trunk has blocks 0 to 2
PREFIX = f"blk.{HEAD}."
Shape = tuple[int, ...]
Tensors = Mapping[str, tuple[Shape, TensorType]]

WIDTH, WORDS, DRAFT = 4, 16, 8
IDS = "mtp_gguf.fastmtp.token_ids"
D2T: Tensors = {"d2t": ((DRAFT,), I64)}
SHORT_HEAD: Tensors = {f"{PREFIX}nextn.shared_head_head.weight": ((WIDTH, DRAFT), F16)}
SHORT_OUTPUT: Tensors = {"output.weight": ((WIDTH, DRAFT), F16)}


def u32(number: int) -> Value:
    return Value(ValueType.U32, number)


def text(value: str) -> Value:
    return Value(ValueType.STRING, value)


def sound_metadata(architecture: str) -> dict[str, Value]:
    return {
        "general.architecture": text(architecture),
        f"{architecture}.block_count": u32(HEAD + 1),
        f"{architecture}.nextn_predict_layers": u32(1),
    }


def smallest_block(architecture: str) -> list[str]:
    """The required suffixes, and the first alternative of each choice."""
    row = BLOCKS[architecture]
    return [*row.required, *(suffix for group in row.choices for suffix in group[0])]


def sound_tensors(architecture: str) -> dict[str, tuple[Shape, TensorType]]:
    """A model of tiny tensors: the trunk's norms, embeddings, and the whole head."""
    tensors: dict[str, tuple[Shape, TensorType]] = {
        "token_embd.weight": ((WIDTH, WORDS), F32),
        "output_norm.weight": ((WIDTH,), F32),
    }
    tensors |= {f"blk.{i}.attn_norm.weight": ((WIDTH,), F32) for i in range(HEAD)}
    for suffix in smallest_block(architecture):
        one_row = "norm" in suffix
        tensors[PREFIX + suffix] = ((WIDTH,), F32) if one_row else ((WIDTH, 2), F16)
    return tensors


@dataclass(frozen=True)
class Model:
    """Changes to a valid model: keys and tensors to set, or to remove if None."""

    keys: Mapping[str, Value | None] = field(default_factory=dict)
    tensors: Mapping[str, tuple[Shape, TensorType] | None] = field(default_factory=dict)
    architecture: str = "qwen35"

    def report(self) -> HeadReport:
        metadata = {**sound_metadata(self.architecture), **self.keys}
        tensors = {**sound_tensors(self.architecture), **self.tensors}
        specs = [TensorSpec(n, *t) for n, t in tensors.items() if t is not None]
        layout = lay_out({k: v for k, v in metadata.items() if v is not None}, specs)
        data = layout.header + bytes(layout.size - len(layout.header))
        file = GgufFile(ByteSource(data))
        return MtpHead("bytes", file, file.by_name).report


def moved(target: int) -> dict[str, Any]:
    """The head's tensors in another block."""
    old = sound_tensors("qwen35")
    suffixes = BLOCKS["qwen35"].required
    return {**without(*suffixes), **{f"blk.{target}.{s}": old[PREFIX + s] for s in suffixes}}


def without(*suffixes: str) -> dict[str, None]:
    return {PREFIX + s: None for s in suffixes}


NO_HEAD = without(*BLOCKS["qwen35"].required)
NEXTN, COUNT = "qwen35.nextn_predict_layers", "qwen35.block_count"

NOT_READY: list[tuple[Model, str]] = [
    (
        Model({NEXTN: None, COUNT: u32(HEAD)}, NO_HEAD),
        "the file has no MTP head; mtp-gguf graft adds one",
    ),
    (
        Model({NEXTN: u32(0), COUNT: u32(HEAD)}, NO_HEAD),
        "the file has no MTP head; mtp-gguf graft adds one",
    ),
    (Model(tensors=NO_HEAD), "the metadata claims 1 MTP layer, but no tensor of it is there"),
    (
        Model({COUNT: u32(HEAD)}, NO_HEAD),
        f"bytes: expected 2 trunk layers by {COUNT} (3, of these 1 MTP layers), found block 2 "
        "without nextn tensors",
    ),
    (
        Model({NEXTN: None}),
        f"the MTP head is there (block 3), but {NEXTN} is missing or 0, so llama.cpp will not use "
        "it",
    ),
    (Model({COUNT: u32(HEAD)}), f"{COUNT} is 3, expected 4: 3 trunk layers and 1 MTP layer"),
    (Model({COUNT: u32(HEAD + 2)}), f"{COUNT} is 5, expected 4: 3 trunk layers and 1 MTP layer"),
    (
        Model(tensors=moved(13)),
        "bytes: expected blocks 0 to 12 before the MTP head, found 3 of them",
    ),
    (
        Model(
            tensors={
                **{PREFIX + s: None for s in BLOCKS["qwen35moe"].required if "ffn" in s},
                f"{PREFIX}ffn_up.weight": ((WIDTH, 2), F16),
            },
            architecture="qwen35moe",
        ),
        "the MTP head in block 3 is incomplete: ffn_gate_inp.weight, ffn_gate_exps.weight, "
        "ffn_up_exps.weight and 5 more are missing",
    ),
    (
        Model(tensors={"token_embd.weight": None}),
        "token_embd.weight is missing, which the head needs",
    ),
    (
        Model(tensors={"output_norm.weight": None}),
        "output_norm.weight is missing, which the head needs",
    ),
    (Model({NEXTN: u32(2)}), f"expected 1 MTP layer, found 2 by {NEXTN} and 1 by the tensors"),
    (
        Model({NEXTN: Value(ValueType.I32, -1)}),
        f"expected 1 MTP layer, found -1 by {NEXTN} and 1 by the tensors",
    ),
    (Model({COUNT: None}), f"{COUNT} is missing, expected 4: 3 trunk layers and 1 MTP layer"),
    (Model({COUNT: u32(1)}), f"{COUNT} is 1, expected 4: 3 trunk layers and 1 MTP layer"),
    (
        Model({"general.architecture": text("llama")}),
        "llama.cpp does not draft with block 3, a NextN block of 'llama' (mtp-gguf train-head can "
        "train one)",
    ),
    (
        Model({"general.architecture": None}),
        "general.architecture: expected the name of an architecture, found none",
    ),
    (
        Model({"general.architecture": Value(ValueType.STRING, ["qwen35"])}),
        "general.architecture: expected the name of an architecture, found an array",
    ),
    (Model({COUNT: text("4")}), f"bytes: {COUNT}: expected a whole number, found type STRING"),
    (Model({IDS: Value(ValueType.I32, [1, 2])}), f"bytes: {IDS}: expected a filled array of U32"),
    (Model({IDS: Value(ValueType.U32, [])}), f"bytes: {IDS}: expected a filled array of U32"),
    (Model({IDS: u32(1)}), f"bytes: {IDS}: expected a filled array of U32"),
    (
        Model(tensors={"d2t": ((DRAFT,), BY_NAME["I32"]), **SHORT_HEAD}),
        "bytes: d2t: expected one dimension of I64, found [8] I32",
    ),
    (
        Model(tensors={"d2t": ((DRAFT, 2), I64), **SHORT_HEAD}),
        "bytes: d2t: expected one dimension of I64, found [8, 2] I64",
    ),
    (
        Model(tensors=D2T),
        "bytes: output.weight: expected 8 rows, as d2t has ids, found no such tensor",
    ),
    (
        Model(tensors={"d2t": ((DRAFT - 1,), I64), **SHORT_HEAD}),
        f"bytes: {PREFIX}nextn.shared_head_head.weight: expected 7 rows, as d2t has ids, "
        "found shape [4, 8]",
    ),
    (
        Model(tensors={**D2T, "output.weight": ((WIDTH, WORDS), F16)}),
        "bytes: output.weight: expected 8 rows, as d2t has ids, found shape [4, 16]",
    ),
]


@pytest.mark.parametrize(("model", "reason"), NOT_READY, ids=[reason for _, reason in NOT_READY])
def test_says_what_is_missing(model: Model, reason: str) -> None:
    report = model.report()
    assert report.reason == reason
    assert (report.ready, report.stock, report.draft) == (False, False, None)


@pytest.mark.parametrize("suffix", BLOCKS["qwen35moe"].required)
def test_every_required_tensor_is_missed(suffix: str) -> None:
    report = Model(tensors=without(suffix), architecture="qwen35moe").report()
    half = ", its experts are half present" if "_exps." in suffix else ""
    text = f"the MTP head in block {HEAD} is incomplete{half}: {suffix} is missing"
    assert report.reason == text


@pytest.mark.parametrize("architecture", OUR_ARCHITECTURES)
def test_a_whole_head_is_ready(architecture: str) -> None:
    matrices = sum("norm" not in suffix for suffix in smallest_block(architecture))
    assert Model(architecture=architecture).report() == HeadReport(
        ready=True,
        reason="MTP head in block 3",
        block=HEAD,
        types={"F16": matrices},
        draft=None,
        stock=True,
        ours=True,
    )


def test_a_head_alone_is_named_so() -> None:
    trunk = {f"blk.{i}.attn_norm.weight": None for i in range(HEAD)}
    report = Model(tensors=trunk).report()
    assert (report.ready, report.reason) == (True, "a head alone, MTP head in block 3")


@pytest.mark.parametrize(
    ("fused", "parts"),
    [
        ("attn_qkv.weight", ["attn_q.weight", "attn_k.weight", "attn_v.weight"]),
        ("ffn_gate_up_exps.weight", ["ffn_gate_exps.weight", "ffn_up_exps.weight"]),
    ],
)
def test_fused_tensors_stand_for_their_parts(fused: str, parts: list[str]) -> None:
    """llama.cpp takes either; a converter may fuse."""
    tensors = {**without(*parts), PREFIX + fused: ((WIDTH, 6), F16)}
    assert Model(tensors=tensors, architecture="qwen35moe").report().ready


DRAFTS: dict[str, tuple[Model, DraftLayout, int]] = {
    "ids": (Model({IDS: Value(ValueType.U32, [5, 1, 3])}), DraftLayout.IDS, 3),
    "table": (Model(tensors={**D2T, **SHORT_HEAD}), DraftLayout.TABLE, DRAFT),
    "sidecar": (Model(tensors={**D2T, **SHORT_OUTPUT}), DraftLayout.SIDECAR, DRAFT),
}


@pytest.mark.parametrize(("model", "layout", "size"), DRAFTS.values(), ids=DRAFTS)
def test_draft_vocabularies(model: Model, layout: DraftLayout, size: int) -> None:
    report = model.report()
    assert report.ready
    assert report.draft == StoredDraftVocabulary(layout, size, None, None)
    assert report.stock == (layout is DraftLayout.IDS)


@pytest.mark.parametrize(
    ("coverage", "found"),
    [
        (Value(ValueType.F32, 0.5), 0.5),
        (Value(ValueType.F64, 1.0), 1.0),
        (Value(ValueType.F32, float("nan")), None),
        (Value(ValueType.F32, float("inf")), None),
        (Value(ValueType.F32, -0.5), None),
        (text("all"), None),
    ],
)
def test_coverage_is_a_share_or_nothing(coverage: Value, found: float | None) -> None:
    about = {"mtp_gguf.fastmtp.source": text("notes"), "mtp_gguf.fastmtp.coverage": coverage}
    draft = Model({IDS: Value(ValueType.U32, [5]), **about}).report().draft
    assert draft == StoredDraftVocabulary(DraftLayout.IDS, 1, "notes", found)


@pytest.mark.parametrize(
    ("name", "layout", "part"),
    [
        ("blk.2.attn_norm.weight", None, "base"),
        ("blk.3.attn_norm.weight", None, "head"),
        ("blk.30.attn_norm.weight", None, "head"),
        ("output.weight", None, "base"),
        ("output.weight", DraftLayout.TABLE, "base"),
        ("output.weight", DraftLayout.SIDECAR, "draft vocabulary"),
        ("d2t", DraftLayout.TABLE, "draft vocabulary"),
        ("blk.3.nextn.shared_head_head.weight", DraftLayout.TABLE, "draft vocabulary"),
        ("xblk.3.attn_norm.weight", None, "base"),
        ("blk.99999999999.attn_norm.weight", None, "base"),
    ],
)
def test_parts(name: str, layout: DraftLayout | None, part: str) -> None:
    assert part_of(name, HEAD, layout) == part


def test_without_a_head_all_is_base() -> None:
    assert part_of("blk.3.attn_norm.weight", None, None) == "base"
