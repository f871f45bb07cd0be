"""Render a conversion's plans and outcome as text and as JSON."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_gguf.gguf_tools.heads.head import HeadReport
from mtp_gguf.gguf_tools.machine.shell import quoted
from mtp_gguf.gguf_tools.machine.text import count_types, human_bytes, printable
from mtp_gguf.gguf_tools.vision import PART

if TYPE_CHECKING:
    from mtp_gguf.bench.head_speed import HeadSpeed
    from mtp_gguf.convert.heads.acceptance import AcceptanceCheck
    from mtp_gguf.convert.pipeline import Outcome
    from mtp_gguf.convert.plans.mix import Choice, Knapsack
    from mtp_gguf.convert.plans.plan import Plan, PlannedTensor

_CURVE = 12  # points of it that are shown
_PARTS = ("base", "head", "draft vocabulary", PART)


def plan_text(plans: Sequence["Plan"]) -> str:
    """Return all tensors with source, target, type and size, then totals and notes."""
    return "\n\n".join(
        "\n".join([*_heading(plan, plans), *_table(plan), "", *_totals(plan), *_files(plan)])
        for plan in plans
    )


def _heading(plan: "Plan", plans: Sequence["Plan"]) -> list[str]:
    vision = "mmproj " if all(tensor.part == PART for tensor in plan.tensors) else ""
    return [f"{vision}{plan.quant}:"] if len(plans) > 1 else []


def _table(plan: "Plan") -> Iterator[str]:
    rows = [
        (
            _source(tensor),
            tensor.spec.name,
            tensor.spec.type.name,
            str(list(tensor.spec.shape)),
            human_bytes(tensor.spec.nbytes),
        )
        for tensor in plan.tensors
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for source, name, kind, shape, size in rows:
        yield (
            f"{source:{widths[0]}} -> {name:{widths[1]}}  {kind:{widths[2]}}  "
            f"{shape:{widths[3]}}  {size:>{widths[4]}}"
        )


def plan_json(plans: Sequence["Plan"], kernels: Mapping[str, str] | None) -> str:
    """Return the first plan as one JSON object, with the others in its list `also`."""
    return json.dumps(_fields(plans, kernels), indent=1)


def summary_text(
    plans: Sequence["Plan"], outcome: "Outcome", report: HeadReport, abilities: Sequence[str]
) -> str:
    """Return what was written, its cost, what the files can do, and the next command."""
    next_step = f"mtp-gguf list-tensors {quoted(plans[0].shards[0].path)}"
    if report.ready:
        next_step += " --mtp"
    lines = []
    for plan in plans:
        lines += [*_heading(plan, plans), *_totals(plan), *_files(plan)]
    lines += [
        f"took {outcome.seconds:.1f} s, {outcome.cores} cores {outcome.utilisation:.0%} busy, "
        f"peak memory {human_bytes(outcome.peak_bytes)}",
        *abilities,
        f"next: {next_step}",
    ]
    return "\n".join(lines)


def summary_json(
    plans: Sequence["Plan"],
    outcome: "Outcome",
    kernels: Mapping[str, str] | None,
    warnings: Sequence[str],
    acceptance: "Mapping[Path, AcceptanceCheck]",
) -> str:
    """Return plans and outcome as one JSON object."""
    cost = {
        "seconds": outcome.seconds,
        "cpu_seconds": outcome.busy_seconds,
        "cores": outcome.cores,
        "utilisation": outcome.utilisation,
        "peak_bytes": outcome.peak_bytes,
        "warnings": list(warnings),
        "acceptance": {str(path): check.fields() for path, check in acceptance.items()},
    }
    return json.dumps(_fields(plans, kernels) | cost, indent=1)


def _fields(plans: Sequence["Plan"], kernels: Mapping[str, str] | None) -> dict[str, Any]:
    first, *others = map(_plan_fields, plans)
    if others:
        first["also"] = others
    if kernels is not None:
        first["kernels"] = dict(kernels)
    return first


def _source(tensor: "PlannedTensor") -> str:
    if tensor.target is None:
        return "(ids)"
    first, *more = tensor.target.recipe.sources
    return printable(first) + (f" (+{len(more)})" if more else "")


def _totals(plan: "Plan") -> Iterator[str]:
    for part in _PARTS:
        members = [t for t in plan.tensors if t.part == part]
        if members:
            size = human_bytes(sum(t.spec.nbytes for t in members))
            types = count_types(Counter(t.spec.type.name for t in members))
            yield f"{part}: {len(members)} tensors, {size} ({types})"
    if plan.draft:
        yield f"draft vocabulary: {len(plan.draft.ids)} tokens, {plan.draft.source}"
        if plan.draft.coverage:
            shares = (f"{size}: {share:.1%}" for size, share in plan.draft.coverage.items())
            yield f"coverage of the corpus by size: {', '.join(shares)}"
    for note in plan.notes:
        yield f"note: {printable(note)}"


def _files(plan: "Plan") -> Iterator[str]:
    for shard in plan.shards:
        yield f"{shard.path}: {human_bytes(shard.layout.size)}"
    yield f"{_bits_per_weight(plan):.2f} bits per weight"


def _bits_per_weight(plan: "Plan") -> float:
    made = [t.spec for t in plan.tensors if t.target is not None]
    weights = sum(t.target.rows * t.spec.shape[0] for t in plan.tensors if t.target is not None)
    return 8 * sum(spec.nbytes for spec in made) / weights


def _plan_fields(plan: "Plan") -> dict[str, Any]:
    return {
        "quant": plan.quant,
        "files": [{"path": str(s.path), "bytes": s.layout.size} for s in plan.shards],
        "tensors": [
            {
                "name": t.spec.name,
                "sources": list(t.target.recipe.sources) if t.target else [],
                "shape": list(t.spec.shape),
                "type": t.spec.type.name,
                "bytes": t.spec.nbytes,
                "part": t.part,
            }
            for t in plan.tensors
        ],
        "skipped": plan.skipped,
        "draft_vocabulary": {
            "size": len(plan.draft.ids),
            "source": plan.draft.source,
            "coverage": {str(size): share for size, share in plan.draft.coverage.items()},
        }
        if plan.draft
        else None,
        "notes": list(plan.notes),
        "bits_per_weight": _bits_per_weight(plan),
    }


def choice_text(choice: "Choice", knapsack: "Knapsack", *, curve: bool) -> str:
    """Return the expected divergence, and with `curve` the best files of other sizes."""
    lines = [f"expected mean KL divergence of these types: {choice.damage:.2g} nats"]
    if curve:
        lines.append("chosen tensors  expected KLD")
        step = max(1, len(knapsack.curve) // _CURVE)
        for point in knapsack.curve[::step]:
            lines.append(f"{human_bytes(point.nbytes):>14}  {point.damage:.2g}")
    return "\n".join(lines)


def heads_text(heads: "Sequence[HeadSpeed]") -> str:
    """Return a table of the heads that were measured, the fastest marked."""
    best = max(heads, key=lambda head: head.tokens_per_second)
    lines = ["head                       tok/s  at depth  acceptance"]
    for head in heads:
        rates = " ".join(f"{rate:.0%}" for rate in head.acceptance)
        mark = "  <- fastest" if head is best else ""
        lines.append(f"{head.label:24}{head.tokens_per_second:8.1f}{head.depth:10}  {rates}{mark}")
    return "\n".join(lines)


def kernels(plans: Sequence["Plan"]) -> dict[str, str]:
    """Return the quantizer's instruction set, or ggml, by type (with and without importance).

    If a kernel was rejected because its bytes differ from ggml's, the reason follows. Types that
    were not tested before are tested here, in some hundredths of a second each.
    """
    from mtp_gguf.quantize import quantizer  # noqa: PLC0415  (loads the libraries)

    found = {}
    for plan in plans:
        weights = plan.imatrix.weights if plan.imatrix else {}
        for tensor in plan.tensors:
            kind = tensor.spec.type
            weighted = kind.is_quantized and tensor.spec.name in weights
            if tensor.target is None or kind.name == "F32":
                continue
            label = f"{kind.name} with importance" if weighted else kind.name
            if label not in found:
                found[label] = quantizer.kernel(kind, weighted)
    return dict(sorted(found.items()))


def kernel_text(found: dict[str, str]) -> str:
    """Return one line for each type."""
    from mtp_gguf.quantize import quantizer  # noqa: PLC0415

    lines = [f"instruction sets of the quantizer here: {', '.join(quantizer.targets())}"]
    return "\n".join([*lines, *(f"quantizer of {label}: {name}" for label, name in found.items())])
