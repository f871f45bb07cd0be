"""`mtp-gguf fastmtp`: draft vocabularies of GGUF files."""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_gguf.convert.options import DraftOptions
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.format import Value
from mtp_gguf.gguf_tools.files.in_place import hide_list, replace_list
from mtp_gguf.gguf_tools.files.new_file import output_path
from mtp_gguf.gguf_tools.files.output import check_output
from mtp_gguf.gguf_tools.files.rewrite import write
from mtp_gguf.gguf_tools.heads.draft_list import (
    DraftList,
    list_faults,
    read_draft_list,
    required_ids,
)
from mtp_gguf.gguf_tools.heads.draft_rewrite import check_head, rewritten, with_list, without_list
from mtp_gguf.gguf_tools.heads.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.hub.remote import hub_gguf, is_remote
from mtp_gguf.gguf_tools.hub.resolve import open_any_model
from mtp_gguf.gguf_tools.machine.interrupted import leaves_nothing
from mtp_gguf.gguf_tools.machine.text import printable
from mtp_gguf.gguf_tools.machine.text_files import paragraphs
from mtp_gguf.gguf_tools.model import Model

from . import options
from .file_report import report_file, write_copy
from .local_model import local_model
from .progress import byte_progress, reports_errors

_SHOWN_TOKENS = 24
# Options of `convert`, and the same options of `fastmtp`.
_OPTIONS = {"--fastmtp-corpus": "--corpus", "--fastmtp-ids": "--ids", "--fastmtp": "--size"}

app = typer.Typer(
    cls=options.Group, no_args_is_help=True, rich_markup_mode="markdown", add_completion=False
)


_Output = Annotated[
    Path | None,
    options.output_option("Write to this file or folder (default: MODEL-….gguf)."),
]
_InPlace = Annotated[
    bool,
    typer.Option(
        "--in-place",
        help="Change MODEL itself: only its header for a list of the same length, else replace it "
        "by a new file once that is complete.",
    ),
]


_Size = Annotated[
    int | None,
    typer.Option("--size", min=1, help="List N tokens (default: 32768)."),
]


@app.callback()
def _fastmtp() -> None:
    """Add, calibrate, show or remove the FastMTP draft vocabulary of a GGUF.

    A draft vocabulary is the list of tokens that the MTP head can draft. A short list makes
    drafting cheap; a list without the words of your texts makes it useless. `add` ranks tokens by
    their frequency in your text files.
    """


