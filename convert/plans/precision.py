"""Chooses the type of every target.

The mix of types behind a name such as Q4_K_M depends on layer, role, row length, head counts,
experts and on whether there is an imatrix. To get it from the linked llama.cpp, its quantizer runs
on a miniature of the model: a file with the same metadata, tensor names and row lengths, but at
most two rows (and two experts) per tensor. The types in the output are the mix. docs/decisions.md
explains why it does not use `llama_quant_compute_types`.

The user's patterns are matched only here, with Python's `re`; llama.cpp gets the names that they
matched, because its own engine (C++ std::regex) has a different grammar.
"""

import re
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.format import RawValue, TensorSpec, Value, lay_out, open_gguf
from mtp_gguf.gguf_tools.files.tensor_types import BF16, BY_NAME, F16, F32, TensorType
from mtp_gguf.gguf_tools.imatrix import Imatrix
from mtp_gguf.quantize.upstream import QuantizeError, quantize_file, quantize_file_in_subprocess

from .recipe import Target

# Names of `llama-quantize` and their llama_ftype (enum in llama.h).
FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "BF16": 32,
    "Q8_0": 7,
    "Q6_K": 18,
    "Q5_K_M": 17,
    "Q5_K_S": 16,
    "Q5_1": 9,
    "Q5_0": 8,
    "Q4_K_M": 15,
    "Q4_K_S": 14,
    "Q4_1": 3,
    "Q4_0": 2,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "MXFP4_MOE": 38,
    "Q3_K_L": 13,
    "Q3_K_M": 12,
    "Q3_K_S": 11,
    "IQ3_M": 27,
    "IQ3_S": 26,
    "IQ3_XS": 22,
    "IQ3_XXS": 23,
    "Q2_K": 10,
    "Q2_K_S": 21,
    "IQ2_M": 29,
    "IQ2_S": 28,
    "IQ2_XS": 20,
    "IQ2_XXS": 19,
    "IQ1_M": 31,
    "IQ1_S": 24,
    "TQ1_0": 36,
    "TQ2_0": 37,
}
# MOSTLY_NVFP4 of enum llama_ftype, used only if the checkpoint has NVFP4 blocks.
NVFP4_FILE_TYPE = 39
# Mixes of types with blocks of 32 values; the other quantized mixes have blocks of 256.
_SMALL_BLOCKS = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "MXFP4_MOE")
UNQUANTIZED = {"F32": F32, "F16": F16, "BF16": BF16}
# Types that can be chosen for a tensor: all that ggml can quantize to and llama.cpp can run.
_NOT_WRITTEN = ("Q8_1", "Q8_K", "NVFP4", "Q1_0", "Q2_0", "I8", "I16", "I32", "I64", "F64")
TENSOR_TYPES = tuple(name for name in BY_NAME if name not in _NOT_WRITTEN)
# Characters with a special meaning in an ECMAScript regular expression.
_LITERAL, _ESCAPED = re.compile(r"[][\\^$.|?*+(){}/]"), r"\\\g<0>"


@dataclass(frozen=True)
class Override:
    """Gives the type `kind` to tensors whose name matches `pattern` (searched, not anchored)."""

    pattern: str
    kind: TensorType

    def matches(self, name: str) -> bool:
        """Whether the override applies to the tensor of this name."""
        return re.search(self.pattern, name) is not None


