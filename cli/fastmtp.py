"""`mtp-gguf fastmtp`: draft vocabularies of finished files."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mtp_gguf.gguf_tools.draft_list import DraftList, list_faults, read_draft_list, required_ids
from mtp_gguf.gguf_tools.draft_rewrite import check_head, rewritten, with_list, without_list
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.format import Value
from mtp_gguf.gguf_tools.in_place import hide_list, replace_list
from mtp_gguf.gguf_tools.model import Model, open_model
from mtp_gguf.gguf_tools.output import check_output
from mtp_gguf.gguf_tools.rewrite import OutputSpec, write

from .options import DraftOptions
from .progress import byte_progress, printable, reports_errors
from .written import output_path, report_file, write_file

_SHOWN_TOKENS = 24

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", add_completion=False)


class CorpusCommand(TyperCommand):
    """A command whose `--corpus` may be followed by several files."""

    repeatable = "--corpus"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give each file after the option an option of its own."""
        given: list[str] = []
        open_end = False
        for arg in args:
            if open_end and given[-1] != self.repeatable and Path(arg).is_file():
                given.append(self.repeatable)
            open_end = arg == self.repeatable or (open_end and not arg.startswith("-"))
            given.append(arg)
        return super().parse_args(ctx, given)


class PromptsCommand(CorpusCommand):
    """The same for `--prompts`."""

    repeatable = "--prompts"


_Model = Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF with an MTP head (any shard).")]
_Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="File or folder to write to [MODEL-….gguf].")
]
_InPlace = Annotated[
    bool,
    typer.Option(
        "--in-place",
        help="Change MODEL itself: a list of the same length by some writes into its header, "
        "any other by a new file that takes its place when it is whole.",
    ),
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]


@app.callback()
def _fastmtp() -> None:
    """Add, calibrate, show or remove the FastMTP draft vocabulary of a GGUF.

    The list of tokens that the MTP head drafts from: a short list makes drafting cheap, a list
    that does not have your words makes it useless. `add` counts it on text that you give.
    """


@app.command("add", cls=CorpusCommand)
@reports_errors
def add(
    model: _Model,
    size: Annotated[
        int | None, typer.Option("-n", "--size", min=1, help="Number of tokens [32768].")
    ] = None,
    corpus: Annotated[
        list[Path] | None,
        typer.Option("--corpus", metavar="FILE…", help="Text files to rank tokens by."),
    ] = None,
    ids: Annotated[
        Path | None,
        typer.Option("--ids", metavar="FILE", help="Ranked ids: JSON, .npy or text."),
    ] = None,
    layout: Annotated[
        DraftLayout,
        typer.Option("--layout", help="ids: metadata; table, sidecar: rows of the output as well."),
    ] = DraftLayout.IDS,
    output: _Output = None,
    in_place: _InPlace = False,
    overwrite: _Overwrite = False,
) -> None:
    """Give a GGUF a draft vocabulary, or another one.

    Tokens are counted with the file's own tokenizer (llama.cpp's), so any text does; best is text
    like what the model will write. Without a corpus or a list the rank is the token's id.

    **Examples**

    mtp-gguf fastmtp add model.gguf --corpus src/*.py -o model-code.gguf

    mtp-gguf fastmtp add model.gguf --corpus notes.txt --in-place
    """
    options = DraftOptions.parse(size, corpus, ids)
    if in_place and (output is not None or layout is not DraftLayout.IDS):
        raise typer.BadParameter("--in-place goes with neither --output nor another layout")
    with open_model(model) as opened:
        check_head(opened)
        held = read_draft_list(opened)
        draft = options.ranked_for(opened)
        keys = draft.metadata(with_ids=True)
        if held:
            typer.echo(f"replaces a list of {len(held.ids)} tokens ({_about(held)})")
        typer.echo(f"{len(draft.ids)} tokens, {draft.source}")
        if draft.coverage:
            shares = (f"{n}: {share:.1%}" for n, share in draft.coverage.items())
            typer.echo(f"coverage of the corpus by size: {', '.join(shares)}")
        if in_place:
            target = model
            _change(opened, keys)
        else:
            pattern = "mtp-{}-FastMTP" if layout is DraftLayout.SIDECAR else "{}-FastMTP"
            target = output_path(output, model, pattern)
            sources = [*opened.paths, *options.files]
            write_file("fastmtp", with_list(opened, keys, layout), target, sources, overwrite)
    report_file(target)


