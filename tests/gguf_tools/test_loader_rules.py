"""The doctor does not say "can draft" of what llama.cpp cannot load, and knows it by headers alone.

Each file is broken as files are found broken; stock llama.cpp is asked whether it loads and drafts.

    pytest -m slow tests/gguf_tools/test_loader_rules.py

breaks every key and every tensor of a dense model and of a mixture in every way there is: about
1,200 files, some minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.doctor import Severity, diagnose
from mtp_gguf.gguf_tools.files.format import TensorSpec, Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import TensorCopy
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.gguf_tools.model import open_model
from support.checkpoints import DENSE, MOE
from support.commands import invoke
from support.gguf_files import TensorEdit, drop, edited, reshape
from support.llama_loads import llama_loads
from support.models import Models

Tensors = dict[str, TensorCopy]
UNIFORM = ("--quant", "Q8_0")


@dataclasses.dataclass(frozen=True)
class Edit:
    """A change of a file's keys and tensors."""

    metadata: Mapping[str, Value | None] = dataclasses.field(default_factory=dict)
    tensors: TensorEdit | None = None


def put(key: str, value: Value | None) -> Edit:
    """Set a key, or remove it."""
    return Edit({key: value})


def add(*names: str, shape: tuple[int, ...] = (4,)) -> Edit:
    """Add tensors of zeros."""

    def change(tensors: Tensors) -> None:
        for name in names:
            spec = TensorSpec(name, shape, BY_NAME["F32"])
            tensors[name] = TensorCopy(spec, data=bytes(spec.nbytes))

    return Edit(tensors=change)


def rename(name: str, new: str) -> Edit:
    """Rename a tensor."""

    def change(tensors: Tensors) -> None:
        tensor = tensors.pop(name)
        tensors[new] = dataclasses.replace(tensor, spec=dataclasses.replace(tensor.spec, name=new))

    return Edit(tensors=change)


def cut(name: str) -> Edit:
    """Remove a row of a tensor, or an element of a vector."""
    return Edit(tensors=reshape(name, lambda shape: (*shape[:-1], shape[-1] - 1)))


def load_results(source: Path, edits: dict[str, Edit], folder: Path) -> dict[str, tuple[bool, str]]:
    """Whether llama.cpp loads each edited file, and the doctor's first fault."""
    paths, said = [], []
    for index, edit in enumerate(edits.values()):
        path = folder / f"{index}.gguf"
        edited(source, path, metadata=edit.metadata, tensors=edit.tensors)
        with open_model(path) as model:
            found = [f.text for f in diagnose(model, None, 512, 2).findings if _is_fault(f)]
            assert model.report.ready or found
        paths.append(path)
        said.append(found[0] if found else "")
    loads = llama_loads(paths)
    for path in paths:
        path.unlink()
    return dict(zip(edits, zip(loads, said, strict=True), strict=True))


def _is_fault(finding: Any) -> bool:
    return finding.severity is Severity.FAULT


