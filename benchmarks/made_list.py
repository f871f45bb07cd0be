"""Compare the speed of a list made at load with a counted one, and with the whole vocabulary.

    python benchmarks/made_list.py --work FOLDER [--shape 0.8b] [--depths 1,2,3,auto] [--rounds 9]

Builds the synthetic model whose head is right 80 % of the time, and two copies of it in FOLDER: one
without a draft vocabulary, and one with a list that was counted on the texts of this repository.
All generate the same tokens, interleaved in slices, so that a slow second of the machine affects
all of them. Every token of the text is new, so the made list is chosen again as often as in any
text of that length. The whole vocabulary is what `--fastmtp-size -1` drafts over.

Prints for each depth the median over the rounds of the made list's speed divided by the other's,
with its 95 % interval (bootstrap), the speeds, and the share of first drafts that were accepted.
The first round warms up. Fails if the sides do not accept alike: then the ratio would say nothing
about speed.
"""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from decode import PROMPT_TOKENS, dial_file
from depth_auto import rate, write_all, writer_of
from dial_model import SHAPES, cycle_of
from measuring import median_with_interval, options, words

from mtp_gguf.bench.model import BenchModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mtp_gguf.native.session import Depth

HIT = 0.8
OTHERS = ("counted", "whole")
TEXTS = Path(__file__).resolve().parents[1] / "docs"


def copies(file: Path) -> tuple[Path, Path]:
    """The model without a draft vocabulary, and with a counted one; built unless they are there."""
    without = file.with_name(f"{file.stem}-no-list.gguf")
    counted = file.with_name(f"{file.stem}-counted.gguf")
    corpus = ["--corpus", *map(str, sorted(TEXTS.glob("*.md")))]
    for copy, command in (
        (without, ["remove", str(file), "-o", str(without)]),
        (counted, ["add", str(without), *corpus, "-o", str(counted)]),
    ):
        if not copy.exists():
            run = ["mtp-gguf", "fastmtp", *command]
            subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    return without, counted


def one_round(
    models: Sequence[tuple[BenchModel, int]],
    depth: Depth,
    prompt: Sequence[int],
    n: int,
    first: int,
) -> list[tuple[float, float]]:
    """Tokens per second and acceptance of first drafts of each side, over n tokens.

    models: with the size of the draft vocabulary. first: the side that begins.
    """
    with ExitStack() as stack:
        writers = [writer_of(stack, model, depth, size) for model, size in models]
        write_all(writers, prompt, n, first)
        return [(rate(w.trace, 0, n), w.session.stats().acceptance[0]) for w in writers]


def main() -> None:
    parser = options(__doc__, {"--threads": 2, "--tokens": 256, "--rounds": 9})
    parser.add_argument("--work", type=Path, required=True, help="folder for the models")
    parser.add_argument("--shape", choices=SHAPES, default="0.8b")
    parser.add_argument("--against", nargs="+", choices=OTHERS, default=OTHERS)
    parser.add_argument("--depths", type=words, default=["1", "2", "3", "auto"])
    arguments = parser.parse_args()
    n = arguments.tokens
    files = copies(dial_file(arguments.shape, HIT, arguments.work))
    cycle = cycle_of(SHAPES[arguments.shape])
    starts = np.random.default_rng(1).integers(0, len(cycle), arguments.rounds + 1)
    with ExitStack() as stack:
        n_ctx = PROMPT_TOKENS + n + 64
        without_list, with_list = (
            stack.enter_context(BenchModel(path, n_ctx=n_ctx, threads=arguments.threads))
            for path in files
        )
        others = {"counted": (with_list, 0), "whole": (without_list, -1)}
        sides = [(without_list, 0), *(others[name] for name in arguments.against)]
        for word in arguments.depths:
            depth: Depth = "auto" if word == "auto" else int(word)
            rounds = [
                one_round(sides, depth, np.roll(cycle, -start)[:PROMPT_TOKENS].tolist(), n, i)
                for i, start in enumerate(starts)
            ]
            report(word, arguments.against, np.array(rounds[1:]))


def report(depth: str, others: Sequence[str], rounds: NDArray[np.float64]) -> None:
    """Print the lines of a depth. rounds: [round, side, (tokens per second, acceptance)]."""
    speeds, accepted = np.median(rounds, axis=0).T
    if np.ptp(accepted) > 0.03:
        raise SystemExit(f"depth {depth}: the sides accept {accepted} of first drafts, not alike")
    for i, other in enumerate(others, 1):
        ratio, low, high = median_with_interval(rounds[:, 0, 0] / rounds[:, i, 0])
        print(
            f"depth {depth}: made / {other} {ratio:.3f} ({low:.3f} to {high:.3f}), "
            f"{len(rounds)} rounds, {speeds[0]:.1f} and {speeds[i]:.1f} tok/s, "
            f"accepted {accepted[0]:.1%} and {accepted[i]:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
