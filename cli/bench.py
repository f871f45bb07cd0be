"""`mtp-gguf bench`."""

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_gguf.bench.prompts import ALL_SETS, parse_sets, read_prompt
from mtp_gguf.bench.report.page import render_report
from mtp_gguf.bench.result import LOOKUP, NAMED
from mtp_gguf.gguf_tools.errors import MtpGgufError, OutputError, RequestError
from mtp_gguf.gguf_tools.files.output import OutputFile, check_output, commit_all
from mtp_gguf.gguf_tools.machine.processors import computing_threads
from mtp_gguf.gguf_tools.machine.system import LARGEST_CONTEXT
from mtp_gguf.gguf_tools.machine.text import printable, utf8_bytes
from mtp_gguf.gguf_tools.model import whole_name
from mtp_gguf.gguf_tools.profile import MAX_DEPTH
from mtp_gguf.server.find import LlamaServer, ask, find_server
from mtp_gguf.server.model import open_model

from . import options
from .bench_table import bench_table, markdown, plan_lines, stopped_line
from .info import say_note
from .local_model import local_model
from .progress import INTERRUPTED, reports_errors, say, share_progress

if TYPE_CHECKING:
    from mtp_gguf.bench.plan import Plan
    from mtp_gguf.bench.result import BenchResult

_DEPTHS = "0,1,2,3,4,6,auto,lookup,auto+lookup"
_DEPTHS_WITHOUT_HEAD = f"0,{LOOKUP}"


@reports_errors
def bench(
    model: options.ModelName,
    prompts: options.PromptSets = ALL_SETS,
    prompt_file: options.PromptFiles = None,
    depths: Annotated[
        str | None,
        typer.Option(
            metavar="N,…",
            help=f"Measure at these depths (default: {_DEPTHS}; without a head: "
            f"{_DEPTHS_WITHOUT_HEAD}).",
        ),
    ] = None,
    fastmtp_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,…",
            help="Compare draft vocabularies of N rows, -1: no list; none: skip (default: a half "
            "and a quarter of the list, and no list).",
        ),
    ] = None,
    ctx: Annotated[
        str, typer.Option("-c", "--ctx", metavar="N,…", help="Measure after N tokens of context.")
    ] = "0",
    budget: options.Budget = None,
    full: options.Full = False,
    tokens: options.AnswerTokens = None,
    rounds: options.Rounds = None,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = 0,
    head: options.HeadFile = None,
    llama_server: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Compare with this llama-server; repeatable (default: of build-server and PATH).",
        ),
    ] = None,
    no_server: Annotated[
        bool, typer.Option("--no-server", help="Do not compare with llama-server.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write bench.json and report.html to this folder (default: a new one, "
            "MODEL.bench).",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of an earlier bench.")
    ] = False,
    as_markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", help="Print a Markdown table of each setting beside no drafting instead."
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object, also for an error; write no files without -o."
        ),
    ] = False,
) -> None:
    """Measure what drafting gains on this machine, and name the bottleneck.

    A probe of a few seconds estimates how long each measurement takes; lower-priority ones are
    skipped to fit the budget. Then the costs of batches, drafts and prompts are measured, and texts
    at every depth, interleaved with llama-server. The results are written after each part; Ctrl-C
    ends the benchmark and keeps them. A model without a head drafts from its text alone.

    **Examples**

    mtp-gguf bench model.gguf

    mtp-gguf bench model.gguf --budget 1m --prompts code,chat

    mtp-gguf bench model.gguf --full -o results
    """
    with options.usage_of("--prompts"):
        kinds = parse_sets(prompts)
    with options.usage_of("--depths"):
        asked = None if depths is None else parse_depths(depths)
    with options.usage_of("--ctx"):
        contexts = parse_contexts(ctx)
    if as_json and as_markdown:
        raise typer.BadParameter("--json and --markdown contradict each other")
    if no_server and llama_server:
        raise typer.BadParameter("--no-server and --llama-server contradict each other")
    seconds = options.parse_budget(budget, full)
    own = {printable(path.name): read_prompt(path) for path in prompt_file or []}
    with options.usage_of("--fastmtp-sizes"):
        wanted_sizes = None if fastmtp_sizes is None else parse_sizes(fastmtp_sizes)
    found = local_model(model, head)
    report = open_model(found.head or found.path).head
    drafts, in_use = report.ready or head is not None, report.in_use
    if not drafts:
        for depth in [depth for depth in asked or () if depth not in (0, LOOKUP)]:
            raise RequestError(
                f"{model}: {report.reason}; --depths: expected 0 or {LOOKUP}, found {depth}"
            )
        if wanted_sizes:
            raise RequestError(f"{model}: {report.reason}; leave --fastmtp-sizes out")
    wanted = asked or parse_depths(_DEPTHS if drafts else _DEPTHS_WITHOUT_HEAD)
    sizes = wanted_sizes
    if sizes is None:
        sizes = in_use.other_sizes if in_use else []
    files = _Files(_new_folder(found.path) if output is None and not as_json else output)
    files.check(found.path, overwrite)

    from mtp_gguf.bench.options import SERVER_DEPTHS, BenchOptions  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.bench.run import Watcher, run_bench  # noqa: PLC0415
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415

    tell_crashes()

    say_note()
    gpu_layers = options.usable_gpu_layers(gpu_layers)
    tasks = BenchOptions(
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
        threads=threads or computing_threads(),
        gpu_layers=gpu_layers,
        head=found.head,
        servers=[] if no_server else find_servers(llama_server),
        servers_asked=bool(llama_server),
        server_depths=SERVER_DEPTHS if drafts else (0,),
        drafts=drafts,
    )

    def planned(plan: "Plan") -> None:
        files.make()
        if not drafts:
            say(f"{printable(model)}: {report.reason}; drafting only from the text")
        if in_use:
            say(f"draft vocabulary: {in_use.text}")
        for line in plan_lines(plan, seconds):
            say(line)

    try:
        with share_progress("bench") as progress:
            result = run_bench(found.path, tasks, Watcher(progress, planned, files.write))
    except MtpGgufError as error:
        raise type(error)(f"{error}{files.what_stays()}") from None
    if as_json:
        typer.echo(utf8_bytes(json.dumps(result.to_json(), ensure_ascii=False)).decode())
    else:
        for line in markdown(result) if as_markdown else bench_table(result):
            typer.echo(line)
        for path in files.paths:
            typer.echo(f"written: {path}", err=as_markdown)
    if result.state == "stopped":
        typer.echo(f"mtp-gguf: interrupted; {stopped_line(result)}", err=True)
        raise typer.Exit(INTERRUPTED)


