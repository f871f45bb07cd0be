"""`mtp-gguf imatrix`."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_gguf.gguf_tools.files.output import check_output
from mtp_gguf.gguf_tools.machine.interrupted import Interrupted
from mtp_gguf.gguf_tools.machine.processors import computing_threads
from mtp_gguf.gguf_tools.machine.text import human_bytes
from mtp_gguf.gguf_tools.machine.text_files import paragraphs, whole_texts
from mtp_gguf.gguf_tools.model import open_model

from . import options
from .file_report import can_draft
from .local_model import local_model
from .progress import reports_errors, share_progress

if TYPE_CHECKING:
    from mtp_gguf.bench.model import BenchModel
    from mtp_gguf.gguf_tools.imatrix import Calibration

_DEFAULT = "imatrix.gguf"  # llama-imatrix's


@reports_errors
def imatrix(
    model: options.ModelName,
    text: Annotated[
        list[Path] | None,
        options.text_option(
            "Calibrate with these text files (default: a built-in text in several languages, "
            "with code and chat)."
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        options.prompt_files_option(
            "Calibrate with the model's answers to the prompts in these files, separated by blank "
            "lines."
        ),
    ] = None,
    output: Annotated[
        Path | None, options.output_option(f"Write to this file or folder (default: {_DEFAULT}).")
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(
            "--merge",
            metavar="FILE",
            help="Add what this imatrix file of the same model has seen; repeatable.",
        ),
    ] = None,
    context: options.WindowSize = 512,
    chunks: options.Windows = None,
    process_output: Annotated[
        bool, typer.Option("--process-output", help="Also collect for output.weight.")
    ] = False,
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Recognize special tokens in the text files.")
    ] = False,
    tokens: Annotated[
        int, typer.Option("-n", "--tokens", min=2, max=4096, help="Tokens of an answer at most.")
    ] = 256,
    raw: options.Raw = False,
    head: options.HeadFile = None,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = 0,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Compute the importance matrix of a model's trunk and MTP head.

    The trunk reads a text once, and the head drafts from the trunk's states as it does in decoding.
    The file is in llama.cpp's format: `convert --imatrix` and llama-quantize read it. Entries of
    the trunk equal those of llama-imatrix. Use text like yours, in 100 windows or more.

    An interrupted run continues where it stopped if the same command is run again.

    **Examples**

    mtp-gguf imatrix model-BF16.gguf

    mtp-gguf imatrix model-BF16.gguf --text notes/*.md src/*.py -o notes.gguf

    mtp-gguf imatrix model-BF16.gguf -f prompts.txt --merge imatrix.gguf -o both.gguf
    """
    if text and prompts:
        raise typer.BadParameter("expected --text or --prompt-file, found both")
    target = output if output and not output.is_dir() else (output or Path()) / _DEFAULT
    found = local_model(model, head)
    files = [*(text or ()), *(prompts or ()), *(merge or ())]
    check_output(target, [found.path, *files], overwrite)
    from mtp_gguf.bench.calibration import BUILT_IN, answers, built_in_text  # noqa: PLC0415
    from mtp_gguf.bench.imatrix import (  # noqa: PLC0415  (loads llama.cpp)
        ImatrixSettings,
        collect_imatrix,
        windows_of,
    )
    from mtp_gguf.bench.model import BenchModel  # noqa: PLC0415
    from mtp_gguf.gguf_tools.imatrix import (  # noqa: PLC0415
        check_fits,
        read_calibration,
        write_imatrix,
    )
    from mtp_gguf.gguf_tools.imatrix import (  # noqa: PLC0415
        merge as merge_calibrations,
    )
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415

    others = [(str(path), read_calibration(path)) for path in merge or ()]
    for where, calibration in others:
        check_fits(where, calibration, _shapes(found.path, found.head))
    contents = "".join(whole_texts(text)) if text else None
    questions = paragraphs(prompts) if prompts else []
    tell_crashes()
    states = [target.with_name(f"{target.name}.{kind}") for kind in ("answers", "resume")]
    drafts = can_draft(found.path) or found.head is not None
    longest = max((len(question.encode()) for question in questions), default=0)
    with BenchModel(
        found.path,
        n_ctx=max(context, tokens + min(longest, 1 << 15) + 256),
        threads=threads or computing_threads(),
        gpu_layers=options.usable_gpu_layers(gpu_layers),
        head=found.head,
    ) as loaded:
        try:
            if questions:
                asked = _prompt_tokens(loaded, questions, raw)
                with share_progress("answers") as show:
                    ids = answers(
                        loaded,
                        asked,
                        tokens,
                        states[0],
                        drafts=drafts,
                        progress=lambda n: show(n / len(asked), f"answer {n} of {len(asked)}"),
                    )
            elif contents is not None:
                ids = loaded.tokenize(contents, special=parse_special)
            else:
                ids = loaded.tokenize(built_in_text(loaded.write_chat))
            windows = windows_of(ids, context, chunks, loaded.bos)
            with share_progress("imatrix") as show:
                calibration = collect_imatrix(
                    loaded,
                    windows,
                    " ".join(path.name for path in (*(text or ()), *(prompts or ()))) or BUILT_IN,
                    ImatrixSettings(context, process_output, drafts),
                    states[1],
                    lambda n: show(n / len(windows), f"window {n} of {len(windows)}"),
                )
        except KeyboardInterrupt:
            saved = [str(state) for state in states if state.exists()]
            text_ = (
                f"the same command continues from {saved[-1]}" if saved else "nothing was written"
            )
            raise Interrupted(text_) from None
    whole = merge_calibrations([*others, (model, calibration)])
    write_imatrix(target, whole)
    for state in states:
        with suppress(FileNotFoundError):
            state.unlink()
    _report(target, whole, drafts, as_json)


def _report(target: Path, whole: "Calibration", head: bool, as_json: bool) -> None:
    absent = ((name, int((entry.counts == 0).sum())) for name, entry in whole.entries.items())
    unseen = {name: count for name, count in absent if count}
    if as_json:
        fields: dict[str, Any] = {
            "path": str(target),
            "bytes": target.stat().st_size,
            "entries": len(whole.entries),
            "chunks": whole.chunks,
            "chunk_size": whole.chunk_size,
            "head": head,
            "experts_not_seen": unseen,
        }
        typer.echo(json.dumps(fields, indent=1))
        return
    of = "trunk and head" if head else "the trunk; the model has no head that can draft"
    typer.echo(
        f"{target}: {human_bytes(target.stat().st_size)}, {len(whole.entries)} tensors of {of}"
    )
    typer.echo(f"read {whole.chunks} windows of {whole.chunk_size} tokens")
    if unseen:
        typer.echo(
            f"warning: no token was routed to {sum(unseen.values())} experts of {len(unseen)} "
            "tensors, which are quantized without weights; more text would reach them"
        )


def _prompt_tokens(model: "BenchModel", prompts: Sequence[str], raw: bool) -> list[list[int]]:
    write = None if raw else model.write_chat
    return [model.tokenize(write(prompt) if write else prompt) for prompt in prompts]


def _shapes(*paths: Path | None) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of some files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        if path is not None:
            with open_model(path) as opened:
                shapes |= {t.name: t.shape for t in opened.tensors.values()}
    return shapes