# As other tools and older converters write them.
KNOWN: dict[str, tuple[Edit, str]] = {
    "vision tower inside": (
        add("v.blk.0.attn_q.weight", "mm.0.weight"),
        "v.blk.0.attn_q.weight and 1 more are not part of a qwen35 model in llama.cpp; a vision "
        "tower belongs into a file of its own (mmproj)",
    ),
    "rope frequencies": (add("rope_freqs.weight"), "rope_freqs.weight is not part of a qwen35"),
    "ssm_dt without .bias": (
        rename("blk.0.ssm_dt.bias", "blk.0.ssm_dt"),
        "blk.0.ssm_dt.bias: expected this tensor, found none; it has blk.0.ssm_dt",
    ),
    "three rope sections": (
        put("qwen35.rope.dimension_sections", Value(ValueType.I32, [11, 11, 10])),
        "qwen35.rope.dimension_sections: expected 4 entries of U32, I32 or BOOL, found 3 of I32",
    ),
    "KV heads by layer": (
        put("qwen35.attention.head_count_kv", Value(ValueType.U32, [0, 0, 0, 2, 2])),
        "qwen35.attention.head_count_kv: expected the first layer's 0 in every layer that uses it",
    ),
    "KV heads by trunk layer": (
        put("qwen35.attention.head_count_kv", Value(ValueType.U32, [2, 2, 2, 2])),
        "qwen35.attention.head_count_kv: expected 5 entries of U32, I32 or BOOL, found 4 of U32",
    ),
    "an I32 key": (
        put("qwen35.block_count", Value(ValueType.I32, 5)),
        "qwen35.block_count: expected U32, found I32",
    ),
    "a U64 key": (
        put("qwen35.context_length", Value(ValueType.U64, 4096)),
        "qwen35.context_length: expected U32, found U64",
    ),
    "an F64 key": (
        put("qwen35.rope.freq_base", Value(ValueType.F64, 1e7)),
        "qwen35.rope.freq_base: expected F32, found F64",
    ),
    "an I32 token id": (
        put("tokenizer.ggml.eos_token_id", Value(ValueType.I32, 2)),
        "tokenizer.ggml.eos_token_id: expected U32, found I32",
    ),
    "no context length": (
        put("qwen35.context_length", None),
        "qwen35.context_length: expected this key, found none",
    ),
    "a missing trunk tensor": (
        Edit(tensors=drop("blk.1.ffn_up.weight")),
        "blk.1.ffn_up.weight: expected this tensor, found none",
    ),
    "a short trunk tensor": (cut("blk.3.attn_k.weight"), "blk.3.attn_k.weight: expected shape"),
    "513 blocks": (  # the head's own check comes first
        put("qwen35.block_count", Value(ValueType.U32, 513)),
        "qwen35.block_count is 513, expected 5",
    ),
}


def test_files_that_llama_cpp_refuses(models: Models, tmp_path: Path) -> None:
    """llama.cpp rejects each of them, and the doctor names the reason."""
    edits = {name: edit for name, (edit, _) in KNOWN.items()}
    found = load_results(models.convert(DENSE, *UNIFORM), edits, tmp_path)
    for name, (_, words) in KNOWN.items():
        loads, fault = found[name]
        assert not loads, name
        assert fault.startswith(words), f"{name}: {fault}"


def test_files_that_llama_cpp_takes(models: Models, tmp_path: Path) -> None:
    """Unusual but valid files are accepted."""
    edits = {
        "as it is": Edit(),
        "KV heads by block": put(
            "qwen35.attention.head_count_kv", Value(ValueType.U32, [2, 0, 0, 2, 2])
        ),
        "sections of U32": put(
            "qwen35.rope.dimension_sections", Value(ValueType.U32, [3, 3, 2, 0])
        ),
        "scales of the trunk": add("blk.3.attn_q.scale", "blk.0.attn_qkv.scale", shape=(1,)),
        "interval not read": put("qwen35.full_attention_interval", Value(ValueType.I32, 4)),
        "no interval": put("qwen35.full_attention_interval", None),
    }
    found = load_results(models.convert(DENSE, *UNIFORM), edits, tmp_path)
    assert found == dict.fromkeys(edits, (True, ""))


@pytest.mark.parametrize("spec", [DENSE, MOE], ids=lambda spec: spec.name)
def test_a_head_alone_needs_no_trunk(spec: Any, models: Models) -> None:
    with open_model(models.convert(spec, *UNIFORM, "--head-only")) as model:
        findings = diagnose(model, None, 512, 2).findings
    assert [finding.text for finding in findings if _is_fault(finding)] == []


def test_listing_and_doctor_agree(models: Models, tmp_path: Path) -> None:
    edit, words = KNOWN["vision tower inside"]
    path = edited(models.convert(DENSE, *UNIFORM), tmp_path / "v.gguf", tensors=edit.tensors)
    for command in (("list-tensors", path), ("doctor", path)):
        assert words in invoke(*command).stdout
    assert "cannot draft" in invoke("list-tensors", path).stdout


