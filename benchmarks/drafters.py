"""What a cycle of each kind of drafter costs in llama-server, and how many drafts must be right.

    python benchmarks/drafters.py MODEL.gguf --work FOLDER [--drafts 1,2,4] [--tokens 48]
        [--rounds 3] [--threads 2]

MODEL.gguf has an MTP head. Drafters of Eagle-3, DFlash and DSpark are written for it with random
weights, one layer of the trunk's width, Q8_0, and a draft vocabulary of 32,000 tokens, as published
ones have. None of their drafts is accepted, so the time of an answer is that of its cycles, which
does not depend on what is drafted. With the head, a cycle gives one token and the accepted drafts.

All servers answer the same prompt in turns, in each round. The table has the medians: milliseconds
of a cycle, its drafts and tokens, and the tokens that a cycle has to give, with the one that is
always right, to be as fast as decoding without drafts and as the head. The patched server is that
of `mtp-gguf build-server`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from decode import complete, server  # noqa: E402
from gguf import GGMLQuantizationType  # noqa: E402
from measuring import (  # noqa: E402
    heading,
    in_rounds,
    numbers,
    options,
    patched_server,
    random_prompts,
    row,
)

from mtp_gguf.gguf_tools.model import open_model  # noqa: E402
from support.drafters import Shape, write_drafter  # noqa: E402

VOCABULARY = 32_000
PROMPT = 64  # tokens
HEAD, PLAIN = "MTP head", "no drafts"
KINDS = {"eagle3": "Eagle-3", "dflash": "DFlash", "dspark": "DSpark"}


@dataclass(frozen=True)
class Answer:
    """Milliseconds of a cycle; the drafts that it verified and the tokens it gave, on average."""

    cycle: float
    drafts: float
    tokens: float


def answer(url: str, prompt: Sequence[int], tokens: int) -> Answer:
    """Complete the prompt greedily."""
    timings = complete(url, prompt, tokens, cache_prompt=False)["timings"]
    accepted = timings.get("draft_n_accepted", 0)
    cycles = timings["predicted_n"] - accepted
    drafts = timings.get("draft_n", 0)
    return Answer(
        timings["predicted_ms"] / cycles, drafts / cycles, timings["predicted_n"] / cycles
    )


def measure(arguments: argparse.Namespace, binary: Path, drafts: int) -> dict[str, Answer]:
    """The median answer of each kind of drafter that drafts so many tokens."""
    [prompt] = random_prompts(1, PROMPT)
    sides = {PLAIN: (0, ()), HEAD: (drafts, ())}
    for kind, name in KINDS.items():
        more = ("--spec-type", f"draft-{kind}", "-md", str(arguments.work / f"{kind}.gguf"))
        sides[name] = (0, (*more, "--spec-draft-n-max", str(drafts)))
    jobs = {}
    with ExitStack() as stack:
        for name, (depth, more) in sides.items():
            running = server(binary, arguments.model, depth, arguments.threads, *more)
            jobs[name] = partial(answer, stack.enter_context(running), prompt, arguments.tokens)
        rounds = in_rounds(jobs, arguments.rounds)
    return {name: middle(answers) for name, answers in rounds.items()}


def middle(answers: Sequence[Answer]) -> Answer:
    """The median of each figure."""
    return Answer(*(median(figures) for figures in zip(*map(astuple, answers), strict=True)))


def main() -> None:
    parser = options(__doc__, {"--tokens": 48, "--rounds": 3, "--threads": 2})
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="for the drafters")
    parser.add_argument("--drafts", type=numbers, default=[1, 2, 4])
    arguments = parser.parse_args()
    binary = patched_server(parser)
    with open_model(arguments.model) as model:
        prefix = f"{model.architecture}."
        feed, heads, key = (
            model.first.integer(prefix + name)
            for name in ("feed_forward_length", "attention.head_count", "attention.key_length")
        )
        small = min(VOCABULARY, model.vocabulary_size or 0)
    shape = Shape(heads or 0, key or 0, feed or 0, rank=256)
    arguments.work.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        path = arguments.work / f"{kind}.gguf"
        write_drafter(path, kind, arguments.model, shape, GGMLQuantizationType.Q8_0, d2t=small)
    heading("drafter", "drafts", "cycle, ms", "its tokens", "for plain speed", "for the head's")
    for drafts in arguments.drafts:
        found = measure(arguments, binary, drafts)
        plain, head = found[PLAIN], found[HEAD]
        for name, own in found.items():
            of_head = own.cycle * head.tokens / head.cycle
            row(
                name,
                f"{own.drafts:.2f}",
                f"{own.cycle:.1f}",
                f"{own.tokens:.2f}",
                f"{own.cycle / plain.cycle:.2f}",
                f"{of_head:.2f}",
            )


if __name__ == "__main__":
    main()
