"""GGUF files with one or a few faults, each described by a `Mutation`.

A `Content` is the unchecked content of a file. A `Mutation` changes it; regression tests name a
file by the repr of its mutations. draw_mutations.py draws random ones.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mtp_gguf.gguf_tools.files.format import ArrayRef, GgufFile, ValueType, open_gguf
from mtp_gguf.gguf_tools.files.tensor_types import BY_ID, BY_NAME

ALIGNMENT = 32
LARGEST_TENSOR = 4 << 20  # bytes; a mutation that asks for more leaves the data short

_FORMATS = {
    ValueType.U8: "B",
    ValueType.I8: "b",
    ValueType.U16: "H",
    ValueType.I16: "h",
    ValueType.U32: "I",
    ValueType.I32: "i",
    ValueType.F32: "f",
    ValueType.BOOL: "B",
    ValueType.U64: "Q",
    ValueType.I64: "q",
    ValueType.F64: "d",
}


@dataclass
class Entry:
    """A key's value: `element` is the type of an array's elements, None for one value."""

    type: ValueType
    data: Any
    element: ValueType | None = None


@dataclass
class Tensor:
    """A tensor: `type` as the id in the file, `data` whatever is there."""

    name: str
    shape: list[int]
    type: int
    data: bytes

    def fit(self) -> None:
        """Make the data as long as shape and type ask for, if that is not much."""
        kind = BY_ID.get(self.type)
        if kind is None or not self.shape:
            return
        blocks = -(-self.shape[0] // kind.block_length) * math.prod(self.shape[1:])
        wanted = blocks * kind.block_bytes
        if 0 <= wanted <= LARGEST_TENSOR:
            source = self.data or b"\0"
            self.data = (source * (wanted // len(source) + 1))[:wanted]


@dataclass
class Content:
    """A GGUF file taken apart."""

    keys: dict[str, Entry] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    patches: list[tuple[int, bytes]] = field(default_factory=list)  # of the encoded header
    length: int | None = None  # where the file is cut off

    @property
    def architecture(self) -> str:
        entry = self.keys.get("general.architecture")
        return str(entry.data) if entry is not None else ""

    def copy(self) -> Content:
        keys = {
            k: Entry(e.type, list(e.data) if isinstance(e.data, list) else e.data, e.element)
            for k, e in self.keys.items()
        }
        tensors = [Tensor(t.name, list(t.shape), t.type, t.data) for t in self.tensors]
        return Content(keys, tensors)

    def encode(self) -> bytes:
        """The file's bytes."""
        header = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.keys))]
        for key, entry in self.keys.items():
            header.append(_text(key) + _encoded(entry))
        body: list[bytes] = []
        offset = 0
        for tensor in self.tensors:
            header.append(_text(tensor.name) + struct.pack("<I", len(tensor.shape)))
            header += [struct.pack("<Q", n % 2**64) for n in tensor.shape]
            header.append(struct.pack("<IQ", tensor.type, offset))
            data = tensor.data + bytes(-len(tensor.data) % ALIGNMENT)
            body.append(data)
            offset += len(data)
        raw = bytearray(b"".join(header))
        for place, patch in self.patches:
            at = place % len(raw)
            raw[at : at + len(patch)] = patch
        raw += bytes(-len(raw) % ALIGNMENT)
        return (bytes(raw) + b"".join(body))[: self.length]


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _scalar(kind: ValueType, value: Any) -> bytes:
    if kind is ValueType.STRING:
        return _text(str(value))
    if kind in (ValueType.F32, ValueType.F64):
        try:
            return struct.pack("<" + _FORMATS[kind], float(value))
        except (ValueError, OverflowError):
            return struct.pack("<" + _FORMATS[kind], math.inf)
    code = _FORMATS[kind]
    try:
        number = int(value)
    except (ValueError, OverflowError):
        number = 0
    width = struct.calcsize(code)
    return (number % 256**width).to_bytes(width, "little")


def _encoded(entry: Entry) -> bytes:
    if entry.element is None:
        return struct.pack("<I", entry.type) + _scalar(entry.type, entry.data)
    head = struct.pack("<IIQ", ValueType.ARRAY, entry.element, len(entry.data))
    return head + b"".join(_scalar(entry.element, value) for value in entry.data)