def test_scales_of_a_head_are_refused(models: Models, tmp_path: Path) -> None:
    """NVFP4 heads have them, but the draft graph would ignore them."""
    edit = add("blk.4.attn_q.scale", shape=(1,))
    path = edited(models.convert(DENSE, *UNIFORM), tmp_path / "s.gguf", tensors=edit.tensors)
    words = "blk.4.attn_q.scale: the draft graph does not apply the scales of an NVFP4 head"
    assert words in invoke("doctor", path).stdout


# Where the doctor says no to what llama.cpp happens to run: sizes of the MTP block that differ from
# the trunk's, which our runtime reads, integers in place of weights, and 2^31 rotated dimensions.
STRICTER = ("uneven qwen35", "ints blk", "huge qwen35.rope", "huge qwen35moe.rope")
# Values on which llama.cpp may abort, which the rules of its loader do not cover.
VALUES = ("zero ", "plus ", "huge ", "uneven ", "hybrid ")


def every_edit(source: Path) -> Iterator[tuple[str, Edit]]:
    """Keys removed or of every other type; tensors removed, renamed, truncated or of integers."""
    kinds = (ValueType.U32, ValueType.I32, ValueType.U64, ValueType.F32, ValueType.F64)
    with open_model(source) as model:
        file, blocks = model.first, model.head.trunk_layers + 1
        names = [n for n in model.tensors if n.startswith(("blk.0.", "blk.2.", "blk.3.", "blk.4."))]
        names += [n for n in model.tensors if not n.startswith("blk.")]
        for key in file.keys:
            value = file.value(key)
            if value.is_array and not key.startswith(str(model.architecture)):
                continue
            yield f"drop {key}", put(key, None)
            if value.is_array:
                entries = list(value.data)  # type: ignore[arg-type]
                yield f"shorter {key}", put(key, Value(value.type, entries[:-1]))
                yield f"longer {key}", put(key, Value(value.type, [*entries, 0]))
                for kind in kinds:
                    yield f"{kind.name} {key}", put(key, Value(kind, list(map(int, entries))))
            elif isinstance(value.data, int | float):
                for kind in (*kinds, ValueType.STRING):
                    data = str(value.data) if kind is ValueType.STRING else int(value.data)
                    if kind is not value.type:
                        yield f"{kind.name} {key}", put(key, Value(kind, data))
                if value.type is ValueType.U32:
                    number = int(value.data)
                    hybrid = [0 if i % 4 < 3 and i < blocks - 1 else number for i in range(blocks)]
                    changes: dict[str, int | list[int]] = {
                        "zero": 0,
                        "plus": number + 1,
                        "huge": 1 << 31,
                        "array": [number] * blocks,
                        "short array": [number] * (blocks - 1),
                        "uneven": [number] * (blocks - 1) + [number + 1],
                        "hybrid": hybrid,
                    }
                    for name, changed in changes.items():
                        yield f"{name} {key}", put(key, Value(value.type, changed))
    for name in names:
        yield f"drop {name}", Edit(tensors=lambda tensors, name=name: tensors.pop(name))  # type: ignore[misc]
        yield f"rename {name}", rename(name, name + "x")
        yield f"cut {name}", cut(name)
        yield f"ints {name}", Edit(tensors=partial(_as_integers, name=name))
    for name in ("blk.0.attn_q.weight", "blk.3.attn_q.bias", "blk.9.attn_norm.weight", "d2t"):
        yield f"add {name}", add(name)


def _as_integers(tensors: Tensors, name: str) -> None:
    spec = TensorSpec(name, tensors[name].spec.shape, BY_NAME["I32"])
    tensors[name] = TensorCopy(spec, data=bytes(spec.nbytes))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [DENSE, MOE], ids=lambda spec: spec.name)
def test_every_edit(spec: Any, models: Models, tmp_path: Path) -> None:
    """The doctor and llama.cpp agree about every file."""
    source = models.convert(spec, *UNIFORM)
    found = load_results(source, dict(every_edit(source)), tmp_path)
    differing = {
        name: (loads, fault)
        for name, (loads, fault) in found.items()
        if loads is bool(fault) and not name.startswith(STRICTER if loads else VALUES)
    }
    assert differing == {}
