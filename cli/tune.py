"""`mtp-gguf tune`."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_gguf.bench.prompts import ALL_SETS, parse_sets, read_prompt
from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.gguf_tools.files.output import OutputFile, check_output
from mtp_gguf.gguf_tools.machine.processors import computing_threads
from mtp_gguf.gguf_tools.machine.text import printable
from mtp_gguf.gguf_tools.profile import (
    LARGEST_PROFILE,
    ROLLBACKS,
    profile_path,
    write_profile,
)
from mtp_gguf.server.find import ask, find_server
from mtp_gguf.server.model import open_model

from . import options
from .bench_table import plan_lines
from .info import say_note
from .local_model import local_model
from .progress import INTERRUPTED, reports_errors, say, share_progress

if TYPE_CHECKING:
    from mtp_gguf.bench.plan import Plan
    from mtp_gguf.bench.tune import TuneResult

_SHOWN = 8  # candidates


@reports_errors
def tune(
    model: options.ModelName,
    prompts: options.PromptSets = ALL_SETS,
    prompt_file: options.PromptFiles = None,
    max_depth: Annotated[
        int, typer.Option(min=1, max=8, help="Try drafts of at most N tokens.")
    ] = 5,
    budget: options.Budget = None,
    full: options.Full = False,
    tokens: options.AnswerTokens = None,
    rounds: options.Rounds = None,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = 0,
    head: options.HeadFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure and report; write no profile.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Find the fastest settings for a model here, and store them beside it.

    Compares depths, draft vocabulary sizes, rollback modes and numbers of drafting threads with
    decoding without drafts, which is chosen unless drafting is at least 3 % faster. `generate`,
    `serve` and MTPLlama then use MODEL.mtp.toml, on this machine, for this file and for the kernels
    (stock or patches/) that were measured; it has one profile for each. A result that was measured
    while other programs used the processors, or that is impossible, is not stored. Ctrl-C shows the
    results so far. Both leave an earlier profile unchanged.

    **Examples**

    mtp-gguf tune model.gguf

    mtp-gguf tune model.gguf --budget 2m --dry-run
    """
    with options.usage_of("--prompts"):
        kinds = parse_sets(prompts)
    seconds = options.parse_budget(budget, full)
    own = [read_prompt(path) for path in prompt_file or []]
    found = local_model(model, head)
    path = profile_path(found.path)
    drafting = open_model(found.head or found.path)
    in_use = drafting.head.in_use
    if not dry_run:
        check_output(path, [found.path], overwrite=True)
        with OutputFile(path, LARGEST_PROFILE):  # fail now, not after minutes of measuring
            pass

    from mtp_gguf.bench.search import Space  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.bench.tune import LABELS, TuneOptions, describe  # noqa: PLC0415
    from mtp_gguf.bench.tune import tune as search  # noqa: PLC0415
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415
    from mtp_gguf.native.libraries.replay import replays  # noqa: PLC0415

    tell_crashes()
    say_note()
    _note_other_kernels(model)
    gpu_layers = options.usable_gpu_layers(gpu_layers)
    used = threads or computing_threads()
    sizes = [0, *(in_use.other_sizes if in_use else ())]
    fewer = sorted({used // 2, 1} - {0, used}, reverse=True)
    # Replay is always the cheapest: the other modes copy states, and decode again.
    rollbacks = ROLLBACKS[:1] if replays(drafting.architecture, gpu_layers) else ROLLBACKS
    space = Space(tuple(range(1, max_depth + 1)), tuple(sizes), rollbacks, (0, *fewer))
    tasks = TuneOptions(
        space,
        seconds,
        kinds,
        own,
        tokens=tokens,
        rounds=rounds,
        threads=used,
        gpu_layers=gpu_layers,
        head=found.head,
    )

    def planned(plan: "Plan") -> None:
        for line in plan_lines(plan, seconds):
            say(line)

    with share_progress("tune") as progress:
        tuned = search(found.path, tasks, progress, planned)
    best = tuned.search
    writes = not (dry_run or tuned.warnings)
    if tuned.profile and writes:  # before printing, since the pipe may be closed
        write_profile(path, tuned.profile)
    if as_json:
        typer.echo(json.dumps(_fields(tuned, path if writes else None), indent=1))
        if tuned.profile is None:
            raise typer.Exit(INTERRUPTED)
        return
    if tuned.profile is not None:
        on = tuned.profile.machine
        typer.echo(f"{printable(found.path.name)} on {on.cpu}, {on.device}, kernels: {on.kernels}")
    for candidate in best.tried[:_SHOWN]:
        times = candidate.tok_s / best.plain_tok_s
        typer.echo(f"{candidate.tok_s:8.1f} tok/s  {times:5.2f} x  {describe(candidate.settings)}")
    if best.settings.depth == 0:
        typer.echo(f"no drafting: the best drafting runs at {best.gain:.2f} times its speed")
    else:
        typer.echo(f"best: {describe(best.settings)}, {best.gain:.2f} times no drafting")
    for name in tuned.skipped:
        typer.echo(f"skipped to fit the budget (--budget, --full): {LABELS[name]}")
    if tuned.profile is None:
        typer.echo("mtp-gguf: interrupted; no profile was written", err=True)
        raise typer.Exit(INTERRUPTED)
    for warning in tuned.warnings:
        typer.echo(f"mtp-gguf: {warning}", err=True)
    if writes:
        typer.echo(f"written: {path}")
    elif not dry_run:
        typer.echo("mtp-gguf: no profile was written, since the result is unreliable", err=True)


def _note_other_kernels(model: str) -> None:
    """Say so if `serve` runs other kernels than this measures."""
    from mtp_gguf.native.libraries.exact import kernels  # noqa: PLC0415  (loads llama.cpp)

    with suppress(ServerError):  # no server answers; `serve` says why
        server = ask(find_server(None))
        if server.kernels != kernels():
            typer.echo(
                f"mtp-gguf: this measures {kernels()} kernels; `serve {printable(model)}` runs "
                f"{server.kernels} kernels ({server.path}) and will not use the result",
                err=True,
            )


def _fields(tuned: "TuneResult", path: Path | None) -> dict[str, Any]:
    """Return the result for --json. path: of the profile; None if it is not written."""
    found = tuned.search
    return {
        "profile": str(path) if tuned.profile is not None and path is not None else None,
        "machine": asdict(tuned.profile.machine) if tuned.profile is not None else None,
        "settings": asdict(found.settings),
        "gain": found.gain,
        "plain_tok_s": found.plain_tok_s,
        "tried": [
            {"tok_s": candidate.tok_s, "settings": asdict(candidate.settings)}
            for candidate in found.tried
        ],
        "skipped": list(tuned.skipped),
        "interrupted": tuned.profile is None,
        "warnings": list(tuned.warnings),
    }
