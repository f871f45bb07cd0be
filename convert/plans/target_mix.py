"""Choose the types of a conversion for a target size or divergence, by measuring the model."""

import hashlib
import json
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.files.tensor_types import TensorType
from mtp_gguf.gguf_tools.hub.resolve import local_gguf
from mtp_gguf.gguf_tools.machine.processors import computing_threads
from mtp_gguf.gguf_tools.profile import identify
from mtp_gguf.gguf_tools.progress import Progress

from ..checkpoints.source_rows import SourceRows
from ..conversion import is_gguf, planned
from ..families.target_model import HeadChoice
from ..pipeline import run
from .mix import (
    CANDIDATES,
    Choice,
    Knapsack,
    check_size,
    chosen_targets,
    exact_overrides,
    groups,
    measure_errors,
    probe_types,
    recipe_bytes,
)
from .plan import Plan, Request

if TYPE_CHECKING:
    from mtp_gguf.bench.logit_file import LogitFile

# What the factors are measured on, at equal distances in the text.
_WINDOW, _WINDOWS = 256, 8


@dataclass(frozen=True)
class Target:
    """Exactly one of: bytes of the file, bits per weight of all tensors, mean KL divergence."""

    size: int | None
    bpw: float | None
    kld: float | None

    @property
    def wanted(self) -> bool:
        """Whether there is a target."""
        return not (self.size is None and self.bpw is None and self.kld is None)


def choose_types(
    model: str,
    request: Request,
    target: Target,
    imatrix: Path | None,
    text: str,
    threads: int | None,
    progress: Progress,
    *,
    with_kernels: bool,
) -> tuple[Choice, Knapsack]:
    """Choose the types that reach the target, and return all other choices, too.

    text: what the divergence is measured on; empty for the built-in one. with_kernels: only choose
    types that our kernels compute on this CPU. RequestError if the target is out of reach, or the
    model cannot be run as it is.
    """
    if not is_gguf(model):
        raise RequestError(
            f"{model}: expected a GGUF in 16 or 32 bits, which can be run to measure it, found a "
            f"checkpoint; convert it first: mtp-gguf convert {model} --quant BF16"
        )
    with planned(model, None, None, request, None, progress) as conversion:
        plan = conversion.plans[0]
        targets = chosen_targets(plan, request.overrides)
        if not targets:
            raise RequestError(
                f"--quant {request.quant}: expected a mix with quantized tensors, found none to "
                "choose types for"
            )
        kinds = kinds_with_kernels() if with_kernels else CANDIDATES
        errors = measure_errors(targets, SourceRows(conversion.weights), plan.imatrix, kinds)
        budget = _budget(plan, target, list(targets))
    if target.kld is None:
        where = "--target-size" if target.size is not None else "--target-bpw"
        check_size(targets, errors, budget, where)
    source = local_gguf(model, with_head=False, say=progress.download).path
    key = hashlib.sha256(repr(sorted(targets)).encode())
    if imatrix is not None:
        key.update(imatrix.read_bytes())
    factors: dict[str, float] = {}
    probes = {group: probe_types(group, errors) for group in groups(list(targets))}

    def best(knapsack: Knapsack) -> Choice:
        if target.kld is not None:
            return knapsack.of_damage(target.kld)
        return knapsack.of_size(budget)

    with (
        _Probes(model, source, request, text, key.hexdigest(), threads) as measured,
        progress.share("measure") as show,
    ):
        for number, (group, types) in enumerate(probes.items()):
            show(number / len(probes), f"{group[0]} and {len(group) - 1} like it")
            divergence = measured.divergence(f"{group[0]} {_names(types)}", types, progress)
            error = sum(errors[name][kind] for name, kind in types.items())
            factors |= dict.fromkeys(group, divergence / error if error else 0.0)
        knapsack = Knapsack(targets, errors, factors)
        types = best(knapsack).types
        divergence = measured.divergence(f"choice {_names(types)}", types, progress)
    knapsack = knapsack.calibrated(types, divergence)
    return best(knapsack), knapsack


def _names(types: dict[str, TensorType]) -> str:
    """Stands for types of tensors in the cache."""
    names = " ".join(f"{name} {kind.name}" for name, kind in sorted(types.items()))
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def kinds_with_kernels() -> tuple[TensorType, ...]:
    """The types that our kernels compute on this CPU; RequestError without kernels."""
    from mtp_gguf.native.runtime import plugged_kernels  # noqa: PLC0415  (loads llama.cpp)

    names = plugged_kernels.types()
    kinds = tuple(kind for kind in CANDIDATES if kind.name in names)
    if not kinds:
        raise RequestError(
            f"--prefer speed: expected kernels for this CPU, found none: {plugged_kernels.reason}"
        )
    return kinds


