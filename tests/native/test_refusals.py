"""Files that the head must refuse, each with a sentence that names the field."""

from __future__ import annotations

import math
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.format import Value, ValueType, open_gguf
from mtp_gguf.gguf_tools.files.tensor_types import F16, F32, I64
from mtp_gguf.native.errors import HeadMissingError, ModelRefusedError, NativeError
from mtp_gguf.native.head import Head as AnyHead
from support.gguf_files import Rewrite, Tensor
from support.models import Models

Head = partial(AnyHead, n_threads=1)
IDS = "mtp_gguf.fastmtp.token_ids"
HEADS, EPSILON = "attention.head_count", "attention.layer_norm_rms_epsilon"
SECTIONS = "rope.dimension_sections"


def u32(value: int) -> Value:
    return Value(ValueType.U32, value)


def f32(value: float) -> Value:
    return Value(ValueType.F32, value)


def ids(values: list[int], kind: ValueType = ValueType.U32) -> Value:
    return Value(kind, values)


def zeros(*shape: int) -> Tensor:
    return shape, F32, bytes(4 * int(np.prod(shape)))


def d2t(*values: int) -> Tensor:
    return (len(values),), I64, struct.pack(f"<{len(values)}q", *values)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("general.architecture", u32(1), "general.architecture: expected a string, found u32"),
        ("general.architecture", None, "general.architecture: expected this key, found none"),
        ("nextn_predict_layers", u32(2), "nextn_predict_layers: expected 1, found 2"),
        ("block_count", u32(0), "block_count: expected 1 to 16384, found 0"),
        ("block_count", f32(5.0), "block_count: expected an integer, found f32"),
        (
            "embedding_length",
            Value(ValueType.U64, 2**63),
            "embedding_length: expected 1 to 1048576",
        ),
        ("embedding_length", u32(512), r"embd.weight: expected \[512, rows\], found \[256, 1024\]"),
        (HEADS, u32(0), "head_count: expected 1 to 16384, found 0"),
        (HEADS, u32(3), "head_count: expected a multiple of 2 KV heads, found 3"),
        (HEADS, ids([4, 4]), "head_count: expected an integer for block 4, found 2"),
        ("attention.head_count_kv", u32(8), "head_count_kv: expected 1 to 4, found 8"),
        ("attention.value_length", u32(32), "value_length: expected the key length 64, found 32"),
        (EPSILON, f32(math.nan), "layer_norm_rms_epsilon: expected a finite number, found nan"),
        ("rope.dimension_count", u32(15), "dimension_count: expected an even number, found 15"),
        ("rope.dimension_count", u32(65), "dimension_count: expected 2 to 64, found 65"),
        (SECTIONS, ids([-1, 1, 1], ValueType.I32), r"sections\[0\]: expected 0 to 16"),
        (SECTIONS, ids([0, 0, 0]), "sections: expected a sum above 0, found 0"),
        (SECTIONS, ids([1] * 5), "sections: expected 1 to 4 integers"),
        ("rope.scaling.type", Value(ValueType.STRING, "longrope"), "found longrope"),
        (
            "feed_forward_length",
            u32(255),
            r"ffn_gate.weight: expected \[256, 255\], found \[256, 256\] f32",
        ),
        ("split.count", u32(2), r"expected a name that ends in -00001-of-00002\.gguf"),
        (IDS, ids([]), "token_ids: expected 1 to 1024 integers of 32 bits, found 0"),
        (IDS, ids([1, 1024]), r"token_ids\[1\]: expected 0 to 1023, found 1024"),
        (IDS, ids([1, -1], ValueType.I32), r"token_ids\[1\]: expected 0 to 1023, found -1"),
        (IDS, ids([7, 3, 7]), r"token_ids\[2\]: expected absolute ids, each once, found 7 again"),
        (
            IDS,
            Value(ValueType.STRING, ["a"]),
            "token_ids: expected 1 to 1024 integers of 32 bits, found 1 of str",
        ),
        (IDS, u32(7), "token_ids: expected an array, found u32"),
    ],
)
def test_metadata(
    models: Models, rewrite: Rewrite, key: str, value: Value | None, text: str
) -> None:
    """Keys of no other namespace are those of qwen35."""
    name = key if key.startswith(("general.", "split.", "mtp_gguf.")) else f"qwen35.{key}"
    with pytest.raises(ModelRefusedError, match=text):
        Head(rewrite(models.gguf(), keys={name: value}))


def test_another_architecture(models: Models, rewrite: Rewrite) -> None:
    llama = rewrite(models.gguf(), keys={"general.architecture": Value(ValueType.STRING, "llama")})
    with pytest.raises(HeadMissingError, match=r"NextN block of 'llama' .*; expected a model with"):
        Head(llama)