def read_content(path: Path) -> Content:
    """Take the sound file at `path` apart."""
    with open_gguf(path) as file:
        keys = {key: _entry(file, key) for key in file.keys}
        tensors = [
            Tensor(t.name, list(t.shape), t.type.id, bytes(file.source.read(t.offset, t.nbytes)))
            for t in file.tensors
        ]
    return Content(keys, tensors)


def _entry(file: GgufFile, key: str) -> Entry:
    held = file.keys[key]
    if isinstance(held, ArrayRef):
        return Entry(ValueType.ARRAY, file.array(key), held.type)
    return Entry(file.types[key], held)


class Mutation(Protocol):
    """One change."""

    def apply(self, content: Content) -> None:
        """Change `content`; a mutation of what is not there changes nothing."""


@dataclass(frozen=True)
class SetKey:
    """A key has another value, or is new."""

    key: str
    type: ValueType
    value: Any

    def apply(self, content: Content) -> None:
        content.keys[self.key] = Entry(self.type, self.value)


@dataclass(frozen=True)
class SetArray:
    """A key is an array of these elements."""

    key: str
    element: ValueType
    values: tuple[Any, ...]

    def apply(self, content: Content) -> None:
        content.keys[self.key] = Entry(ValueType.ARRAY, list(self.values), self.element)


@dataclass(frozen=True)
class DropKey:
    """A key is gone."""

    key: str

    def apply(self, content: Content) -> None:
        content.keys.pop(self.key, None)


@dataclass(frozen=True)
class CutArray:
    """An array has another length: cut off, or its last element repeated."""

    key: str
    length: int

    def apply(self, content: Content) -> None:
        entry = content.keys.get(self.key)
        if entry is not None and entry.element is not None and entry.data:
            more = self.length - len(entry.data)
            entry.data = entry.data[: self.length] + entry.data[-1:] * max(more, 0)


@dataclass(frozen=True)
class SetElement:
    """One element of an array has another value."""

    key: str
    index: int
    value: Any

    def apply(self, content: Content) -> None:
        entry = content.keys.get(self.key)
        if entry is not None and entry.element is not None and entry.data:
            entry.data[self.index % len(entry.data)] = self.value


@dataclass(frozen=True)
class RetypeArray:
    """An array has elements of another type."""

    key: str
    element: ValueType

    def apply(self, content: Content) -> None:
        entry = content.keys.get(self.key)
        if entry is not None and entry.element is not None:
            entry.element = self.element


@dataclass(frozen=True)
class Reshape:
    """A tensor has another shape, with data to fit."""

    name: str
    shape: tuple[int, ...]

    def apply(self, content: Content) -> None:
        for tensor in content.tensors:
            if tensor.name == self.name:
                tensor.shape = list(self.shape)
                tensor.fit()


@dataclass(frozen=True)
class Retype:
    """A tensor has another type, with data to fit."""

    name: str
    type: str

    def apply(self, content: Content) -> None:
        for tensor in content.tensors:
            if tensor.name == self.name:
                tensor.type = BY_NAME[self.type].id
                tensor.fit()


@dataclass(frozen=True)
class DropTensor:
    """A tensor is gone."""

    name: str

    def apply(self, content: Content) -> None:
        content.tensors = [t for t in content.tensors if t.name != self.name]


@dataclass(frozen=True)
class AddTensor:
    """There is one tensor more; its data are zeros."""

    name: str
    shape: tuple[int, ...]
    type: str = "F32"

    def apply(self, content: Content) -> None:
        tensor = Tensor(self.name, list(self.shape), BY_NAME[self.type].id, b"")
        tensor.fit()
        content.tensors.append(tensor)


@dataclass(frozen=True)
class Rename:
    """A tensor has another name."""

    name: str
    new: str

    def apply(self, content: Content) -> None:
        for tensor in content.tensors:
            if tensor.name == self.name:
                tensor.name = self.new


@dataclass(frozen=True)
class Fill:
    """The data of a tensor are these bytes, repeated."""

    name: str
    pattern: bytes

    def apply(self, content: Content) -> None:
        for tensor in content.tensors:
            if tensor.name == self.name and tensor.data:
                repeats = len(tensor.data) // len(self.pattern) + 1
                tensor.data = (self.pattern * repeats)[: len(tensor.data)]


@dataclass(frozen=True)
class Architecture:
    """The file is of another architecture, its keys too."""

    name: str

    def apply(self, content: Content) -> None:
        old = content.architecture + "."
        content.keys = {
            (self.name + "." + k.removeprefix(old) if k.startswith(old) else k): e
            for k, e in content.keys.items()
        }
        content.keys["general.architecture"] = Entry(ValueType.STRING, self.name)