@app.command("calibrate", cls=PromptsCommand)
@reports_errors
def calibrate(
    model: _Model,
    prompts: Annotated[
        list[Path],
        typer.Option("--prompts", metavar="FILE…", help="Prompts, with blank lines between them."),
    ],
    size: Annotated[
        int | None, typer.Option("-n", "--size", min=1, help="Number of tokens [32768].")
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Tokens to write for each prompt, at most.")
    ] = 512,
    temperature: Annotated[float, typer.Option("--temperature", min=0, max=10)] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, max=(1 << 32) - 2)] = 1,
    context: Annotated[int, typer.Option("--context", min=16, help="Positions.")] = 4096,
    gpu_layers: Annotated[int, typer.Option("-ngl", "--gpu-layers", help="As llama.cpp's.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts without the chat template.")] = False,
    output: _Output = None,
    in_place: _InPlace = False,
    overwrite: _Overwrite = False,
) -> None:
    """Give a GGUF a draft vocabulary counted on what the model itself writes.

    Drafts are guesses at the model's own words, so these are the best corpus there is. The model
    answers your prompts (llama.cpp, without drafting), its tokens are counted; those of the
    prompts and then the order of ids fill up the list. Some hundred thousand tokens make a good
    count for 32768.

    **Example**

    mtp-gguf fastmtp calibrate model.gguf --prompts questions.txt --tokens 1024 --in-place
    """
    from mtp_gguf.convert.gguf_draft import rank_by_own_output  # noqa: PLC0415  (NumPy)
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415
    from mtp_gguf.native.generate import Generation, generate  # noqa: PLC0415

    tell_crashes()

    if in_place and output is not None:
        raise typer.BadParameter("--in-place goes with no --output")
    texts = _prompts(prompts)
    settings = Generation(tokens, temperature, seed, context, not raw, gpu_layers)
    with open_model(model) as opened:
        check_head(opened)
        target = model if in_place else output_path(output, model, "{}-FastMTP")
        if not in_place:
            check_output(target, [*opened.paths, *prompts], overwrite)
        with byte_progress("write", len(texts) * tokens) as progress:
            answers = generate(opened.paths[0], texts, settings)
            draft = rank_by_own_output(opened, answers, size, progress)
        keys = draft.metadata(with_ids=True)
        shares = (f"{n}: {share:.1%}" for n, share in draft.coverage.items())
        typer.echo(f"{len(draft.ids)} tokens, {draft.source}; coverage {', '.join(shares)}")
        if in_place:
            _change(opened, keys)
        else:
            spec = with_list(opened, keys, DraftLayout.IDS)
            write_file("fastmtp", spec, target, [*opened.paths, *prompts], overwrite)
    report_file(target)


def _prompts(files: list[Path]) -> list[str]:
    """Paragraphs of the files; RequestError when there is none."""
    texts = []
    for path in files:
        try:
            paragraphs = path.read_text(encoding="utf-8", errors="replace").split("\n\n")
        except OSError as error:
            raise RequestError(f"--prompts: {path}: cannot be read: {error.strerror}") from None
        texts += [text.strip() for text in paragraphs if text.strip()]
    if not texts:
        raise RequestError(f"--prompts: no text in {', '.join(map(str, files))}")
    return texts


