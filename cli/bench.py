"""`mtp-gguf bench`."""

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_gguf.bench.prompts import SETS, parse_sets, read_prompt
from mtp_gguf.bench.report.page import render_report
from mtp_gguf.gguf_tools.errors import MtpGgufError, OutputError, RequestError
from mtp_gguf.gguf_tools.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.model import whole_name
from mtp_gguf.gguf_tools.output import OutputFile, check_output, commit_all
from mtp_gguf.gguf_tools.profile import AUTO, MAX_DEPTH
from mtp_gguf.gguf_tools.system import LARGEST_CONTEXT, usable_cores
from mtp_gguf.server.find import LlamaServer, ask, find_server
from mtp_gguf.server.model import open_model

from .bench_table import bench_table, plan_lines, stopped_line
from .options import AnswerTokens, Budget, parse_budget
from .progress import printable, reports_errors, share_progress

if TYPE_CHECKING:
    from mtp_gguf.bench.plan import Plan
    from mtp_gguf.bench.result import BenchResult

_DEPTHS = "0,1,2,3,4,6,auto"


@reports_errors
def bench(
    model: Annotated[Path, typer.Argument(help="GGUF file with an MTP head.")],
    prompts: Annotated[
        str, typer.Option(help=f"Built-in prompts to write on from: {', '.join(SETS)}.")
    ] = ",".join(SETS),
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A prompt of yours; may be given several times.")
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(help="Tokens drafted in each cycle. Without: 0,1,2,3,4,6,auto."),
    ] = None,
    fastmtp_sizes: Annotated[
        str | None,
        typer.Option(help="Rows of the draft vocabulary to compare; -1: no list. none: do not."),
    ] = None,
    ctx: Annotated[str, typer.Option("--ctx", help="Tokens before the prompts: 0,4k,16k.")] = "0",
    budget: Budget = "5m",
    full: Annotated[
        bool, typer.Option("--full", help="Measure everything, however long that takes.")
    ] = False,
    tokens: AnswerTokens = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Of everything. Without: what fits.")
    ] = None,
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
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Folder for bench.json and report.html. Without: a new one here, MODEL.bench.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier bench wrote.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the JSON, no table; write nothing without -o.")
    ] = False,
) -> None:
    """Measure what drafting gains on this machine, and name the bottleneck.

    A probe of a few seconds estimates how long each measurement takes; lower-priority ones are
    skipped to fit the budget. Then the costs of batches, drafts and prompts are measured, and texts
    at every depth, interleaved with llama-server. The results are written after each part; Ctrl-C
    ends the benchmark and keeps them.

    **Examples**

    mtp-gguf bench model.gguf

    mtp-gguf bench model.gguf --budget 1m --prompts code,chat

    mtp-gguf bench model.gguf --full -o results
    """
    kinds = parse_sets(prompts)
    wanted = parse_depths(depths or _DEPTHS)
    contexts = parse_contexts(ctx)
    seconds = None if full else parse_budget(budget)
    own = {printable(path.name): read_prompt(path) for path in prompt_file or []}
    sizes = _sizes(fastmtp_sizes, model)
    files = _Files(_new_folder(model) if output is None and not as_json else output)
    files.check(model, overwrite)

    from mtp_gguf.bench.options import BenchOptions  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.bench.run import Watcher, run_bench  # noqa: PLC0415
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415

    tell_crashes()

    options = BenchOptions(
        budget=seconds,
        kinds=kinds,
        own=own,
        depths=wanted,
        depths_asked=depths is not None,
        sizes=sizes,
        sizes_asked=fastmtp_sizes is not None,
        contexts=contexts,
        tokens=tokens,
        rounds=rounds,
        threads=threads or usable_cores(),
        gpu_layers=gpu_layers,
        head=head,
        servers=[] if no_server else find_servers(llama_server),
        servers_asked=bool(llama_server),
    )

    def planned(plan: "Plan") -> None:
        files.make()
        for line in plan_lines(plan, seconds):
            typer.echo(line, err=True)

    try:
        with share_progress("bench") as progress:
            result = run_bench(model, options, Watcher(progress, planned, files.write))
    except MtpGgufError as error:
        raise type(error)(f"{error}{files.what_stays()}") from None
    if as_json:
        typer.echo(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        for line in bench_table(result):
            typer.echo(line)
        for path in files.paths:
            typer.echo(f"written: {path}")
    if result.state == "stopped":
        typer.echo(f"mtp-gguf: interrupted; {stopped_line(result)}", err=True)
        raise typer.Exit(1)


class _Files:
    """bench.json and report.html of a bench, written anew after each part, both or neither."""

    def __init__(self, folder: Path | None) -> None:
        """folder: None writes nothing."""
        self._folder = folder
        self.paths = () if folder is None else (folder / "bench.json", folder / "report.html")
        self._written = False

    def check(self, model: Path, overwrite: bool) -> None:
        """OutputError where they could not be written, or would replace others unasked."""
        if self._folder is None:
            return
        if not self._folder.exists():
            check_output(self._folder, [model], overwrite)
        elif not self._folder.is_dir():
            raise OutputError(f"{self._folder}: expected a folder, found a file; name another one")
        else:
            for path in self.paths:
                check_output(path, [model], overwrite)

    def make(self) -> None:
        """The folder, once there will be something to put into it."""
        if self._folder is not None:
            try:
                self._folder.mkdir(exist_ok=True)
            except OSError as error:
                raise OutputError(
                    f"{self._folder}: cannot be made: {error.strerror}; name another with -o"
                ) from None

    def write(self, result: "BenchResult") -> None:
        """Both files, in place of those of an earlier part."""
        if not self.paths:
            return
        text = json.dumps(result.to_json(), indent=1, ensure_ascii=False)
        raws = [f"{text}\n".encode(), render_report(result).encode()]
        with ExitStack() as stack:
            outputs = []
            for path, raw in zip(self.paths, raws, strict=True):
                out = stack.enter_context(OutputFile(path, len(raw)))
                out.write(0, raw)
                outputs.append(out)
            commit_all(outputs)
        self._written = True

    def what_stays(self) -> str:
        """For the end of an error's sentence."""
        return f"; what was measured before is in {self._folder}" if self._written else ""


def _new_folder(model: Path) -> Path:
    """`MODEL.bench` in the working directory, numbered where there is one already."""
    stem = Path(whole_name(model)).stem
    names = (f"{stem}.bench" if i == 1 else f"{stem}.bench-{i}" for i in count(1))
    return next(path for path in map(Path, names) if not path.exists())


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
        if not (digits.isascii() and digits.isdigit()) or int(digits) * factor > LARGEST_CONTEXT:
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