@dataclass(frozen=True)
class Patch:
    """Bytes of the encoded header are others."""

    at: int
    data: bytes

    def apply(self, content: Content) -> None:
        content.patches.append((self.at, self.data))


@dataclass(frozen=True)
class Cut:
    """The file ends early."""

    length: int

    def apply(self, content: Content) -> None:
        content.length = self.length


@dataclass(frozen=True)
class FitTensors:
    """All tensors have the shapes that the keys ask for, as far as these can be computed."""

    def apply(self, content: Content) -> None:
        for tensor in content.tensors:
            shape = shape_by_keys(content, tensor.name)
            if shape is not None and tensor.shape != shape:
                tensor.shape = shape
                tensor.fit()


def shape_by_keys(content: Content, name: str) -> list[int] | None:
    """The shape of a tensor of Qwen3.5 by the file's own keys; None where they do not say it."""

    def size(key: str) -> int:
        entry = content.keys.get(f"{content.architecture}.{key}")
        value = entry.data if entry is not None else 0
        if isinstance(value, list):
            value = value[-1] if value else 0
        number = value if isinstance(value, int | float) and math.isfinite(value) else 0
        return max(int(number), 0)

    width = size("embedding_length")
    heads, kv = size("attention.head_count"), size("attention.head_count_kv")
    key, value = size("attention.key_length"), size("attention.value_length")
    state, groups, ranks = (
        size("ssm.state_size"),
        size("ssm.group_count"),
        size("ssm.time_step_rank"),
    )
    inner, experts = state * ranks, size("expert_count")
    conv = 2 * state * groups + inner
    ffn, expert = size("feed_forward_length"), size("expert_feed_forward_length")
    shared = size("expert_shared_feed_forward_length")
    tokens = content.keys.get("tokenizer.ggml.tokens")
    vocabulary = len(tokens.data) if tokens and isinstance(tokens.data, list) else 0
    recurrent = not any(
        t.name.startswith(name.rpartition(".attn_")[0] + ".attn_q.") for t in content.tensors
    )
    suffix = name.split(".", 2)[2] if name.startswith("blk.") else name
    shapes = {
        "token_embd.weight": [width, vocabulary],
        "output.weight": [width, vocabulary],
        "output_norm.weight": [width],
        "attn_norm.weight": [width],
        "post_attention_norm.weight": [width],
        "attn_q.weight": [width, 2 * heads * key],
        "attn_k.weight": [width, kv * key],
        "attn_v.weight": [width, kv * value],
        "attn_output.weight": [heads * key, width],
        "attn_q_norm.weight": [key],
        "attn_k_norm.weight": [key],
        "attn_gate.weight": [width, inner],
        "ssm_conv1d.weight": [size("ssm.conv_kernel"), conv],
        "ssm_dt.bias": [ranks],
        "ssm_a": [ranks],
        "ssm_beta.weight": [width, ranks],
        "ssm_alpha.weight": [width, ranks],
        "ssm_norm.weight": [state],
        "ssm_out.weight": [inner, width],
        "ffn_gate.weight": [width, ffn],
        "ffn_up.weight": [width, ffn],
        "ffn_down.weight": [ffn, width],
        "ffn_gate_inp.weight": [width, experts],
        "ffn_gate_exps.weight": [width, expert, experts],
        "ffn_up_exps.weight": [width, expert, experts],
        "ffn_down_exps.weight": [expert, width, experts],
        "ffn_gate_inp_shexp.weight": [width],
        "ffn_gate_shexp.weight": [width, shared],
        "ffn_up_shexp.weight": [width, shared],
        "ffn_down_shexp.weight": [shared, width],
        "nextn.eh_proj.weight": [2 * width, width],
        "nextn.enorm.weight": [width],
        "nextn.hnorm.weight": [width],
        "nextn.shared_head_norm.weight": [width],
    }
    if suffix == "attn_qkv.weight" and recurrent:
        return [width, conv]
    return shapes.get(suffix)


def mutated(content: Content, mutations: Sequence[Mutation]) -> bytes:
    """The bytes of `content` after `mutations`, in order."""
    copy = content.copy()
    for mutation in mutations:
        mutation.apply(copy)
    return copy.encode()
