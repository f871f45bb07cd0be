"""`mtp-gguf tune`."""

from pathlib import Path
from typing import Annotated

import typer

from mtp_gguf.native.bench.prompts import SETS, parse_sets, read_prompt

from ..fastmtp import DraftLayout
from ..machine import usable_cores
from ..output import check_output
from ..profile import profile_path, write_profile
from ..server.model import open_model
from .console import printable, reports_errors
from .share_progress import share_progress

_SHOWN = 8  # candidates
_ROLLBACKS = ("snapshot", "checkpoint", "host")


@reports_errors
def tune(
    model: Annotated[Path, typer.Argument(help="GGUF file with an MTP head.")],
    prompts: Annotated[
        str, typer.Option(help=f"Built-in prompts to measure with: {', '.join(SETS)}.")
    ] = ",".join(SETS),
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(help="A prompt of yours to measure with; may be given several times."),
    ] = None,
    max_depth: Annotated[int, typer.Option(min=1, max=8, help="Deepest draft to try.")] = 5,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=2, help="Of each answer.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="How often each setting is measured.")] = 3,
    threads: Annotated[
        int | None, typer.Option("-t", "--threads", min=1, help="CPU threads. Without: all cores.")
    ] = None,
    gpu_layers: Annotated[int, typer.Option("-ngl", help="Layers on the GPU; -1: all.")] = 0,
    head: Annotated[Path | None, typer.Option(help="Another GGUF to take the head from.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure and say, write no profile.")
    ] = False,
) -> None:
    """Find the settings with which a model decodes fastest here, and write them beside it.

    Tries depths, sizes of the draft vocabulary, ways to roll back and threads for drafting. No
    drafting is tried, too, and chosen unless drafting is at least 3 % faster. MODEL.mtp.toml is
    then used by `generate`, `serve` and MTPLlama, on this machine and for this file.

    **Example**

    mtp-gguf tune model.gguf
    """
    kinds = parse_sets(prompts)
    own = [read_prompt(path) for path in prompt_file or []]
    path = profile_path(model)
    draft = open_model(model).head.draft
    if not dry_run:
        check_output(path, [model], overwrite=True)

    from mtp_gguf.native.bench.search import Space  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.native.bench.tune import TuneOptions, describe  # noqa: PLC0415
    from mtp_gguf.native.bench.tune import tune as search  # noqa: PLC0415

    used = threads or usable_cores()
    sizes = [0]
    if draft:
        sizes += [size for size in (draft.size // 2, draft.size // 4) if size]
        sizes += [-1] if draft.layout is DraftLayout.IDS else []
    fewer = sorted({used // 2, 1} - {0, used}, reverse=True)
    space = Space(tuple(range(1, max_depth + 1)), tuple(sizes), _ROLLBACKS, (0, *fewer))
    options = TuneOptions(
        space,
        kinds,
        own,
        tokens=tokens,
        rounds=rounds,
        threads=used,
        gpu_layers=gpu_layers,
        head=head,
    )
    with share_progress("tune") as progress:
        profile, found = search(model, options, progress)
    typer.echo(f"{printable(model.name)} on {profile.machine.cpu}, {profile.machine.device}")
    for candidate in found.tried[:_SHOWN]:
        times = candidate.tok_s / found.plain_tok_s
        typer.echo(f"{candidate.tok_s:8.1f} tok/s  {times:5.2f} x  {describe(candidate.settings)}")
    if found.settings.depth == 0:
        typer.echo(f"no drafting: the best drafting runs at {found.gain:.2f} times its speed")
    else:
        typer.echo(f"best: {describe(found.settings)}, {found.gain:.2f} times no drafting")
    if dry_run:
        return
    write_profile(path, profile)
    typer.echo(f"written: {path}")
