"""Count accepted drafts for each architecture that llama.cpp drafts with.

    python benchmarks/architectures.py --work FOLDER --server LLAMA_SERVER [--tokens 64] [--times]

Each model is synthetic (benchmarks/dial_model.py), of a small shape, with a head that is right 80 %
of the time; so acceptance says whether drafts follow the trunk. The server is a patched one: it
decodes the same prompt without drafts, with those of `serve`, and with llama-server's own
draft-mtp. MTPLlama joins where it drafts with the architecture.

--times measures the three servers on a trunk of six times as many layers instead of counting: the
milliseconds of a token at depth 2, the median of interleaved rounds. `serve` drafts in llama.cpp's
own steps, too, with architectures that it does not draft with in one graph.
"""

from __future__ import annotations

import argparse
import itertools
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from decode import complete, opened, server, server_round
from dial_model import nextn_models, write_dial_gguf
from measuring import heading, in_rounds, options, row

from mtp_gguf.gguf_tools.heads.nextn import ARCHITECTURES, OUR_ARCHITECTURES

HIT = 0.8
PROMPT = [1, 2, 3, 4, 9, 7, 5]
DEPTHS = (1, 2, 3)
OWN = "--no-spec-draft-fused"
TIMED_SIZE = nextn_models.Size(trunk=6, width=4)
TIMED_DEPTH = 2
THREADS = 2
ROUNDS = 5


def served(binary: str, model: Path, depth: int, tokens: int, *options: str) -> tuple[Any, str]:
    """The tokens of llama-server, and its accepted and drafted tokens."""
    with server(binary, model, depth, 1, "-c", "512", "--no-repack", *options) as url:
        result = complete(url, PROMPT, tokens, return_tokens=True)
    timings = result["timings"]
    return result["tokens"], _share(timings.get("draft_n_accepted", 0), timings.get("draft_n", 0))


def ours(model: Path, depth: int, tokens: int) -> tuple[list[int], str, float]:
    """The tokens of MTPLlama, its accepted and drafted tokens, and its tokens per cycle."""
    with opened(model, depth, 512, 1) as llm:
        text = list(itertools.islice(llm.generate(PROMPT, temp=0.0), tokens))
        did = llm.mtp_stats
    return text, _share(sum(did.accepted), sum(did.drafted)), did.tokens_per_cycle


def _share(accepted: int, drafted: int) -> str:
    return f"{accepted} of {drafted}" if drafted else "no drafts"


def times(binary: str, model: Path, tokens: int) -> list[float]:
    """Milliseconds of a token: without drafts, with those of `serve`, with own draft-mtp."""
    variants = ((0,), (TIMED_DEPTH,), (TIMED_DEPTH, OWN))
    with ExitStack() as stack:
        running = (
            server(binary, model, depth, THREADS, "-c", "512", *own) for depth, *own in variants
        )
        urls = [stack.enter_context(each) for each in running]
        jobs = {url: partial(server_round, url, PROMPT, tokens) for url in urls}
        return [1e3 / median(speeds) for speeds in in_rounds(jobs, ROUNDS - 1).values()]


def print_times(arguments: argparse.Namespace) -> None:
    heading("architecture", "no drafts", "`serve`", "own draft-mtp", "no drafts / `serve`")
    for name in arguments.architectures:
        model = write_dial_gguf(arguments.work, name, HIT, size=TIMED_SIZE)
        plain, fused, own = times(arguments.server, model, arguments.tokens)
        model.unlink()
        row(f"`{name}`", *(f"{ms:.2f}" for ms in (plain, fused, own, plain / fused)))


def main() -> None:
    parser = options(__doc__, {"--tokens": 64})
    parser.add_argument("--work", type=Path, required=True, help="folder for the models")
    parser.add_argument("--server", required=True, help="patched llama-server")
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--times", action="store_true", help="measure times instead of counting")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.times:
        print_times(arguments)
        return
    heading(
        *("architecture", "depth", "MTPLlama", "tokens per cycle", "`serve`", "own draft-mtp"),
        "text",
    )
    for name in arguments.architectures:
        model = write_dial_gguf(arguments.work, name, HIT)
        want, _ = served(arguments.server, model, 0, arguments.tokens)
        for depth in DEPTHS:
            texts, counts = zip(
                *(
                    served(arguments.server, model, depth, arguments.tokens, *options)
                    for options in ((), (OWN,))
                ),
                strict=True,
            )
            text, count, per_cycle = want, "-", "-"
            if name in OUR_ARCHITECTURES:
                text, count, pace = ours(model, depth, arguments.tokens)
                per_cycle = f"{pace:.2f}"
            same = "same" if all(found == want for found in (text, *texts)) else "differs"
            row(f"`{name}`", depth, count, per_cycle, *counts, same)


if __name__ == "__main__":
    main()