@app.command("add", cls=options.Command)
@reports_errors
def add(
    model: options.ModelFile,
    size: _Size = None,
    corpus: Annotated[list[Path] | None, options.corpus_option("--corpus")] = None,
    ids: Annotated[Path | None, options.ids_option("--ids")] = None,
    layout: Annotated[
        DraftLayout,
        typer.Option("--layout", help="Store only ids, or rows of the output layer too."),
    ] = DraftLayout.IDS,
    output: _Output = None,
    in_place: _InPlace = False,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Add a draft vocabulary to a GGUF, or replace the one it has.

    Tokens are counted with the tokenizer in the file (by llama.cpp). Text like the model's future
    output works best. Without a corpus or a list of ids, tokens are ranked by id.

    **Examples**

    mtp-gguf fastmtp add model.gguf --corpus src/*.py -o model-code.gguf

    mtp-gguf fastmtp add model.gguf --corpus notes.txt --in-place
    """
    ranking = DraftOptions.parse(size, corpus, ids, "--")
    if in_place and (output is not None or layout is not DraftLayout.IDS):
        raise typer.BadParameter("--in-place cannot be combined with --output or another layout")
    _check_place(model, in_place, output)
    note = _notes(as_json)
    with open_any_model(_loadable(model) if ranking.corpus else model) as opened:
        check_head(opened)
        old = read_draft_list(opened)
        from mtp_gguf.convert.heads.gguf_draft import rank_for_gguf  # noqa: PLC0415  (NumPy)
        from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415  (loads llama.cpp)

        tell_crashes()
        with options.spelled(_OPTIONS):
            draft = rank_for_gguf(opened, ranking)
        keys = draft.metadata(with_ids=True)
        if old:
            note(f"replaces a list of {len(old.ids)} tokens ({_about(old)})")
        note(f"{len(draft.ids)} tokens, {draft.source}")
        if draft.coverage:
            shares = (f"{n}: {share:.1%}" for n, share in draft.coverage.items())
            note(f"coverage of the corpus by size: {', '.join(shares)}")
        if draft.warning:
            note(f"warning: {draft.warning}")
        if in_place:
            target = Path(model)
            note(_change(opened, keys))
        else:
            pattern = "mtp-{}-FastMTP" if layout is DraftLayout.SIDECAR else "{}-FastMTP"
            target = output_path(output, opened, pattern)
            make = partial(with_list, keys=keys, layout=layout)
            write_copy("fastmtp", target, opened, make, overwrite, *ranking.files)
    report_file(target, as_json=as_json)


@app.command("calibrate", cls=options.Command)
@reports_errors
def calibrate(
    model: options.ModelFile,
    prompts: Annotated[
        list[Path],
        options.prompt_files_option("Answer the prompts in these files, separated by blank lines."),
    ],
    size: _Size = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Generate at most N tokens per prompt.")
    ] = 512,
    temperature: options.Temperature = 0.8,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=(1 << 32) - 2, help="Seed the sampler with N.")
    ] = 1,
    context: options.Context = 4096,
    gpu_layers: options.GpuLayers = 0,
    raw: options.Raw = False,
    output: _Output = None,
    in_place: _InPlace = False,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Add a draft vocabulary that is ranked by the model's own output.

    Drafts predict the model's own output, so this is the best corpus. The model answers your
    prompts (with llama.cpp, without drafting) and its tokens are counted. If these are too few,
    tokens of the prompts, and then others in the order of their ids, fill the list. A list of
    32768 needs some hundred thousand tokens of output.

    **Example**

    mtp-gguf fastmtp calibrate model.gguf -f questions.txt --tokens 1024 --in-place
    """
    from mtp_gguf.convert.heads.gguf_draft import rank_by_own_output  # noqa: PLC0415  (NumPy)
    from mtp_gguf.native.chat.generate import Generation, generate  # noqa: PLC0415
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415

    tell_crashes()
    gpu_layers = options.usable_gpu_layers(gpu_layers)
    _check_place(model, in_place, output)
    note = _notes(as_json)
    texts = paragraphs(prompts)
    settings = Generation(tokens, temperature, seed, context, not raw, gpu_layers)
    with open_any_model(_loadable(model)) as opened:
        check_head(opened)
        target = Path(model) if in_place else output_path(output, opened, "{}-FastMTP")
        if not in_place:
            check_output(target, [*opened.paths, *prompts], overwrite)
        with leaves_nothing(target), byte_progress("write", len(texts) * tokens) as progress:
            answers = generate(opened.paths[0], texts, settings)
            with options.spelled(_OPTIONS):
                draft = rank_by_own_output(opened, answers, size, progress)
        keys = draft.metadata(with_ids=True)
        shares = (f"{n}: {share:.1%}" for n, share in draft.coverage.items())
        note(f"{len(draft.ids)} tokens, {draft.source}; coverage {', '.join(shares)}")
        if draft.warning:
            note(f"warning: {draft.warning}")
        if in_place:
            note(_change(opened, keys))
        else:
            make = partial(with_list, keys=keys, layout=DraftLayout.IDS)
            write_copy("fastmtp", target, opened, make, overwrite, *prompts)
    report_file(target, as_json=as_json)


def _notes(as_json: bool) -> Callable[[str], None]:
    """Return a function that prints progress, on standard error if the output is JSON."""
    return lambda text: typer.echo(text, err=as_json)


def _check_place(model: str, in_place: bool, output: Path | None) -> None:
    """Raise a usage error for --in-place with --output, or a model that is not a local file."""
    if in_place and output is not None:
        raise typer.BadParameter("--in-place and --output contradict each other")
    if in_place and (hub_gguf(model) or is_remote(model)):
        raise typer.BadParameter(
            f"--in-place changes a local file, and {model} is not one; write a new file with "
            "--output"
        )


def _loadable(model: str) -> str:
    """Return a model that llama.cpp can load; one on the hub is downloaded into the cache."""
    return str(local_model(model, drafts=False).path)


@app.command("remove", cls=options.Command)
@reports_errors
def remove(
    model: options.ModelFile,
    output: _Output = None,
    in_place: _InPlace = False,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Remove the draft vocabulary of a GGUF.

    The head then drafts from the whole vocabulary. With --in-place the list stays in the file under
    an unused key, so that another list of the same length can replace it.

    **Example**

    mtp-gguf fastmtp remove model.gguf -o plain.gguf
    """
    _check_place(model, in_place, output)
    with open_any_model(model) as opened:
        draft = read_draft_list(opened)
        if draft is None:
            raise RequestError(f"{model}: has no draft vocabulary")
        if in_place:
            target = Path(model)
            _notes(as_json)(_change(opened, None))
        else:
            target = output_path(output, opened, "{}-no-FastMTP")
            write_copy("fastmtp", target, opened, without_list, overwrite)
    report_file(target, as_json=as_json)


@app.command("show", cls=options.Command)
@reports_errors
def show(
    model: options.ModelFile,
    ids: Annotated[
        bool, typer.Option("--ids", help="Print only the ids in rank order, one per line.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the draft vocabulary of a GGUF, and whether it is valid.

    **Example**

    mtp-gguf fastmtp show model.gguf --ids > ranked.txt
    """
    if ids and as_json:
        raise typer.BadParameter("--ids and --json contradict each other")
    with open_any_model(model) as opened:
        draft = read_draft_list(opened)
        if draft is None:
            raise RequestError(f"{model}: has no draft vocabulary; mtp-gguf fastmtp add adds one")
        if ids:
            typer.echo("\n".join(map(str, draft.ids)))
            return
        required = required_ids(opened)
        faults = list_faults(draft.ids, opened.vocabulary_size or 0, required)
        if as_json:
            typer.echo(json.dumps(_fields(draft, faults), indent=1))
            return
        typer.echo(f"{len(draft.ids)} tokens, {_about(draft)}")
        typer.echo(f"of them special (turn ends, tools, thinking): {len(required)}")
        texts = _texts(opened, [i for i in draft.ids if i not in set(required)])
        if texts:
            typer.echo(f"first others: {' '.join(texts)}")
        for fault in faults:
            typer.echo(f"fault: {fault}; replace it: mtp-gguf fastmtp add {model}")


def _change(model: Model, keys: Mapping[str, Value] | None) -> str:
    """Change the file itself, in its header if that is safe, else rewrite it; return how."""
    path = model.paths[0]
    old = read_draft_list(model)
    if old is not None and old.header.layout is not DraftLayout.IDS:
        raise RequestError(
            f"{path}: its draft vocabulary has rows of its own (layout "
            f"{old.header.layout.value}); write a new file with --output"
        )
    if path.is_symlink():
        raise RequestError(
            f"{path}: expected a file, found a link, whose target may belong to another program; "
            "write a new file with --output"
        )
    file = model.first
    reason = hide_list(path, file) if keys is None else replace_list(path, file, keys)
    if reason is None:
        return "changed in place"
    spec = rewritten(model.first, keys or {})
    mode = path.stat().st_mode
    with byte_progress("fastmtp", spec.nbytes) as progress:
        write(path, spec, progress)
    os.chmod(path, mode & 0o7777)
    return f"written anew: {reason}"


def _about(draft: DraftList) -> str:
    parts = [f"layout {draft.header.layout.value}"]
    if draft.header.source:
        parts.append(printable(draft.header.source.rstrip()))
    if draft.header.coverage is not None:
        parts.append(f"covers {draft.header.coverage:.1%} of its corpus")
    return ", ".join(parts)


def _fields(draft: DraftList, faults: list[str]) -> dict[str, Any]:
    return {
        "layout": draft.header.layout.value,
        "size": len(draft.ids),
        "source": draft.header.source,
        "coverage": draft.header.coverage,
        "faults": faults,
        "ids": list(draft.ids),
    }


def _texts(model: Model, ids: list[int]) -> list[str]:
    """Return the first tokens of a list as the tokenizer spells them (`Ġ` for a space)."""
    if "tokenizer.ggml.tokens" not in model.first.keys:
        return []
    tokens = model.first.array("tokenizer.ggml.tokens") or []
    return [printable(str(tokens[i])) for i in ids if 0 <= i < len(tokens)][:_SHOWN_TOKENS]
