"""Chooses a type for each tensor so that a file of a given size differs least from the reference.

The damage of a tensor at a type is its relative quantization error, weighted by the importance
matrix, times a factor: how much an error there changes the model's output, in nats of KL
divergence. The factors are measured. Damages add up, so the best choice at a size is found with a
Lagrange multiplier: each tensor takes the type that minimizes damage + price * bytes.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.format import DEFAULT_ALIGNMENT
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME, TensorType
from mtp_gguf.gguf_tools.imatrix import Imatrix
from mtp_gguf.quantize import ggml

from ..checkpoints.source_rows import SourceRows
from .plan import RECIPE_KEY, Plan
from .precision import TENSOR_TYPES, Override, unknown_name
from .recipe import Target

# Each loads in stock llama.cpp. Those of 32 values are for rows that are no multiple of 256.
CANDIDATES = tuple(
    BY_NAME[name]
    for name in (
        *("IQ2_XS", "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K"),
        *("Q8_0", "IQ4_NL", "Q4_0", "Q5_0", "Q5_1"),
    )
)
# llama.cpp quantizes to these only with an importance matrix.
_WEIGHTED = ("IQ2_XS", "IQ2_S", "IQ3_XXS")
# Rows of a tensor whose errors stand for all.
_ROWS = 64
# Further choices are looked for between two whose sizes differ by more, among so many at once.
_GAP, _KEPT = 1.002, 500
_PARTS = 4  # of the layers, measured each by itself

Errors = dict[str, dict[TensorType, float]]


@dataclass(frozen=True)
class Choice:
    """A type for each tensor, the bytes of these tensors, and the expected mean KL divergence."""

    types: dict[str, TensorType]
    nbytes: int
    damage: float


def chosen_targets(plan: Plan, overrides: Sequence[Override]) -> dict[str, Target]:
    """The tensors whose types are chosen: those of the trunk that the plan quantizes.

    overrides: the user's, whose tensors have their types already.
    """
    return {
        t.spec.name: t.target
        for shard in plan.shards
        for t in shard.tensors
        if t.target is not None
        and t.part == "base"
        and t.spec.type.is_quantized
        and not any(override.matches(t.spec.name) for override in overrides)
    }


def measure_errors(
    targets: Mapping[str, Target],
    rows: SourceRows,
    imatrix: Imatrix | None,
    kinds: Sequence[TensorType] = CANDIDATES,
) -> Errors:
    """The relative squared error of each tensor at each of `kinds`, by a sample of its rows.

    RequestError if a tensor cannot have any of them.
    """
    errors = {name: _errors(target, rows, imatrix, kinds) for name, target in targets.items()}
    if bare := [name for name, by_type in errors.items() if not by_type]:
        raise RequestError(
            f"{bare[0]}: expected rows for one of {', '.join(kind.name for kind in kinds)}, found "
            f"rows of {targets[bare[0]].shape[0]}; give it a type with --tensor-type"
        )
    return errors


def _errors(
    target: Target, rows: SourceRows, imatrix: Imatrix | None, kinds: Sequence[TensorType]
) -> dict[TensorType, float]:
    count = math.prod(target.shape[1:])
    picked = np.unique(np.linspace(0, count - 1, min(count, _ROWS)).astype(int))
    sample = [ggml.to_f32(rows.read(target, int(i), int(i) + 1)) for i in picked]
    weights = imatrix.weights.get(target.name) if imatrix else None
    experts = picked // target.shape[1]
    total, errors = 0.0, dict.fromkeys(kinds, 0.0)
    for row, expert in zip(sample, experts, strict=True):
        importance = None if weights is None else weights[expert]
        scale: NDArray[np.float32] | float = 1.0 if importance is None else importance
        total += float((np.square(row) * scale).sum())
        for kind in list(errors):
            unweighted = importance is None and kind.name in _WEIGHTED
            if unweighted or row.shape[1] % kind.block_length:
                del errors[kind]
                continue
            data = ggml.quantize(kind, row, importance).tobytes()
            difference = ggml.dequantize(kind, data).reshape(row.shape) - row
            errors[kind] += float((np.square(difference) * scale).sum())
    return {kind: error / total if total else 0.0 for kind, error in errors.items()}


def groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Tensors of one role in neighbouring layers, whose factor is measured together."""
    blocks = {n: int(m[1]) for n in names if (m := re.match(r"blk\.(\d+)\.", n))}
    layers = max(blocks.values(), default=0) + 1
    found: dict[tuple[str, int], list[str]] = {}
    for name in names:
        block = blocks.get(name)
        part = -1 if block is None else block * min(_PARTS, layers) // layers
        found.setdefault((re.sub(r"^blk\.\d+\.", "", name), part), []).append(name)
    return [tuple(group) for group in found.values()]