class _Files:
    """bench.json and report.html, rewritten after each part, both or neither."""

    def __init__(self, folder: Path | None) -> None:
        """folder: if None, nothing is written."""
        self._folder = folder
        self.paths = () if folder is None else (folder / "bench.json", folder / "report.html")
        self._written = False

    def check(self, model: Path, overwrite: bool) -> None:
        """OutputError if they cannot be written, or would replace others without --overwrite."""
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
        """Create the folder, just before the first results."""
        if self._folder is not None:
            try:
                self._folder.mkdir(exist_ok=True)
            except OSError as error:
                raise OutputError(
                    f"{self._folder}: cannot be created: {error.strerror}; name another with -o"
                ) from None

    def write(self, result: "BenchResult") -> None:
        """Write both files in place of those of an earlier part."""
        if not self.paths:
            return
        text = json.dumps(result.to_json(), indent=1, ensure_ascii=False)
        raws = [utf8_bytes(f"{text}\n"), utf8_bytes(render_report(result))]
        with ExitStack() as stack:
            outputs = []
            for path, raw in zip(self.paths, raws, strict=True):
                out = stack.enter_context(OutputFile(path, len(raw)))
                out.write(0, raw)
                outputs.append(out)
            commit_all(outputs)
        self._written = True

    def what_stays(self) -> str:
        """Return the end of an error's sentence: where earlier results are."""
        return f"; what was measured before is in {self._folder}" if self._written else ""


def _new_folder(model: Path) -> Path:
    """Return `MODEL.bench` in the working directory, with a number if it exists already."""
    stem = Path(whole_name(model)).stem
    names = (f"{stem}.bench" if i == 1 else f"{stem}.bench-{i}" for i in count(1))
    return next(path for path in map(Path, names) if not path.exists())


def parse_depths(text: str) -> list[int | str]:
    """Parse depths such as `0,1,2,auto,lookup`; RequestError for anything else."""
    out: list[int | str] = []
    for part in text.split(","):
        word = part.strip()
        if word not in NAMED and not (word.isascii() and word.isdigit() and int(word) <= MAX_DEPTH):
            raise RequestError(
                f"--depths: expected 0 to {MAX_DEPTH}, {', '.join(NAMED[:-1])} or {NAMED[-1]}, "
                f"found {word!r}"
            )
        depth: int | str = word if word in NAMED else int(word)
        if depth not in out:
            out.append(depth)
    return out


def parse_contexts(text: str) -> list[int]:
    """Parse numbers of tokens such as `0,4k`; RequestError for anything else."""
    out = []
    for part in text.split(","):
        word = part.strip().lower()
        digits, factor = (word[:-1], 1024) if word.endswith("k") else (word, 1)
        if not (digits.isascii() and digits.isdigit()) or int(digits) * factor > LARGEST_CONTEXT:
            raise RequestError(f"--ctx: expected numbers of tokens such as 0,4k; found {word!r}")
        out.append(int(digits) * factor)
    return list(dict.fromkeys(out))


def find_servers(named: Sequence[Path] | None) -> list[LlamaServer]:
    """Return the servers to compare with: those named, else those found that answer."""
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


def parse_sizes(text: str) -> list[int]:
    """Parse sizes such as `256,128,-1`, or `none`; RequestError for anything else."""
    if text == "none":
        return []
    out = []
    for part in text.split(","):
        word = part.strip()
        digits = word.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()) or (word != "-1" and int(word) < 1):
            raise RequestError(f"--fastmtp-sizes: expected numbers or -1, found {word!r}")
        out.append(int(word))
    return list(dict.fromkeys(out))
