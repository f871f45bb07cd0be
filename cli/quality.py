"""`mtp-gguf quality`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_gguf.gguf_tools.files.output import OutputFile, check_output
from mtp_gguf.gguf_tools.machine.text import printable, utf8_bytes
from mtp_gguf.gguf_tools.machine.text_files import whole_texts

from . import options
from .local_model import local_model
from .progress import reports_errors
from .quality_run import measure_quality

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
        options.text_option(
            "Compare on these text files, which neither imatrix nor training has seen."
        ),
    ],
    context: options.WindowSize = 512,
    chunks: options.Windows = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--kl-divergence-base",
            metavar="FILE",
            parser=options.parse_output,
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
            "--html", metavar="FILE", parser=options.parse_output, help="Write a page with plots."
        ),
    ] = None,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = 0,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
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
    inputs = [source, *files, *text]
    if page is not None:
        check_output(page, inputs, overwrite)
    if base is not None and not base.is_file():  # one that exists is read
        check_output(base, inputs, overwrite)
    measured = measure_quality(
        source,
        files,
        contents,
        context=context,
        chunks=chunks,
        base=base,
        drafting=drafting,
        threads=threads,
        gpu_layers=gpu_layers,
        quiet=as_json,
    )
    candidates = measured.candidates
    if page is not None:
        from mtp_gguf.bench.report.quality_page import render_quality  # noqa: PLC0415

        html = utf8_bytes(render_quality(source.name, candidates[0].divergence.tokens, candidates))
        with OutputFile(page, len(html)) as file:
            file.write(0, html)
            file.commit()
    if as_json:
        fields = {
            "format": 1,
            "reference": str(source),
            "logits": str(measured.logits),
            "windows": measured.windows,
            "window": context,
            "candidates": [asdict(candidate) for candidate in candidates],
        }
        typer.echo(json.dumps(fields, indent=1))
        return
    for line in _table(source.name, candidates):
        typer.echo(line)
    if page is not None:
        typer.echo(f"{page}: written")


def _table(reference: str, candidates: "Sequence[Candidate]") -> list[str]:
    """Return the lines of the table, a block of lines for each file."""
    first = candidates[0].divergence
    base = first.reference_perplexity
    lines = [
        f"{printable(reference)}: perplexity {base.value:.4f} ± {base.error:.4f} on "
        f"{first.tokens} tokens",
    ]
    width = max(map(len, candidates[0].HEADS))
    for candidate in candidates:
        lines += ["", printable(candidate.name)]
        lines += [
            f"  {head:{width}}  {cell}"
            for head, cell in zip(candidate.HEADS, candidate.cells(), strict=True)
            if cell
        ]
    return lines