def probe_types(group: Sequence[str], errors: Errors) -> dict[str, TensorType]:
    """The types at which a group's factor is measured: the error is small, but shows."""
    wanted = [BY_NAME["Q3_K"], BY_NAME["Q4_0"], *CANDIDATES]
    return {name: next(kind for kind in wanted if kind in errors[name]) for name in group}


def tensor_bytes(target: Target, kind: TensorType) -> int:
    """Bytes of a tensor at a type."""
    return math.prod(target.shape[1:]) * kind.row_bytes(target.shape[0])


def check_size(targets: Mapping[str, Target], errors: Errors, nbytes: int, where: str) -> None:
    """RequestError, naming the option `where`, if no types fit into so many bytes."""
    least = sum(
        min(tensor_bytes(targets[name], kind) for kind in by_type)
        for name, by_type in errors.items()
    )
    if least > nbytes:
        raise RequestError(
            f"{where}: the smallest possible file is {least - nbytes} bytes larger; choose a "
            "larger target"
        )


class Knapsack:
    """All choices that are the best ones at their size."""

    def __init__(
        self, targets: Mapping[str, Target], errors: Errors, factors: Mapping[str, float]
    ) -> None:
        self._targets, self._errors, self._factors = targets, errors, factors
        self._options = {
            name: [
                (kind, tensor_bytes(targets[name], kind), factors[name] * error)
                for kind, error in by_type.items()
            ]
            for name, by_type in errors.items()
        }
        self._sizes = {
            (name, kind): (size, harm)
            for name, options in self._options.items()
            for kind, size, harm in options
        }
        self.curve = self._curve()

    def calibrated(self, types: Mapping[str, TensorType], damage: float) -> "Knapsack":
        """The same choices with all damages scaled, so that these types have this measured one."""
        expected = sum(
            harm for (name, kind), (_, harm) in self._sizes.items() if kind is types[name]
        )
        scale = damage / expected if expected else 1.0
        factors = {name: factor * scale for name, factor in self._factors.items()}
        return Knapsack(self._targets, self._errors, factors)

    def _at(self, price: float) -> Choice:
        types = {
            name: min(options, key=lambda o: (o[2] + price * o[1], o[1]))[0]
            for name, options in self._options.items()
        }
        return self._choice(types)

    def _choice(self, types: dict[str, TensorType]) -> Choice:
        taken = [self._sizes[name, kind] for name, kind in types.items()]
        return Choice(types, sum(n for n, _ in taken), math.fsum(harm for _, harm in taken))

    def _curve(self) -> list[Choice]:
        """From the smallest to the largest file, each larger and better than the one before."""
        found: list[Choice] = []
        for price in np.geomspace(1e3, 1e-18, 2000):
            choice = self._at(float(price))
            if not found or choice.nbytes > found[-1].nbytes:
                found.append(choice)
        return found

    def _between(self, place: int) -> list[Choice]:
        """Choices between one of the curve and the one before it, if their sizes differ much.

        The multiplier has none there, because a large tensor changes its type. Tensor by tensor,
        each choice of types so far takes each type; those that others surpass in size and damage
        are dropped, and of the rest all but the `_KEPT` that cost least at the price at which both
        ends are equal.
        """
        if not 0 < place < len(self.curve):
            return []
        small, large = self.curve[place - 1 : place + 1]
        if large.nbytes <= _GAP * small.nbytes:
            return []
        price = (small.damage - large.damage) / (large.nbytes - small.nbytes)
        nbytes, damage = np.zeros(1, dtype=np.int64), np.zeros(1)
        steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for options in self._options.values():
            more = np.array([size for _, size, _ in options])
            harm = np.array([harm for _, _, harm in options])
            nbytes = (nbytes[:, None] + more).ravel()
            damage = (damage[:, None] + harm).ravel()
            order = np.lexsort((damage, nbytes))
            least = np.minimum.accumulate(damage[order])
            useful = order[np.diff(least, prepend=np.inf) < 0]
            useful = useful[np.argsort(damage[useful] + price * nbytes[useful])[:_KEPT]]
            nbytes, damage = nbytes[useful], damage[useful]
            steps.append(np.divmod(useful, len(options)))
        found = []
        for end in np.flatnonzero((nbytes > small.nbytes) & (nbytes < large.nbytes)):
            types, at = {}, int(end)
            for name, (before, option) in zip(
                reversed(self._options), reversed(steps), strict=True
            ):
                types[name] = self._options[name][option[at]][0]
                at = int(before[at])
            found.append(self._choice({name: types[name] for name in self._options}))
        return found

    def of_size(self, nbytes: int) -> Choice:
        """The best choice of at most so many bytes, which passed `check_size`."""
        after = next((i for i, c in enumerate(self.curve) if c.nbytes > nbytes), len(self.curve))
        near = [c for c in self._between(after) if c.nbytes <= nbytes]
        return min([self.curve[after - 1], *near], key=lambda c: c.damage)

    def of_damage(self, damage: float) -> Choice:
        """The smallest choice of at most this damage."""
        for place, choice in enumerate(self.curve):
            if choice.damage <= damage:
                near = [c for c in self._between(place) if c.damage <= damage]
                return min([choice, *near], key=lambda c: c.nbytes)
        raise RequestError(
            f"--target-kld {damage:g}: the best possible file is expected to have "
            f"{self.curve[-1].damage:.2g}; choose a larger target"
        )


