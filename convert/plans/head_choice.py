"""Chooses the head's type, and the size of its draft vocabulary, for tokens per second.

Each candidate is written, run with the trunk that the file will have, and compared by what it
promises on this machine (bench/head_speed.py).
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.output import check_output
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.gguf_tools.heads.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.machine.processors import computing_threads
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.progress import Progress

from ..checkpoints.source_rows import SourceRows
from ..conversion import planned
from ..families.target_model import HeadChoice
from ..options import DraftOptions
from ..pipeline import run
from .plan import Request

if TYPE_CHECKING:
    from mtp_gguf.bench.head_speed import HeadSpeed

AUTO = "AUTO"  # of --mtp-type
_TYPES = ("F16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0")
_USUAL = 2  # the first ones, which lose no acceptance
_GAIN = 1.02  # how much faster another one has to be, because measurements scatter
_HALVINGS = 3  # sizes of a draft vocabulary that are tried after the whole


def choose_head(
    model: str,
    revision: str | None,
    mtp_from: str | None,
    request: Request,
    stream: bool | None,
    text: str,
    costs_file: Path | None,
    threads: int | None,
    progress: Progress,
) -> "tuple[Request, tuple[HeadSpeed, ...]]":
    """The request with the fastest type and draft vocabulary of its head, and what was measured.

    text: whose beginnings the model continues; empty for the built-in one. costs_file: has the
    costs of drafts on the machine that the model is for; if there is none yet, those of this
    machine are written to it. A draft vocabulary keeps its size if the user has named it.
    RequestError if the model has no head, or cannot be run here.
    """
    from mtp_gguf.bench import head_costs  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.bench.head_speed import (  # noqa: PLC0415
        HeadFile,
        Measured,
        measure_heads,
        speeds_of,
    )

    reads_costs = costs_file is not None and costs_file.exists()
    if costs_file is not None and not reads_costs:
        check_output(costs_file, [], overwrite=False)  # before anything is measured
    cores = threads or computing_threads()
    with tempfile.TemporaryDirectory(prefix=".mtp-gguf-", dir=request.folder) as temporary:

        def write(name: str, wanted: Request) -> Path:
            wanted = replace(
                wanted,
                also=(),
                mmproj=None,
                sidecar=None,
                split_max_size=None,
                output=Path(temporary) / f"{name}.gguf",
            )
            with planned(model, revision, mtp_from, wanted, stream, progress) as conversion:
                rows = SourceRows(conversion.weights)
                run(conversion.plans, rows, lambda _: None, threads)
                return conversion.plans[0].shards[0].path

        with progress.share("measure heads") as show:
            bare = replace(request, head=HeadChoice.NONE, head_type=None, draft=None)
            trunk = write("trunk", bare)
            known = None
            if costs_file is not None and reads_costs:
                shape = head_costs.shape_of(trunk, request.quant)
                known = head_costs.read_costs(costs_file, shape)
                on = f"{known.machine.cpu}, {known.machine.cores} cores"
                progress.say(f"the costs of drafts are those of {costs_file}: {on}")
                for name in _TYPES:
                    known.draft(name, 0, costs_file)  # an error before anything is measured
            alone = replace(request, head=HeadChoice.ALONE)
            heads = [
                HeadFile(name, write(name, replace(alone, head_type=BY_NAME[name])))
                for name in _TYPES
            ]

            def measure(heads: Sequence[HeadFile], done: float) -> Measured:
                return measure_heads(
                    trunk,
                    request.quant,
                    heads,
                    cores,
                    text,
                    lambda share, what: show(done + share / 2, what),
                    with_costs=known is None,
                )

            whole = measure(heads, 0)
            costs = known or whole.costs
            assert costs is not None, "measured unless they are known"
            speeds = speeds_of(heads, whole, costs, costs_file)
            best = heads[fastest(speeds)]
            chosen = replace(request, head_type=BY_NAME[best.kind])
            if sizes := _sizes(best.path, request.draft):
                shorter = [HeadFile(best.kind, best.path, n) for n in sizes]
                part = measure(shorter, 0.5)
                if part.costs is not None:
                    costs = costs.joined(part.costs)
                found = speeds_of(shorter, part, costs, costs_file)
                size = sizes[fastest(found, usual=1)]
                assert request.draft is not None
                chosen = replace(chosen, draft=replace(request.draft, size=size))
                speeds += found
        if costs_file is not None and known is None:
            head_costs.write_costs(costs_file, costs)
        return chosen, tuple(speeds)


def fastest(speeds: "Sequence[HeadSpeed]", usual: int = _USUAL) -> int:
    """The fastest of the first ones, unless another one is faster by more than they scatter."""
    places = range(len(speeds))
    safe = max(places[:usual], key=lambda i: speeds[i].tokens_per_second)
    other = max(places, key=lambda i: speeds[i].tokens_per_second)
    gain = speeds[other].tokens_per_second / speeds[safe].tokens_per_second
    return other if gain > _GAIN else safe


def _sizes(head: Path, draft: DraftOptions | None) -> list[int]:
    """Sizes of a draft vocabulary to try, the whole one first; none if there is no choice."""
    if draft is None or draft.size is not None or draft.layout is not DraftLayout.IDS:
        return []
    with open_model(head) as opened:
        ids = opened.first.array("mtp_gguf.fastmtp.token_ids")
    if ids is None:
        raise RequestError(f"{head}: expected a draft vocabulary, found none")
    return [len(ids) >> shift for shift in range(_HALVINGS + 1) if len(ids) >> shift]
