"""`mtp-gguf quality`."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_gguf.gguf_tools.errors import OutputError
from mtp_gguf.gguf_tools.model import open_model, shard_paths
from mtp_gguf.gguf_tools.output import check_output

from .local_model import local_model
from .options import AsJson, GpuLayers, Overwrite, Threads, parse_output, usable_gpu_layers
from .progress import Interrupted, human_bytes, reports_errors, say, share_progress
from .text_files import whole_texts

if TYPE_CHECKING:
    from mtp_gguf.bench.quality import Candidate


@reports_errors
def quality(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL…", help="GGUFs to compare with the reference.")
    ],
    reference: Annotated[
        str,
        typer.Option(
            "--reference", metavar="MODEL", help="GGUF of the same model at high precision."
        ),
    ],
    text: Annotated[
        list[Path],
        typer.Option(
            "--text",
            metavar="FILE…",
            help="Compare on these text files, which neither imatrix nor training has seen.",
        ),
    ],
    context: Annotated[
        int,
        typer.Option("-c", "--ctx", min=16, max=1 << 16, help="Read windows of N tokens."),
    ] = 512,
    chunks: Annotated[
        int | None,
        typer.Option("--chunks", min=1, help="Read at most N windows (default: the whole text)."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--kl-divergence-base",
            metavar="FILE",
            parser=parse_output,
            help="Keep the reference's logits in this file, in llama-perplexity's format (default: "
            "in the cache).",
        ),
    ] = None,
    drafting: Annotated[
        bool,
        typer.Option(
            "--drafting/--no-drafting", help="Measure acceptance and cycles of files with a head."
        ),
    ] = True,
    page: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", parser=parse_output, help="Write a page with plots."
        ),
    ] = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Compare GGUFs with a reference: KL divergence, perplexity, drafting.

    The figures are those of llama-perplexity --kl-divergence, on the second half of each window.
    The reference's logits are stored once, two bytes each. An interrupted run continues if the same
    command is run again. The speed of drafting is predicted from the acceptance of 8 answers and
    the cost of a few cycles on this machine.

    **Examples**

    mtp-gguf quality model-Q4_K_M.gguf --reference model-BF16.gguf --text held-out.txt

    mtp-gguf quality a.gguf b.gguf --reference model-BF16.gguf --text held-out.txt --html q.html
    """
    contents = "".join(whole_texts(text))
    source = local_model(reference, drafts=False).path
    files = [local_model(model, drafts=False).path for model in models]
    for path in (page, base):
        # A file of logits that exists is used.
        if path is not None:
            check_output(path, [source, *files, *text], overwrite or path is base)
    from mtp_gguf.bench.imatrix import windows_of  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.bench.logit_file import LogitFile  # noqa: PLC0415
    from mtp_gguf.bench.model import BenchModel  # noqa: PLC0415
    from mtp_gguf.bench.quality import (  # noqa: PLC0415
        Candidate,
        check_same_model,
        measure_divergence,
        measure_drafting,
        store_reference,
    )
    from mtp_gguf.bench.report.quality_page import render_quality  # noqa: PLC0415
    from mtp_gguf.gguf_tools.profile import identify  # noqa: PLC0415
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415
    from mtp_gguf.native.vocabulary import Vocabulary  # noqa: PLC0415
    from mtp_gguf.server.upstream_source import cache_folder  # noqa: PLC0415

    with open_model(source) as known:
        for file in files:
            with open_model(file) as opened:
                check_same_model(known, opened)
    tell_crashes()
    cores = threads or os.cpu_count() or 1
    gpu_layers = usable_gpu_layers(gpu_layers)
    with Vocabulary(source) as vocabulary:
        ids = vocabulary.encode(contents, special=False).tolist()
        windows = windows_of(ids, context, chunks, vocabulary.bos)
        n_vocab = vocabulary.size
    if base is None:
        key = repr(identify(source)).encode() + repr(windows.shape).encode() + windows.tobytes()
        base = cache_folder("logits") / f"{hashlib.sha256(key).hexdigest()[:32]}.kld"
    stored = LogitFile(base, windows, n_vocab)
    try:
        if not stored.complete():
            if not as_json:
                say(f"mtp-gguf: logits of the reference: {human_bytes(stored.nbytes)} in {base}")
            with (
                BenchModel(source, n_ctx=context, threads=cores, gpu_layers=gpu_layers) as model,
                model.reader(context) as reader,
                share_progress("reference") as show,
            ):
                store_reference(reader, stored, partial(_show_window, show, len(windows)))
        candidates = []
        for file in files:
            with (
                BenchModel(file, n_ctx=context, threads=cores, gpu_layers=gpu_layers) as model,
                share_progress(file.name) as show,
            ):
                with model.reader(context) as reader:
                    divergence = measure_divergence(
                        reader,
                        stored,
                        partial(_show_window, show, len(windows)),
                        threads=cores,
                    )
                drafts = measure_drafting(model, windows) if drafting and _can_draft(file) else None
            nbytes = sum(shard.stat().st_size for shard in shard_paths(file))
            candidates.append(Candidate(file.name, nbytes, divergence, drafts))
    except KeyboardInterrupt:
        raise Interrupted(f"the same command continues with the logits in {base}") from None
    if page is not None:
        html = render_quality(source.name, candidates[0].divergence.tokens, candidates)
        try:
            page.write_text(html, encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{page}: cannot be written: {error.strerror}") from None
    if as_json:
        fields = {
            "format": 1,
            "reference": str(source),
            "logits": str(base),
            "windows": len(windows),
            "window": context,
            "candidates": [asdict(candidate) for candidate in candidates],
        }
        typer.echo(json.dumps(fields, indent=1))
        return
    for line in _table(source.name, candidates):
        typer.echo(line)
    if page is not None:
        typer.echo(f"{page}: written")


def _show_window(show: Callable[[float, str], None], count: int, done: int) -> None:
    show(done / count, f"window {done} of {count}")


def _table(reference: str, candidates: "Sequence[Candidate]") -> list[str]:
    """Return the lines of the table, a block of lines for each file."""
    first = candidates[0].divergence
    base = first.reference_perplexity
    lines = [
        f"{reference}: perplexity {base.value:.4f} ± {base.error:.4f} on {first.tokens} tokens",
    ]
    width = max(map(len, candidates[0].HEADS))
    for candidate in candidates:
        lines += ["", candidate.name]
        lines += [
            f"  {head:{width}}  {cell}"
            for head, cell in zip(candidate.HEADS, candidate.cells(), strict=True)
            if cell
        ]
    return lines


def _can_draft(path: Path) -> bool:
    with open_model(path) as opened:
        return opened.head.report.ready