@app.command("remove")
@reports_errors
def remove(
    model: _Model, output: _Output = None, in_place: _InPlace = False, overwrite: _Overwrite = False
) -> None:
    """Take the draft vocabulary out of a GGUF; the head then drafts from the whole vocabulary.

    In place, the list stays in the file under a key that nobody reads, so that another list of
    the same length can take its place.

    **Example**

    mtp-gguf fastmtp remove model.gguf -o plain.gguf
    """
    if in_place and output is not None:
        raise typer.BadParameter("--in-place goes with no --output")
    with open_model(model) as opened:
        held = read_draft_list(opened)
        if held is None:
            raise RequestError(f"{model}: has no draft vocabulary")
        if in_place:
            target = model
            _change(opened, None)
        else:
            target = output_path(output, model, "{}-no-FastMTP")
            write_file("fastmtp", without_list(opened), target, opened.paths, overwrite)
    report_file(target)


@app.command("show")
@reports_errors
def show(
    model: _Model,
    ids: Annotated[
        bool, typer.Option("--ids", help="All ids in rank order, one a line, and nothing else.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for scripts.")] = False,
) -> None:
    """Show the draft vocabulary of a GGUF: layout, size, where it is from, whether it is sound.

    **Example**

    mtp-gguf fastmtp show model.gguf --ids > ranked.txt
    """
    with open_model(model) as opened:
        held = read_draft_list(opened)
        if held is None:
            raise RequestError(f"{model}: has no draft vocabulary; mtp-gguf fastmtp add makes one")
        if ids:
            typer.echo("\n".join(map(str, held.ids)))
            return
        required = required_ids(opened)
        faults = list_faults(held.ids, opened.vocabulary_size or 0, required)
        if as_json:
            typer.echo(json.dumps(_fields(held, faults), indent=1))
            return
        typer.echo(f"{len(held.ids)} tokens, {_about(held)}")
        typer.echo(f"of them special (turn ends, tools, thinking): {len(required)}")
        texts = _texts(opened, [i for i in held.ids if i not in set(required)])
        if texts:
            typer.echo(f"first others: {' '.join(texts)}")
        for fault in faults:
            typer.echo(f"fault: {fault}; make a new one: mtp-gguf fastmtp add {model}")


def _change(model: Model, keys: Mapping[str, Value] | None) -> None:
    """Change the file itself: inside its header where that is safe, else by a new one."""
    path = model.paths[0]
    about = read_draft_list(model)
    if about is not None and about.about.layout is not DraftLayout.IDS:
        raise RequestError(
            f"{path}: its draft vocabulary has rows of its own (layout "
            f"{about.about.layout.value}); write a new file with --output"
        )
    if path.is_symlink():
        raise RequestError(
            f"{path}: is a link, and the file behind it may be another program's; "
            "write a new file with --output"
        )
    file = model.first
    reason = hide_list(path, file) if keys is None else replace_list(path, file, keys)
    if reason is None:
        typer.echo("changed in place")
        return
    _write_anew(path, rewritten(model.first, keys or {}))
    typer.echo(f"written anew: {reason}")


def _write_anew(path: Path, spec: OutputSpec) -> None:
    mode = path.stat().st_mode
    with byte_progress("fastmtp", spec.nbytes) as progress:
        write(path, spec, progress)
    os.chmod(path, mode & 0o7777)


def _about(held: DraftList) -> str:
    parts = [f"layout {held.about.layout.value}"]
    if held.about.source:
        parts.append(printable(held.about.source.rstrip()))
    if held.about.coverage is not None:
        parts.append(f"covers {held.about.coverage:.1%} of its corpus")
    return ", ".join(parts)


def _fields(held: DraftList, faults: list[str]) -> dict[str, Any]:
    return {
        "layout": held.about.layout.value,
        "size": len(held.ids),
        "source": held.about.source,
        "coverage": held.about.coverage,
        "faults": faults,
        "ids": list(held.ids),
    }


def _texts(model: Model, ids: list[int]) -> list[str]:
    """The first tokens of a list as the tokenizer spells them (`Ġ` for a blank)."""
    if "tokenizer.ggml.tokens" not in model.first.keys:
        return []
    tokens = model.first.array("tokenizer.ggml.tokens") or []
    return [printable(str(tokens[i])) for i in ids if 0 <= i < len(tokens)][:_SHOWN_TOKENS]
