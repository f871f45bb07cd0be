"""`mtp-gguf tune`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_gguf.bench.prompts import SETS, parse_sets, read_prompt
from mtp_gguf.gguf_tools.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.output import OutputFile, check_output
from mtp_gguf.gguf_tools.profile import LARGEST_PROFILE, profile_path, write_profile
from mtp_gguf.gguf_tools.system import usable_cores
from mtp_gguf.server.model import open_model

from .bench_table import plan_lines
from .options import AnswerTokens, Budget, parse_budget
from .progress import printable, reports_errors, share_progress

if TYPE_CHECKING:
    from mtp_gguf.bench.plan import Plan

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
    budget: Budget = "5m",
    full: Annotated[
        bool, typer.Option("--full", help="Try everything, however long that takes.")
    ] = False,
    tokens: AnswerTokens = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Of each comparison. Without: what fits."),
    ] = None,
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
    then used by `generate`, `serve` and MTPLlama, on this machine and for this file. Ctrl-C shows
    what was found and leaves an earlier profile as it was.

    **Examples**

    mtp-gguf tune model.gguf

    mtp-gguf tune model.gguf --budget 2m --dry-run
    """
    kinds = parse_sets(prompts)
    seconds = None if full else parse_budget(budget)
    own = [read_prompt(path) for path in prompt_file or []]
    path = profile_path(model)
    draft = open_model(model).head.draft
    if not dry_run:
        check_output(path, [model], overwrite=True)
        with OutputFile(path, LARGEST_PROFILE):  # before minutes are spent on what cannot be kept
            pass

    from mtp_gguf.bench.search import Space  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.bench.tune import LABELS, TuneOptions, describe  # noqa: PLC0415
    from mtp_gguf.bench.tune import tune as search  # noqa: PLC0415
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415
    from mtp_gguf.native.replay import replays  # noqa: PLC0415

    tell_crashes()

    used = threads or usable_cores()
    sizes = [0]
    if draft:
        sizes += [size for size in (draft.size // 2, draft.size // 4) if size]
        sizes += [-1] if draft.layout is DraftLayout.IDS else []
    fewer = sorted({used // 2, 1} - {0, used}, reverse=True)
    # A log costs no more than what the other ways save: they copy states, and decode again.
    rollbacks = _ROLLBACKS[:1] if replays(gpu_layers) else _ROLLBACKS
    space = Space(tuple(range(1, max_depth + 1)), tuple(sizes), rollbacks, (0, *fewer))
    options = TuneOptions(
        space,
        seconds,
        kinds,
        own,
        tokens=tokens,
        rounds=rounds,
        threads=used,
        gpu_layers=gpu_layers,
        head=head,
    )

    def planned(plan: "Plan") -> None:
        for line in plan_lines(plan, seconds):
            typer.echo(line, err=True)

    with share_progress("tune") as progress:
        tuned = search(model, options, progress, planned)
    found = tuned.search
    if tuned.profile and not dry_run:  # before anything is printed: a pipe may be closed
        write_profile(path, tuned.profile)
    if tuned.profile is not None:
        on = tuned.profile.machine
        typer.echo(f"{printable(model.name)} on {on.cpu}, {on.device}, kernels: {on.kernels}")
    for candidate in found.tried[:_SHOWN]:
        times = candidate.tok_s / found.plain_tok_s
        typer.echo(f"{candidate.tok_s:8.1f} tok/s  {times:5.2f} x  {describe(candidate.settings)}")
    if found.settings.depth == 0:
        typer.echo(f"no drafting: the best drafting runs at {found.gain:.2f} times its speed")
    else:
        typer.echo(f"best: {describe(found.settings)}, {found.gain:.2f} times no drafting")
    for name in tuned.skipped:
        typer.echo(f"skipped to fit the budget (--budget, --full): {LABELS[name]}")
    if tuned.profile is None:
        typer.echo("mtp-gguf: interrupted; no profile was written", err=True)
        raise typer.Exit(1)
    if not dry_run:
        typer.echo(f"written: {path}")
