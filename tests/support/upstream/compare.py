"""Compares a GGUF file with a golden; each difference is one sentence."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from mtp_gguf.gguf_tools.heads.head import plain_shape

from .describe import Description, Tensor, describe

# `ssm_a` is -exp(A_log). torch's exp is not correctly rounded: it misses by one unit in the last
# place for about one value in a hundred, and not for the same ones on every CPU.
SSM_A_ULPS = 1

# ggml's block quantizers are compiled for the baseline of the architecture: the same on every
# x86-64, but elsewhere compilers may fuse multiplications and additions, and a block's scale can
# come out one step away. Types that only round hold everywhere.
GOLDEN_MACHINES = ("x86_64", "AMD64")
ROUNDED_TYPES = ("F32", "F16", "BF16")


def _ulps(a: str, b: str) -> int:
    """Largest distance in units in the last place between two hex strings of equal-signed F32."""
    x, y = (np.frombuffer(bytes.fromhex(s), "<i4").astype(np.int64) for s in (a, b))
    return int(np.abs(x - y).max())


def _data_equal(name: str, want: Tensor, have: Tensor) -> bool:
    if want.data == have.data:
        return True
    if name.endswith(".ssm_a"):
        return len(want.data) == len(have.data) and _ulps(want.data, have.data) <= SSM_A_ULPS
    return want.type not in ROUNDED_TYPES and platform.machine() not in GOLDEN_MACHINES


def tensor_differences(
    want: Mapping[str, Tensor], have: Mapping[str, Tensor], *, order: bool = True
) -> Iterator[str]:
    """Yield what differs between two sets of tensors: names, types, shapes, data, order."""
    for name in want.keys() - have.keys():
        yield f"{name}: missing"
    for name in have.keys() - want.keys():
        yield f"{name}: not in upstream's file"
    for name, a in want.items():
        if (b := have.get(name)) is None:
            continue
        if a.type != b.type:
            yield f"{name}: expected {a.type}, found {b.type}"
        if a.shape != b.shape:
            yield f"{name}: expected {list(a.shape)}, found {list(b.shape)}"
        if (a.type, a.shape) == (b.type, b.shape) and not _data_equal(name, a, b):
            yield f"{name}: {a.type} data differ ({a.data} expected, {b.data} found)"
    if order and want.keys() == have.keys() and list(want) != list(have):
        first = next(pair for pair in zip(want, have, strict=True) if pair[0] != pair[1])
        yield f"order: expected {first[0]}, found {first[1]}"


def metadata_differences(
    want: Description, have: Description, allowed: Collection[str] = ()
) -> Iterator[str]:
    """Yield what differs between the metadata of two files, allowed keys left aside."""
    a, b = want.metadata, have.metadata
    for key in sorted((a.keys() | b.keys()) - set(allowed)):
        if key not in b:
            yield f"{key}: missing (expected {a[key]})"
        elif key not in a:
            yield f"{key}: not in upstream's file ({b[key]})"
        elif a[key] != b[key]:
            yield f"{key}: expected {a[key]}, found {b[key]}"


def differences(want: Description, have: Description, allowed: Collection[str] = ()) -> list[str]:
    """What differs between two files: tensors, in any order, and metadata but allowed keys."""
    return [
        *tensor_differences(want.tensors, have.tensors, order=False),
        *metadata_differences(want, have, allowed),
    ]


def file_differences(expected: Path, found: Path) -> list[str]:
    """`differences` between two files."""
    return differences(describe(expected), describe(found))


def without_ones(found: Description) -> Description:
    """The same without last dimensions of 1, which ggml drops."""
    tensors = {n: replace(t, shape=plain_shape(t.shape)) for n, t in found.tensors.items()}
    return replace(found, tensors=tensors)
