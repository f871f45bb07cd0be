"""`mtp-gguf bench`."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mtp_gguf.native.bench.prompts import SETS, parse_sets, read_prompt

from ..errors import MtpGgufError, RequestError
from ..fastmtp import DraftLayout
from ..machine import usable_cores
from ..output import OutputFile, check_output
from ..profile import AUTO, MAX_DEPTH
from ..server.find import LlamaServer, ask, find_server
from ..server.model import open_model
from .bench_table import bench_table
from .console import printable, reports_errors
from .share_progress import share_progress

_LARGEST_CONTEXT = 1 << 20


@reports_errors
def bench(
    model: Annotated[Path, typer.Argument(help="GGUF file with an MTP head.")],
    prompts: Annotated[
        str, typer.Option(help=f"Built-in prompts to write on from: {', '.join(SETS)}.")
    ] = ",".join(SETS),
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A prompt of yours; may be given several times.")
    ] = None,
    depths: Annotated[str, typer.Option(help="Tokens drafted in each cycle.")] = "0,1,2,3,4,6,auto",
    fastmtp_sizes: Annotated[
        str | None,
        typer.Option(help="Rows of the draft vocabulary to compare; -1: no list. none: do not."),
    ] = None,
    ctx: Annotated[str, typer.Option("--ctx", help="Tokens before the prompts: 0,4k,16k.")] = "0",
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=2, help="Of each answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    threads: Annotated[
        int | None, typer.Option("-t", "--threads", min=1, help="CPU threads. Without: all cores.")
    ] = None,
    gpu_layers: Annotated[int, typer.Option("-ngl", help="Layers on the GPU; -1: all.")] = 0,
    head: Annotated[Path | None, typer.Option(help="Another GGUF to take the head from.")] = None,
    llama_server: Annotated[
        list[Path] | None,
        typer.Option(help="A llama-server to compare with. Without: ours and the PATH's."),
    ] = None,
    no_server: Annotated[
        bool, typer.Option("--no-server", help="Do not compare with llama-server.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="One prompt of each kind, short answers, no server.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Folder for bench.json and report.html."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier bench wrote.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON, no table.")] = False,
) -> None:
    """Measure how a model drafts on this machine, and say what holds it back.

    Costs of trunk batches, drafts, rollback and prompts; then real texts at every depth, all sides
    in turn. Prints a table; writes bench.json and a report.html with -o.

    **Examples**

    mtp-gguf bench model.gguf --prompts code,chat,prose -o results

    mtp-gguf bench model.gguf --quick
    """
    kinds = parse_sets(prompts)
    wanted = parse_depths(depths)
    contexts = parse_contexts(ctx)
    own = {printable(path.name): read_prompt(path) for path in prompt_file or []}
    sizes = _sizes(fastmtp_sizes, model)
    if output and not output.exists():
        check_output(output, [model], overwrite)
    for path in _outputs(output) if output and output.exists() else ():
        check_output(path, [model], overwrite)

    from mtp_gguf.native.bench.run import BenchOptions, run_bench  # noqa: PLC0415  (loads llama.cpp)

    servers = [] if no_server or quick else find_servers(llama_server)
    if quick:
        tokens, rounds = min(tokens, 48), min(rounds, 2)
        wanted = [d for d in wanted if d == AUTO or int(d) <= 3]
        sizes = []
    options = BenchOptions(
        kinds=kinds,
        own=own,
        depths=wanted,
        sizes=sizes,
        contexts=contexts,
        tokens=tokens,
        rounds=rounds,
        prompts_per_kind=1 if quick else 3,
        threads=threads or usable_cores(),
        gpu_layers=gpu_layers,
        head=head,
        servers=servers,
    )
    with share_progress("bench") as progress:
        result = run_bench(model, options, progress)
    record = result.to_json()
    if output:
        from ..report.page import render_report  # noqa: PLC0415

        output.mkdir(exist_ok=True)
        data, page = _outputs(output)
        write_text(data, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        write_text(page, render_report(json.loads(json.dumps(record))))
    if as_json:
        typer.echo(json.dumps(record, ensure_ascii=False))
        return
    for line in bench_table(result):
        typer.echo(line)
    for path in _outputs(output):
        typer.echo(f"written: {path}")


def parse_depths(text: str) -> list[int | str]:
    """`0,1,2,auto` as depths; RequestError for what is none."""
    out: list[int | str] = []
    for part in text.split(","):
        word = part.strip()
        if word != AUTO and not (word.isascii() and word.isdigit() and int(word) <= MAX_DEPTH):
            raise RequestError(f"--depths: expected 0 to {MAX_DEPTH} or auto, found {word!r}")
        depth: int | str = word if word == AUTO else int(word)
        if depth not in out:
            out.append(depth)
    return out


def parse_contexts(text: str) -> list[int]:
    """`0,4k` as numbers of tokens; RequestError for what is none."""
    out = []
    for part in text.split(","):
        word = part.strip().lower()
        digits, factor = (word[:-1], 1024) if word.endswith("k") else (word, 1)
        if not (digits.isascii() and digits.isdigit()) or int(digits) * factor > _LARGEST_CONTEXT:
            raise RequestError(f"--ctx: expected numbers of tokens such as 0,4k; found {word!r}")
        out.append(int(digits) * factor)
    return list(dict.fromkeys(out))


def find_servers(named: Sequence[Path] | None) -> list[LlamaServer]:
    """The servers to compare with: those named, else ours and the PATH's as far as they answer."""
    if named:
        return [ask(find_server(path)) for path in named]
    found: dict[Path, LlamaServer] = {}
    on_path = shutil.which("llama-server")
    for path in (None, Path(on_path) if on_path else None):
        try:
            server = ask(find_server(path))
        except MtpGgufError:
            continue
        found[server.path.resolve()] = server
    return list(found.values())


def _sizes(text: str | None, model: Path) -> list[int]:
    """Sizes to compare. Without a word: a half and a quarter of the list, and no list."""
    if text == "none":
        return []
    if text is None:
        draft = open_model(model).head.draft
        if draft is None:
            return []
        shorter = [size for size in (draft.size // 2, draft.size // 4) if size]
        return shorter + ([-1] if draft.layout is DraftLayout.IDS else [])
    out = []
    for part in text.split(","):
        word = part.strip()
        digits = word.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()) or (word != "-1" and int(word) < 1):
            raise RequestError(f"--fastmtp-sizes: expected numbers or -1, found {word!r}")
        out.append(int(word))
    return list(dict.fromkeys(out))


def _outputs(folder: Path | None) -> tuple[Path, ...]:
    return () if folder is None else (folder / "bench.json", folder / "report.html")


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    raw = text.encode()
    with OutputFile(path, len(raw)) as out:
        out.write(0, raw)
        out.commit()
