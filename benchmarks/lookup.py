"""Decoding speed with drafts from the text, by how much of the answer copies the prompt.

    python benchmarks/lookup.py --work FOLDER [--shape 0.8b] [--hit 0.8] [--threads 2]
        [--shares 0,25,50,90,100] [--stretch 100] [--tokens 384] [--rounds 3]

Uses the synthetic model of dial_model.py, whose trunk follows one fixed cycle of tokens: the answer
is known beforehand, so the prompt can contain any share of it. The answer alternates between copied
stretches of --stretch tokens and novel text. Four settings are interleaved in every round: no
drafts, drafts from the text alone, the head alone (depth auto), and both. The table shows median
tokens per second without the prompt, and the ratios of "both" to the others. All settings must
generate the same tokens.
"""

from __future__ import annotations

import argparse
import itertools
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

from decode import dial_file
from dial_model import SHAPES, cycle_of

from mtp_gguf.native import MTPLlama

# Name of a setting: depth, and whether it drafts from the text.
SETTINGS: dict[str, tuple[Any, bool]] = {
    "off": (0, False),
    "lookup": (0, True),
    "head": ("auto", False),
    "both": ("auto", True),
}
LEAD = 4  # tokens of the answer before each copied stretch, by which the copy is recognized


def copied_prompt(cycle: list[int], share: float, stretch: int, n: int) -> list[int]:
    """A prompt that contains `share` of the next n tokens of the cycle, in stretches.

    Its last token is that before the answer. Stretches stand in reversed order, so that the end of
    one is not followed by the beginning of the next.
    """
    period = stretch if share >= 1 else round(stretch / share) if share > 0 else n
    starts = range(LEAD, n, period) if share > 0 else ()
    parts = [cycle[start - LEAD : min(start + stretch, n)] for start in starts]
    novel = cycle[-64:]  # of the other end of the cycle, so that no prompt is empty
    return [*novel, *itertools.chain(*reversed(parts)), cycle[-1]]


def speed(llm: MTPLlama, prompt: list[int], n: int) -> tuple[float, list[int]]:
    """Tokens per second after the prompt, and the tokens."""
    llm.reset()
    stream = llm.generate(prompt, temp=0.0)
    tokens = [next(stream)]
    start = time.perf_counter()
    tokens += itertools.islice(stream, n - 1)
    seconds = time.perf_counter() - start
    stream.close()
    return (n - 1) / seconds, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shape", default="0.8b", choices=SHAPES)
    parser.add_argument("--hit", type=float, default=0.8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shares", default="0,25,50,90,100")
    parser.add_argument("--stretch", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    path = dial_file(arguments.shape, arguments.hit, arguments.work)
    cycle = cycle_of(SHAPES[arguments.shape]).tolist()
    n, names = arguments.tokens, list(SETTINGS)
    print(f"| copied | {' | '.join(names)} | both / head | both / off |")
    print("| --- " * (len(names) + 3) + "|")
    with ExitStack() as stack:
        models = {
            name: stack.enter_context(
                closing(
                    MTPLlama(
                        str(path),
                        depth=depth,
                        lookup=lookup,
                        n_ctx=4 * n,
                        n_threads=arguments.threads,
                        n_threads_batch=arguments.threads,
                        profile=False,
                    )
                )
            )
            for name, (depth, lookup) in SETTINGS.items()
        }
        for share in map(int, arguments.shares.split(",")):
            prompt = copied_prompt(cycle, share / 100, arguments.stretch, n)
            speeds: dict[str, list[float]] = {name: [] for name in names}
            for i in range(arguments.rounds + 1):  # the first round warms up
                for name in names[i % len(names) :] + names[: i % len(names)]:
                    tok_s, tokens = speed(models[name], prompt, n)
                    assert tokens == cycle[:n], f"{name} at {share} %: other tokens"
                    if i:
                        speeds[name].append(tok_s)
            medians = {name: median(values) for name, values in speeds.items()}
            both = medians["both"]
            row = " | ".join(f"{medians[name]:.1f}" for name in names)
            ratios = f"{both / medians['head']:.2f} | {both / medians['off']:.2f}"
            print(f"| {share} % | {row} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
