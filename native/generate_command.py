"""`mtp-gguf generate`: complete a text with drafting, and say what drafting did."""

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_gguf.gguf_tools.errors import RequestError

if TYPE_CHECKING:
    from .session import MtpStats


def generate(
    model: Annotated[Path, typer.Argument(help="GGUF file with an MTP head.")],
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="Text to go on from.")],
    n: Annotated[int, typer.Option("-n", "--tokens", help="Most tokens to generate.")] = 256,
    depth: Annotated[int, typer.Option(help="Tokens drafted in each cycle; 0: none.")] = 3,
    ctx: Annotated[int, typer.Option("-c", "--ctx", help="Context size.")] = 4096,
    temperature: Annotated[float, typer.Option("--temp", help="0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampler.")] = 0,
    threads: Annotated[int | None, typer.Option("-t", "--threads", help="CPU threads.")] = None,
    gpu_layers: Annotated[int, typer.Option("-ngl", help="Layers on the GPU; -1: all.")] = 0,
    rollback: Annotated[
        str, typer.Option(help="snapshot, checkpoint, two-phase or host.")
    ] = "snapshot",
    exact: Annotated[
        bool, typer.Option(help="The same greedy text at every depth, to the byte.")
    ] = False,
    fastmtp_size: Annotated[
        int, typer.Option(help="Rows of the draft vocabulary; 0: all, -1: no list.")
    ] = 0,
    stats: Annotated[bool, typer.Option("--stats", help="Say what drafting did.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
) -> None:
    """Complete a text, drafting with the model's MTP head."""
    if not model.is_file():
        raise RequestError(
            f"{model}: expected a GGUF file, found {'a folder' if model.exists() else 'none'}; "
            "mtp-gguf convert makes one, hf download fetches one"
        )
    from .llama import MTPLlama  # noqa: PLC0415  (loads llama.cpp)

    with closing(
        MTPLlama(
            str(model),
            depth=depth,
            rollback=rollback,
            exact=exact,
            fastmtp_size=fastmtp_size,
            n_ctx=ctx,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=gpu_layers,
            seed=seed,
        )
    ) as llm:
        tokens = llm.tokenize(prompt.encode(), special=True)
        began = perf_counter()
        pieces: list[str] = []
        options: dict[str, Any] = {"max_tokens": n, "temperature": temperature, "stream": True}
        chunks: Iterator[Any] = iter(llm.create_completion(tokens, **options))
        for chunk in chunks:
            pieces.append(chunk["choices"][0]["text"])
            if not as_json:
                sys.stdout.write(pieces[-1])
                sys.stdout.flush()
        seconds = perf_counter() - began
        did = llm.mtp_stats
        generated = llm.n_tokens - len(tokens) + 1  # the last one is not evaluated
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
    sys.stdout.write("\n")
    if stats:
        sys.stderr.write(report(did, generated, seconds))


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