OTHER_ROWS = {"d2t": d2t(5, 6), "blk.4.nextn.shared_head_head.weight": zeros(256, 3)}


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (
            {"blk.4.nextn.eh_proj.weight": zeros(256, 512)},
            r"eh_proj.weight: expected \[512, 256\], found \[256, 512\] F32",
        ),
        (
            {"blk.4.attn_q.weight": None},
            r"attn_q.weight: expected \[256, 512\], found no such tensor",
        ),
        ({"blk.4.attn_k.weight": zeros(256, 64)}, r"attn_k.weight: expected \[256, 128\]"),
        (
            {"blk.4.attn_q_norm.weight": zeros(64, 2)},
            r"attn_q_norm.weight: expected \[64\], found \[64, 2\] F32",
        ),
        (
            {"blk.4.nextn.enorm.weight": ((256,), F16, bytes(512))},
            "enorm.weight: expected F32, found f16",
        ),
        (
            {"blk.4.attn_v.scale": zeros(1)},
            "attn_v.scale: expected only tensors that the draft graph uses",
        ),
        (
            {"token_embd.weight": None},
            "token_embd.weight: expected this tensor here or in the trunk's file",
        ),
        (
            {"token_embd.weight": zeros(128, 1024)},
            r"token_embd.weight: expected \[256, rows\], found \[128, 1024\]",
        ),
        (
            {"output.weight": zeros(256, 1000)},
            r"output.weight: expected \[256, 1024\], found \[256, 1000\]",
        ),
        ({"d2t": ((3,), F32, bytes(12))}, r"d2t: expected one dimension of I64, found \[3\] f32"),
        ({"d2t": d2t(5, 5)}, r"d2t\[1\]: expected absolute ids, each once, found 5"),
        ({"d2t": d2t(5, -5)}, r"d2t\[1\]: expected a token id from 0 to 1023, found -5"),
        ({"d2t": d2t(2**62)}, r"d2t\[0\]: expected a token id from 0 to 1023"),
        ({"d2t": d2t(5, 6)}, "expected the short output that d2t maps"),
        (OTHER_ROWS, r"shared_head_head.weight: expected \[256, 2\], found \[256, 3\]"),
    ],
)
def test_tensors(
    models: Models, rewrite: Rewrite, tensors: dict[str, Tensor | None], text: str
) -> None:
    with pytest.raises(ModelRefusedError, match=f"(?i){text}"):
        Head(rewrite(models.gguf(), tensors=tensors))


def test_a_dense_block_on_a_moe_base(models: Models, rewrite: Rewrite) -> None:
    with pytest.raises(
        ModelRefusedError, match=r"ffn_down_exps.weight: expected .*, found no such tensor"
    ):
        Head(rewrite(models.gguf("moe-fused"), tensors={"blk.2.ffn_down_exps.weight": None}))
    with pytest.raises(ModelRefusedError, match="expert_used_count: expected 1 to 8, found 9"):
        Head(rewrite(models.gguf("moe-fused"), keys={"qwen35moe.expert_used_count": u32(9)}))


def test_a_model_without_a_head_says_how_to_get_one(models: Models, rewrite: Rewrite) -> None:
    with pytest.raises(HeadMissingError, match=r"has no MTP head .* graft"):
        Head(models.gguf("dense-no-mtp"))
    with pytest.raises(
        HeadMissingError,
        match=r"promise an MTP head, but blk\.4\.nextn\.eh_proj\.weight is missing",
    ):
        Head(rewrite(models.gguf(), tensors={"blk.4.nextn.eh_proj.weight": None}))


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "text.gguf").write_text("not a model")
    for name, text in (
        ("absent.gguf", "cannot be opened: No such file"),
        ("empty.gguf", "expected a file with content"),
        ("", "expected a file with content"),
        ("text.gguf", "expected a GGUF file"),
    ):
        with pytest.raises(ModelRefusedError, match=text):
            Head(tmp_path / name)


def test_every_truncation_is_refused(models: Models, tmp_path: Path) -> None:
    """Cut within the header, at its end, within each tensor of the block: never a crash."""
    path = models.gguf()
    data = path.read_bytes()
    with open_gguf(path) as file:
        cuts = {4, 12, 24, 60, 1000, file.data_offset - 1, file.data_offset, len(data) - 1}
        used = [
            t for t in file.tensors if t.name.startswith("blk.4.") or t.name == "token_embd.weight"
        ]
        cuts |= {t.offset + t.nbytes // 2 for t in used} | {t.offset + t.nbytes - 1 for t in used}
    short = tmp_path / "short.gguf"
    last_used = max(t.offset + t.nbytes for t in used)
    for cut in sorted(c for c in cuts if c < last_used):
        short.write_bytes(data[:cut])
        with pytest.raises(
            ModelRefusedError, match=r"found the end of the file|expected a GGUF file"
        ):
            Head(short)


@pytest.mark.thorough
def test_random_damage_to_the_header_never_crashes(models: Models, tmp_path: Path) -> None:
    """A short run of the fuzz target's idea: a byte changed anywhere in the header."""
    path = models.gguf(layout="table")
    data = bytearray(path.read_bytes())
    with open_gguf(path) as file:
        header = file.data_offset
        first = file.tensors[0].name.encode()
    start = bytes(data).index(first) - 100  # tensor entries; the vocabulary before them is long
    rng = np.random.default_rng(1)
    hurt = tmp_path / "hurt.gguf"
    for _ in range(150):
        copy = bytearray(data)
        at = int(rng.integers(start, header)) if rng.random() < 0.7 else int(rng.integers(0, 2000))
        copy[at] = int(rng.integers(0, 256))
        hurt.write_bytes(copy)
        try:
            with Head(hurt) as head:
                head.draft([1], np.zeros((1, head.n_embd)), 0, 2)
        except NativeError:
            pass
