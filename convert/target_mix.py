"""Choose the types of a conversion for a target size or divergence, by measuring the model."""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.profile import identify
from mtp_gguf.gguf_tools.progress import Progress
from mtp_gguf.gguf_tools.resolve import local_gguf
from mtp_gguf.gguf_tools.tensor_types import TensorType

from .blueprint import HeadChoice
from .conversion import is_gguf, planned
from .mix import (
    Choice,
    Errors,
    Knapsack,
    check_size,
    chosen_targets,
    exact_overrides,
    groups,
    measure_errors,
    probe_types,
)
from .pipeline import run
from .plan import Plan, Request
from .source_rows import SourceRows

# What the factors are measured on, of the built-in text.
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
    threads: int | None,
    progress: Progress,
) -> tuple[Choice, Knapsack]:
    """Choose the types that reach the target, and return all other choices, too.

    RequestError if the target is out of reach, or the model cannot be run as it is.
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
        errors = measure_errors(targets, SourceRows(conversion.weights), plan.imatrix)
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
    for group, factor in _factors(
        model, source, request, probes, errors, key.hexdigest(), threads, progress
    ):
        factors |= dict.fromkeys(group, factor)
    knapsack = Knapsack(targets, errors, factors)
    if target.kld is not None:
        return knapsack.of_damage(target.kld), knapsack
    return knapsack.of_size(budget), knapsack


def _budget(plan: Plan, target: Target, names: list[str]) -> int:
    """Bytes that the chosen tensors may take; without meaning for a target divergence."""
    specs = [t.spec for shard in plan.shards for t in shard.tensors]
    chosen = set(names)
    if target.size is not None:
        return target.size - plan.size + sum(s.nbytes for s in specs if s.name in chosen)
    weights = sum(math.prod(s.shape) for s in specs)
    others = sum(s.nbytes for s in specs if s.name not in chosen)
    return math.floor((target.bpw or 0.0) * weights / 8) - others


def _factors(
    model: str,
    source: Path,
    request: Request,
    probes: dict[tuple[str, ...], dict[str, TensorType]],
    errors: Errors,
    key: str,
    threads: int | None,
    progress: Progress,
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the factor of each group of tensors, measured, or from the cache."""
    from mtp_gguf.bench.calibration import built_in_text  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.bench.imatrix import windows_of  # noqa: PLC0415
    from mtp_gguf.bench.logit_file import LogitFile  # noqa: PLC0415
    from mtp_gguf.bench.model import BenchModel  # noqa: PLC0415
    from mtp_gguf.bench.quality import measure_divergence, store_reference  # noqa: PLC0415
    from mtp_gguf.server.upstream_source import cache_folder  # noqa: PLC0415

    words = f"{key} {identify(source)} {_WINDOW} {_WINDOWS}".encode()
    cached = cache_folder("mixes") / f"{hashlib.sha256(words).hexdigest()[:32]}.json"
    known = _known(cached)
    cores = threads or os.cpu_count() or 1
    folder = request.output if request.output and request.output.is_dir() else None
    folder = folder or (request.output.parent if request.output else Path())
    with tempfile.TemporaryDirectory(prefix=".mtp-gguf-", dir=folder) as temporary:
        logits: LogitFile | None = None
        with progress.share("measure") as show:
            for number, (group, types) in enumerate(probes.items()):
                show(number / len(probes), f"{group[0]} and {len(group) - 1} like it")
                if group[0] not in known:
                    if logits is None:
                        with BenchModel(source, n_ctx=_WINDOW, threads=cores) as reference:
                            text = built_in_text(reference.write_chat)
                            ids = reference.tokenize(text)
                            windows = windows_of(ids, _WINDOW, _WINDOWS, reference.bos)
                            path = Path(temporary) / "logits"
                            logits = LogitFile(path, windows, reference.n_vocab)
                            with reference.reader(_WINDOW) as reader:
                                store_reference(reader, logits)
                    probe = replace(
                        request,
                        quant="F16",
                        head=HeadChoice.NONE,
                        head_type=None,
                        draft=None,
                        split_max_size=None,
                        overrides=exact_overrides(types),
                        output=Path(temporary) / "probe.gguf",
                    )
                    with planned(model, None, None, probe, None, progress) as conversion:
                        run(conversion.plans, SourceRows(conversion.weights), lambda _: None, cores)
                    with (
                        BenchModel(
                            Path(temporary) / "probe.gguf", n_ctx=_WINDOW, threads=cores
                        ) as m,
                        m.reader(_WINDOW) as reader,
                    ):
                        divergence = measure_divergence(reader, logits, threads=cores)
                    error = sum(errors[name][kind] for name, kind in types.items())
                    known[group[0]] = max(divergence.mean.value, 0.0) / error if error else 0.0
                    cached.write_text(json.dumps(known), encoding="utf-8")
                yield group, known[group[0]]


def _known(cached: Path) -> dict[str, float]:
    try:
        return {str(k): float(v) for k, v in json.loads(cached.read_text("utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