def exact_overrides(types: Mapping[str, TensorType]) -> tuple[Override, ...]:
    """Overrides that give these tensors their types."""
    return tuple(Override(f"^{re.escape(name)}$", kind) for name, kind in types.items())


def recipe_lines(types: Mapping[str, TensorType]) -> tuple[str, ...]:
    """The lines of a recipe, `TENSOR TYPE`."""
    return tuple(f"{name} {kind.name}" for name, kind in types.items())


def recipe_bytes(names: Iterable[str]) -> int:
    """The most that a recipe for these tensors takes in the header of a file."""
    longest = max(len(kind.name) for kind in CANDIDATES)
    lines = sum(8 + len(name.encode()) + 1 + longest for name in names)
    return 8 + len(RECIPE_KEY) + 4 + 4 + 8 + lines + DEFAULT_ALIGNMENT


def write_recipe(path: Path, choice: Choice) -> None:
    """Write a text file that `read_recipe` reads."""
    lines = [f"# expected mean KL divergence: {choice.damage:.3g} nats", "# tensor type"]
    lines += recipe_lines(choice.types)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_recipe(path: Path) -> dict[str, TensorType]:
    """The types by tensor name; RequestError names a line that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"--recipe: {path}: cannot be read: {reason}") from None
    types: dict[str, TensorType] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--recipe: {path}: line {number}"
        if len(words) != 2:
            raise RequestError(f"{where}: expected a tensor and its type, found {line.strip()!r}")
        name, kind = words
        if kind.upper() not in TENSOR_TYPES:
            raise RequestError(f"{where}: {unknown_name(kind, TENSOR_TYPES)}")
        if name in types:
            raise RequestError(f"{where}: expected each tensor once, found {name} again")
        types[name] = BY_NAME[kind.upper()]
    if not types:
        raise RequestError(f"--recipe: {path}: expected lines with a tensor and its type")
    return types
