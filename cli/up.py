"""`mtp-gguf up`."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO, TextIOBase
from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_gguf.convert.options import DEFAULT_QUANT, DraftOptions
from mtp_gguf.convert.plans.serving_plan import Asked, Step, StepName, headline, make_plan
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.machine.text import printable

from .local_model import local_model
from .options import (
    AsJson,
    FastMtp,
    FastMtpCorpus,
    Host,
    Passed,
    Port,
    check_passed,
    output_option,
    parse_budget,
)
from .progress import reports_errors
from .serve import CommandClass as ServeClass

_BUDGET = "1m"

CommandClass = ServeClass  # for an unknown option, it explains how to pass it to llama-server


@reports_errors
def up(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint or GGUF, local or on the hub (OWNER/NAME, OWNER/NAME:QUANT).",
        ),
    ],
    passed: Passed = None,
    output: Annotated[
        Path | None,
        output_option("Write a converted or grafted GGUF to this file or folder (default: here)."),
    ] = None,
    quant: Annotated[
        str, typer.Option("--quant", metavar="MIX", help="Convert a checkpoint to this mix.")
    ] = DEFAULT_QUANT,
    fastmtp: FastMtp = None,
    fastmtp_corpus: FastMtpCorpus = None,
    original: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Take a missing head from this model (default: the base model that the file or "
            "its card names).",
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option("--budget", metavar="TIME", help="Tune about this long, such as 30s or 5m."),
    ] = _BUDGET,
    skip: Annotated[
        list[StepName] | None, typer.Option("--skip", help="Leave this step out; repeatable.")
    ] = None,
    llama_server: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run this server (default: as `mtp-gguf serve`)."),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the steps; read only names and headers.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a model ready and serve it, in one command.

    Downloads a GGUF, or converts a checkpoint with its MTP head; adds a missing head from the
    original model, if that is known; tunes the draft settings; builds llama-server if there is
    none; serves, and prints the URL and an example. Each step is one command, is announced with its
    size and time, and is left out if it was done before: after Ctrl-C or an error, the same command
    continues.

    **Examples**

    mtp-gguf up OWNER/NAME:Q4_K_M --dry-run

    mtp-gguf up Qwen/Qwen3.5-4B --fastmtp-corpus notes/*.txt

    mtp-gguf up model.gguf --skip tune --port 9000 -- -c 32768
    """
    check_passed(passed)
    from mtp_gguf.convert.plans.precision import FILE_TYPES, unknown_name  # noqa: PLC0415  (slow)

    if quant.upper() not in FILE_TYPES:
        raise typer.BadParameter(unknown_name(quant, FILE_TYPES), param_hint="--quant")
    draft = DraftOptions.parse(fastmtp, fastmtp_corpus, None)
    asked = Asked(
        model=model,
        output=output,
        quant=quant.upper(),
        draft=_draft_words(draft),
        original=original,
        skip=frozenset(skip or ()),
        budget=budget,
        seconds=parse_budget(budget, full=False) or 0.0,
        host=host,
        port=port,
        llama_server=llama_server,
        passed=tuple(passed or ()),
    )
    steps = make_plan(asked)
    fields = _fields(model, steps)
    if dry_run and as_json:
        typer.echo(json.dumps(fields, indent=1))
        return
    for line in (headline(model, steps), *_plan_lines(steps)):
        typer.echo(printable(line), err=not dry_run)
    if not dry_run:
        _run_all([step for step in steps if not step.done], fields, as_json)


def _draft_words(draft: DraftOptions) -> tuple[str, ...]:
    """Return the options for a draft vocabulary, as `convert` and `graft` take them."""
    if not draft.wanted:
        return ()
    size = () if draft.size is None else (str(draft.size),)
    corpus = ("--fastmtp-corpus", *map(str, draft.corpus)) if draft.corpus else ()
    return ("--fastmtp", *size, *corpus)


def _fields(model: str, steps: Sequence[Step]) -> dict[str, Any]:
    """Return the plan for --json."""
    return {
        "model": model,
        "steps": [
            {
                "name": step.name.value,
                "command": step.command,
                "what": step.what,
                "bytes": step.nbytes,
                "seconds": step.seconds,
                "left_out": step.done or None,
            }
            for step in steps
        ],
    }


def _plan_lines(steps: Sequence[Step]) -> Iterator[str]:
    for number, step in enumerate(steps, 1):
        yield f"{number}. {step.text}"
        if not step.done:
            yield f"   $ {step.command}"


def _run_all(steps: Sequence[Step], fields: dict[str, Any], as_json: bool) -> None:
    """Run the steps one after the other, and stop at the first that fails."""
    for number, step in enumerate(steps, 1):
        typer.echo(f"\n[{number}/{len(steps)}] {printable(step.text)}", err=True)
        code = _run(step, fields, as_json)
        if code and step.name is not StepName.SERVE:
            typer.echo(
                f"mtp-gguf: stopped in the step {step.name.value}; the same command continues here",
                err=True,
            )
        if code:
            raise typer.Exit(code)
    if as_json and not any(step.name is StepName.SERVE for step in steps):
        typer.echo(json.dumps(fields | {"url": None}))


def _run(step: Step, fields: dict[str, Any], as_json: bool) -> int:
    """Run a step and return its exit code; with --json, print one object once it serves."""
    if step.name is StepName.DOWNLOAD:
        local_model(step.words[0])
        return 0
    from .app import app  # noqa: PLC0415  (the app imports this command)

    if not as_json:
        return app([*step.words], standalone_mode=False) or 0
    stdout = sys.stdout

    def ready(line: str) -> None:
        found = parse_json(line)
        merged = found if "error" in found else fields | {"url": found["url"]}
        print(json.dumps(merged), file=stdout, flush=True)

    words = [step.words[0], "--json", *step.words[1:]]
    printed = _Lines(ready) if step.name is StepName.SERVE else StringIO()
    with redirect_stdout(printed):
        code: int = app(words, standalone_mode=False) or 0
    if code and isinstance(printed, StringIO):  # the error, as JSON
        typer.echo(printed.getvalue(), nl=False)
    return code


class _Lines(TextIOBase):
    """A standard output that passes on each line as soon as it is complete."""

    def __init__(self, then: Callable[[str], None]) -> None:
        self._then = then
        self._line = ""

    def writable(self) -> bool:
        """Whether it can be written to."""
        return True

    def write(self, text: str) -> int:
        """Add to the current line."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line:
                self._then(line)
        return len(text)
