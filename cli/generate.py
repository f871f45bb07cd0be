"""`mtp-gguf generate`: complete a text with drafting, and say what drafting did."""

import json
import sys
import warnings
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.profile import AUTO, AUTO_MAX_DEPTH, MAX_DEPTH
from mtp_gguf.gguf_tools.sources import what_is_at
from mtp_gguf.gguf_tools.system import LARGEST_CONTEXT

from . import token_colors
from .progress import reports_errors

if TYPE_CHECKING:
    from mtp_gguf.native.session import MtpStats


@reports_errors
def generate(
    model: Annotated[Path, typer.Argument(help="GGUF file with an MTP head.")],
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="Text to go on from.")],
    n: Annotated[int, typer.Option("-n", "--tokens", help="Most tokens to generate.")] = 256,
    depth: Annotated[
        str | None,
        typer.Option(
            help="Tokens drafted in each cycle; 0: none; auto (the default): as many as pay."
        ),
    ] = None,
    max_depth: Annotated[
        int, typer.Option(min=0, max=MAX_DEPTH, help="Most tokens drafted by --depth auto.")
    ] = AUTO_MAX_DEPTH,
    ctx: Annotated[
        int,
        typer.Option("-c", "--ctx", min=0, max=LARGEST_CONTEXT, help="Context; 0: the model's."),
    ] = 4096,
    temperature: Annotated[
        float, typer.Option("--temp", min=0.0, max=100.0, help="0: greedy.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(min=-1, max=2**32 - 2, help="Seed of the sampler; -1: random.")
    ] = 0,
    threads: Annotated[int | None, typer.Option("-t", "--threads", help="CPU threads.")] = None,
    gpu_layers: Annotated[int, typer.Option("-ngl", help="Layers on the GPU; -1: all.")] = 0,
    rollback: Annotated[
        str | None, typer.Option(help="snapshot (the default), checkpoint, two-phase or host.")
    ] = None,
    exact: Annotated[
        bool, typer.Option(help="The same greedy text at every depth, to the byte.")
    ] = False,
    fastmtp_size: Annotated[
        int | None, typer.Option(help="Rows of the draft vocabulary; 0: all, -1: no list.")
    ] = None,
    draft_threads: Annotated[
        int | None, typer.Option(min=0, help="CPU threads of the head; 0: as the trunk.")
    ] = None,
    no_profile: Annotated[
        bool, typer.Option("--no-profile", help="Do not read MODEL.mtp.toml (`mtp-gguf tune`).")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--no-color", help="Do not color tokens by who wrote them.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Say what drafting did.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
) -> None:
    """Complete a text, drafting with the model's MTP head.

    On a terminal each token shows who wrote it: accepted drafts are colored and underlined, one
    color for each position in the draft, the trunk's own are plain.
    """
    if not model.is_file():
        raise RequestError(
            f"{model}: expected a GGUF file, found {what_is_at(model)}; "
            "mtp-gguf convert makes one, hf download fetches one"
        )
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415
    from mtp_gguf.native.llama import MTPLlama  # noqa: PLC0415  (loads llama.cpp)

    tell_crashes()

    wanted = _parse_depth(depth)
    colored = not (as_json or plain) and token_colors.wanted(sys.stdout)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        llm = MTPLlama(
            str(model),
            depth=wanted,
            max_depth=max_depth,
            rollback=rollback,
            exact=exact,
            fastmtp_size=fastmtp_size,
            draft_threads=draft_threads,
            profile=not no_profile,
            n_ctx=ctx,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=gpu_layers,
        )
        llm.set_seed(seed)  # as an option of Llama's, 0 would be random, too
    for note in notes:
        typer.echo(f"mtp-gguf: {note.message}", err=True)
    with closing(llm):
        tokens = llm.tokenize(prompt.encode(), special=True)
        if not 0 < len(tokens) < llm.n_ctx():
            raise RequestError(
                f"--prompt: expected 1 to {llm.n_ctx() - 1} tokens, found {len(tokens)}"
                + ("; shorten it, or raise --ctx" if tokens else "")
            )
        most = min(n, llm.n_ctx() - len(tokens)) if n > 0 else llm.n_ctx() - len(tokens)
        began = perf_counter()
        pieces: list[str] = []
        written: Counter[int] = Counter()  # tokens by origin
        terminal = sys.stdout.isatty() and not as_json
        text = token_colors.TokenText(colored=colored, terminal=terminal)
        stream = llm.generate(tokens, temp=temperature)
        for token in islice(stream, max(most, 1)):
            if llm.is_end(token):
                break
            written[llm.token_origin] += 1
            pieces.append(text.add(llm.detokenize([token]), llm.token_origin))
            if not as_json:
                sys.stdout.write(pieces[-1])
                sys.stdout.flush()
        stream.close()
        pieces.append(text.end())
        seconds = perf_counter() - began
        did = llm.mtp_stats
    if as_json:
        record = {
            "text": "".join(pieces),
            "depth": llm.depth,
            "seconds": seconds,
            "prompt_tokens": len(tokens),
            **asdict(did),
        }
        sys.stdout.write(json.dumps(record) + "\n")
        return
    sys.stdout.write(pieces[-1] + "\n")
    if terminal and did.acceptance:
        colored = colored and sys.stderr.isatty()
        sys.stderr.write(token_colors.table(written, did.acceptance, colored=colored) + "\n")
    if stats:
        sys.stderr.write(report(did, written.total(), seconds))


def _parse_depth(text: str | None) -> int | Literal["auto"] | None:
    if text is None or text == AUTO:
        return AUTO if text else None
    if not text.isascii() or not text.isdigit() or int(text) > MAX_DEPTH:
        raise typer.BadParameter(
            f"expected 0 to {MAX_DEPTH} or auto, found {text!r}", param_hint="--depth"
        )
    return int(text)


def report(did: "MtpStats", generated: int, seconds: float) -> str:
    """A few lines for people: speed, acceptance by position, where the time went."""
    cycles = max(did.cycles, 1)
    parts = {
        "draft": did.draft_ms,
        "verify": did.verify_ms,
        "rollback": did.rollback_ms,
        "sample": did.sample_ms,
    }
    lines = [
        f"{generated} tokens in {seconds:.2f} s, prompt included",
        f"prompt: {did.prefilled} tokens, trunk {did.prefill_ms:.0f} ms, "
        f"head {did.prefill_head_ms:.0f} ms",
        f"cycles: {did.cycles}, {did.tokens_per_cycle:.2f} tokens each",
        "accepted by position: " + (" ".join(f"{a:.0%}" for a in did.acceptance) or "no drafts"),
        "ms per cycle: " + ", ".join(f"{k} {v / cycles:.2f}" for k, v in parts.items()),
    ]
    return "\n".join(lines) + "\n"