def parse_override(text: str) -> Override:
    """Parse `REGEX=TYPE`, with REGEX in Python's syntax; RequestError says what is wrong."""
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise RequestError(f"--tensor-type: expected REGEX=TYPE, found {text!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # for instance for [[:alpha:]] of other engines
            re.compile(pattern)
    except (re.error, Warning) as error:
        raise RequestError(
            f"--tensor-type: {pattern!r} is no regular expression: {error}"
        ) from None
    return Override(pattern, parse_tensor_type(name, "--tensor-type"))


def parse_tensor_type(name: str, option: str) -> TensorType:
    """The type of this name, ignoring case; RequestError lists the supported types."""
    if name.upper() not in TENSOR_TYPES:
        raise RequestError(f"{option}: {unknown_name(name, TENSOR_TYPES)}")
    return BY_NAME[name.upper()]


def unknown_name(name: str, known: Collection[str]) -> str:
    """Why a name is not accepted: it is none of the `known`, of which similar ones are proposed."""

    def plain(text: str) -> str:
        return re.sub(r"[\W_]", "", text.upper())

    near = [other for other in known if plain(name) and plain(other).startswith(plain(name))]
    near = near or get_close_matches(name.upper(), known, n=1)
    hint = f" (did you mean {' or '.join(near[:2])}?)" if near else ""
    return f"expected one of {', '.join(known)}; found {name!r}{hint}"


def block_length(name: str, quant: str, overrides: Sequence[Override]) -> int:
    """The block length of the type that is requested for a tensor.

    Rows that are not a multiple of it fall back to a type with smaller blocks.
    """
    for override in overrides:
        if override.matches(name):
            return override.kind.block_length
    if quant in UNQUANTIZED:
        return 1
    return 32 if quant in _SMALL_BLOCKS else 256


def choose_types(
    targets: Sequence[Target],
    metadata: Mapping[str, Value | RawValue],
    quant: str,
    overrides: Sequence[Override],
    imatrix: Imatrix | None,
) -> dict[str, TensorType]:
    """The type of each target, by name.

    quant: a key of FILE_TYPES. overrides: the first that matches takes precedence over the mix.
    imatrix: fitted to the targets.
    RequestError if llama.cpp rejects the combination, for instance because it needs an imatrix.
    """
    if quant in UNQUANTIZED:
        return {t.name: _plain_type(t, UNQUANTIZED[quant], overrides) for t in targets}
    asked = [(name, o.kind) for name in (t.name for t in targets) for o in _first(overrides, name)]
    patterns = [(f"^{_LITERAL.sub(_ESCAPED, name)}$", kind) for name, kind in asked]
    weights = _miniature_imatrix(targets, imatrix)
    try:
        with _miniature(targets, metadata) as (source, target):
            quantize_file(source, target, FILE_TYPES[quant], patterns, weights)
            types = _types_in(target)
    except QuantizeError as error:
        hint = "; pass one with --imatrix" if "imatrix" in str(error) else ""
        reason = str(error).rstrip(".!")
        raise RequestError(f"--quant {quant}: llama.cpp refuses: {reason}{hint}") from None
    return {t.name: t.fixed or types[t.name] for t in targets}


def fixed_type_tensors(
    where: str, targets: Sequence[Target], metadata: Mapping[str, Value | RawValue]
) -> frozenset[str]:
    """Names of the targets that llama-quantize never quantizes, whatever type is requested.

    RequestError, naming the file `where`, if llama.cpp rejects the metadata.
    """
    try:
        with _miniature(targets, metadata) as (source, target):
            quantize_file_in_subprocess(source, target, FILE_TYPES["F16"])
            types = _types_in(target)
    except QuantizeError as error:
        raise RequestError(
            f"{where}: llama.cpp refuses its metadata: {str(error).rstrip('.!')}; "
            f"mtp-gguf doctor {where} may tell more"
        ) from None
    return frozenset(t.name for t in targets if types[t.name] is F32)


def _first(overrides: Sequence[Override], name: str) -> Sequence[Override]:
    """The first override that applies to this name, as a sequence of at most one."""
    return next(([o] for o in overrides if o.matches(name)), [])


def _plain_type(target: Target, base: TensorType, overrides: Sequence[Override]) -> TensorType:
    """The type in an unquantized file, for which llama-quantize does not support overrides."""
    if target.fixed:
        return target.fixed
    kind = next((o.kind for o in _first(overrides, target.name)), base)
    return kind if target.shape[0] % kind.block_length == 0 else F16


@contextmanager
def _miniature(
    targets: Sequence[Target], metadata: Mapping[str, Value | RawValue]
) -> Iterator[tuple[Path, Path]]:
    """Paths of a miniature of the model in F32 and of the quantizer's output."""
    with tempfile.TemporaryDirectory(prefix="mtp-gguf-") as folder:
        path = Path(folder) / "miniature.gguf"
        _write_miniature(path, targets, metadata)
        yield path, Path(folder) / "quantized.gguf"


def _types_in(path: Path) -> dict[str, TensorType]:
    """The type of each tensor of a GGUF."""
    with open_gguf(path) as file:
        return {t.name: t.type for t in file.tensors}


def _write_miniature(
    path: Path, targets: Sequence[Target], metadata: Mapping[str, Value | RawValue]
) -> None:
    specs = [
        TensorSpec(t.name, (t.shape[0], *(min(n, 2) for n in t.shape[1:])), F32) for t in targets
    ]
    layout = lay_out({k: v for k, v in metadata.items() if not k.startswith("tokenizer.")}, specs)
    noise = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(layout.header)
        for spec, offset in zip(specs, layout.offsets, strict=True):
            file.seek(offset)
            file.write(noise.standard_normal(spec.nbytes // 4, np.float32).tobytes())
        file.truncate(layout.size)


def _miniature_imatrix(
    targets: Sequence[Target], imatrix: Imatrix | None
) -> dict[str, NDArray[np.float32]] | None:
    if imatrix is None:
        return None
    experts = {t.name: min(2, t.shape[2]) for t in targets if len(t.shape) == 3}
    return {name: w[: experts.get(name, 1)] for name, w in imatrix.weights.items()}