def _budget(plan: Plan, target: Target, names: list[str]) -> int:
    """Bytes that the chosen tensors may take; without meaning for a target divergence."""
    specs = [t.spec for shard in plan.shards for t in shard.tensors]
    chosen = set(names)
    if target.size is not None:
        rest = plan.size - sum(s.nbytes for s in specs if s.name in chosen)
        return target.size - rest - recipe_bytes(names)
    weights = sum(math.prod(s.shape) for s in specs)
    others = sum(s.nbytes for s in specs if s.name not in chosen)
    return math.floor((target.bpw or 0.0) * weights / 8) - others


class _Probes:
    """Measures what types do to the output of a model; a context manager.

    text: of which windows are read; empty for the built-in one. key: stands for all that decides
    the results, which are kept in the cache.
    """

    def __init__(
        self, model: str, source: Path, request: Request, text: str, key: str, threads: int | None
    ) -> None:
        from mtp_gguf.server.upstream_source import cache_folder  # noqa: PLC0415

        words = f"{key} {identify(source)} {_WINDOW} {_WINDOWS} {text}".encode()
        self._cached = cache_folder("mixes") / f"{hashlib.sha256(words).hexdigest()[:32]}.json"
        self._known = _known(self._cached)
        self._model, self._source, self._text = model, source, text
        self._cores = threads or computing_threads()
        self._folder = tempfile.TemporaryDirectory(prefix=".mtp-gguf-", dir=request.folder)
        self._request = replace(
            request,
            quant="F16",
            head=HeadChoice.NONE,
            head_type=None,
            draft=None,
            split_max_size=None,
            output=Path(self._folder.name) / "probe.gguf",
        )
        self._logits: LogitFile | None = None

    def __enter__(self) -> "_Probes":
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def divergence(self, name: str, types: dict[str, TensorType], progress: Progress) -> float:
        """The mean KL divergence with these types, and F16 elsewhere, in nats.

        name: under which it is in the cache.
        """
        from mtp_gguf.bench.model import BenchModel  # noqa: PLC0415  (loads llama.cpp)
        from mtp_gguf.bench.quality import measure_divergence  # noqa: PLC0415

        if name not in self._known:
            logits = self._reference()
            probe = replace(self._request, overrides=exact_overrides(types))
            with planned(self._model, None, None, probe, None, progress) as conversion:
                rows = SourceRows(conversion.weights)
                run(conversion.plans, rows, lambda _: None, self._cores)
                path = conversion.plans[0].shards[0].path
            with (
                BenchModel(path, n_ctx=_WINDOW, threads=self._cores) as m,
                m.reader(_WINDOW) as reader,
            ):
                divergence = measure_divergence(reader, logits, threads=self._cores)
            self._known[name] = max(divergence.mean.value, 0.0)
            self._cached.write_text(json.dumps(self._known), encoding="utf-8")
        return self._known[name]

    def _reference(self) -> "LogitFile":
        """The logits of the model itself."""
        from mtp_gguf.bench.calibration import built_in_text  # noqa: PLC0415  (loads llama.cpp)
        from mtp_gguf.bench.imatrix import windows_of  # noqa: PLC0415
        from mtp_gguf.bench.logit_file import LogitFile  # noqa: PLC0415
        from mtp_gguf.bench.model import BenchModel  # noqa: PLC0415
        from mtp_gguf.bench.quality import store_reference  # noqa: PLC0415

        if self._logits is None:
            with BenchModel(self._source, n_ctx=_WINDOW, threads=self._cores) as reference:
                ids = reference.tokenize(self._text or built_in_text(reference.write_chat))
                windows = windows_of(ids, _WINDOW, None, reference.bos, "--target-text")
                picked = np.linspace(0, len(windows) - 1, min(len(windows), _WINDOWS)).astype(int)
                path = Path(self._folder.name) / "logits"
                self._logits = LogitFile(path, windows[picked], reference.n_vocab)
                with reference.reader(_WINDOW) as reader:
                    store_reference(reader, self._logits)
        return self._logits


def _known(cached: Path) -> dict[str, float]:
    try:
        return {str(k): float(v) for k, v in parse_json(cached.read_text("utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
