"""Decoding speed with drafts from the text, by how much of the answer copies the prompt.

    python benchmarks/lookup.py --work FOLDER [--shape 0.8b] [--hit 0.8] [--threads 2]
        [--shares 0,25,50,90,90/20,100] [--stretch 100] [--tokens 384] [--rounds 3]
        [--settings off,lookup,head,both]
    python benchmarks/lookup.py --work FOLDER|--model MODEL.gguf --server PATH [...]

Uses the synthetic model of dial_model.py, whose trunk follows one fixed cycle of tokens: the answer
is known beforehand, so the prompt can contain any share of it. The answer alternates between copied
stretches of --stretch tokens and novel text. At 90/20 it also replaces one token in 20 of what it
copies, as a rename does. Four settings are interleaved in every round: no drafts, drafts from the
text alone, the head alone (depth auto), and both. Each round opens their models anew, in another
order, because speeds of one setting differ by up to 15 % with where its memory lies; a text is
measured when the session has generated it once. The table shows median tokens per second without
the prompt, and the ratios of "both" to the others. All settings must generate the same tokens.

With shares of 0 and 100, two columns show what changes between copied and novel text cost: the
speed of "both" over that of as many copied and novel tokens at the speeds of 100 and 0 %. For
"switches", the copy at 100 % is one of the same stretches in another order, so it has as many ends,
at which a draft is rejected that nothing can foresee: what is left is what the other kind of text
in between costs, until a copy is recognized and rates fit again. For "ends, too", it is one long
stretch.

With --model, the prompts of kind "edit" of `mtp-gguf bench` (rename in a Python function, a table
as JSON, a notice again) are answered by any model instead. --server adds llama-server's own types
of n-gram drafts on the same prompts, alone and with its draft-mtp, and its `lookup` if it has it
(patches/), also on those of the synthetic model. They are started anew for each answer, because
some types draft from the answers to earlier requests, and would copy the same answer from there.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from decode import dial_file, generated, opened, server, server_round
from dial_model import SHAPES, cycle_of
from measuring import heading, options, row, words

from mtp_gguf.bench.prompts import SETS
from mtp_gguf.bench.stats import rotated
from mtp_gguf.native.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mtp_gguf.native import MTPLlama

# Name of a setting: depth, and whether it drafts from the text.
SETTINGS: dict[str, tuple[Any, bool]] = {
    "off": (0, False),
    "lookup": (0, True),
    "head": ("auto", False),
    "both": ("auto", True),
}
# llama-server's types of drafts, each with and without those of the head.
SERVER_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
LEAD = 4  # tokens of the answer before each copied stretch, by which the copy is recognized
WARM_UP = SETS["code"][0]  # of servers: another text than those that are measured
WARM = 32  # tokens before a measurement without drafts, which has nothing to learn


def copied_parts(share: float, stretch: int, n: int) -> list[range]:
    """The places of an answer of n tokens that copy the prompt: `share` of it, in stretches."""
    if share <= 0:
        return []
    starts = range(LEAD, n, stretch if share >= 1 else round(stretch / share))
    return [range(start, min(start + stretch, n)) for start in starts]


def copied_prompt(
    cycle: list[int], share: float, stretch: int, n: int, replaced: int = 0
) -> list[int]:
    """A prompt that contains `share` of the next n tokens of the cycle, in stretches.

    replaced: one token in so many is another one in the prompt; 0: none.
    Its last token is that before the answer. Stretches stand in reversed order, so that the end of
    one is not followed by the beginning of the next.
    """
    parts = [cycle[part.start - LEAD : part.stop] for part in copied_parts(share, stretch, n)]
    others = itertools.count(len(cycle))  # tokens that are not in the cycle
    for part in parts if replaced else ():
        for i in range(replaced - 1, len(part), replaced):
            part[i] = next(others)
    novel = cycle[-64:]  # of the other end of the cycle, so that no prompt is empty
    return [*novel, *itertools.chain(*reversed(parts)), cycle[-1]]


def speed(llm: MTPLlama, prompt: list[int], n: int) -> tuple[float, list[int]]:
    """Tokens per second after the prompt, and the tokens."""
    tokens, seconds = generated(llm, prompt, n - 1)
    return (n - 1) / seconds, tokens


def loaded(
    stack: ExitStack, path: Path, arguments: argparse.Namespace, names: Sequence[str]
) -> dict[str, MTPLlama]:
    """The model in each of some settings."""
    n_ctx = max(4 * arguments.tokens, 1024)
    return {
        name: stack.enter_context(
            opened(path, SETTINGS[name][0], n_ctx, arguments.threads, lookup=SETTINGS[name][1])
        )
        for name in names
    }


def compare(
    arguments: argparse.Namespace, path: Path, prompts: dict[str, list[int]], warm_up: list[int]
) -> None:
    """A table of tokens per second by prompt, ours and, with --server, llama-server's."""
    n = arguments.tokens
    rows: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        models = loaded(stack, path, arguments, arguments.settings)
        servers = dict(server_settings(arguments))
        for i in range(arguments.rounds + 1):  # the first round warms up
            for at, prompt in enumerate(prompts.values()):
                expected: list[int] = []
                for name, model in models.items():
                    tok_s, tokens = speed(model, prompt, n)
                    expected = expected or tokens
                    assert tokens == expected, f"{name}: other tokens"
                    if i:
                        rows.setdefault(name, [[] for _ in prompts])[at].append(tok_s)
            for name, at in itertools.product(servers, range(len(prompts)) if i else ()):
                with server(arguments.server, path, 0, arguments.threads, *servers[name]) as url:
                    server_round(url, warm_up, n)
                    tok_s = server_round(url, list(prompts.values())[at], n)
                    rows.setdefault(name, [[] for _ in prompts])[at].append(tok_s)
    heading("drafts", *prompts)
    for name, values in rows.items():
        row(name, *(f"{median(v):.1f}" for v in values))


def edits(replaced: int) -> str:
    return f", one in {replaced} replaced" if replaced else ""


def server_settings(arguments: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Names and options of servers: each type of drafts alone and with the head."""
    if not arguments.server:
        return
    usage = subprocess.run([arguments.server, "--help"], capture_output=True, text=True, check=True)
    own = ("lookup",) if ",lookup" in usage.stdout else ()
    for kind in ("none", *SERVER_TYPES, *own):
        for types in (kind, f"draft-mtp,{kind}".removesuffix(",none")):
            options = ["--spec-type", types]
            if "mtp" in types:
                options += ["--spec-draft-n-max", "auto" if kind in own else "2"]
            yield f"llama-server, {types}", options


def main() -> None:
    parser = options(
        __doc__, {"--hit": 0.8, "--threads": 2, "--stretch": 100, "--tokens": 384, "--rounds": 3}
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--work", type=Path)
    source.add_argument("--model", type=Path)
    parser.add_argument("--server")
    parser.add_argument("--shape", default="0.8b", choices=SHAPES)
    parser.add_argument("--shares", default="0,25,50,90,90/20,100")
    parser.add_argument("--settings", type=words, default=[*SETTINGS])
    arguments = parser.parse_args()
    if arguments.model:
        with Vocabulary(arguments.model) as vocabulary:
            texts = [vocabulary.encode(text).tolist() for text in (*SETS["edit"], WARM_UP)]
        names = ("rename", "table as JSON", "notice")
        compare(arguments, arguments.model, dict(zip(names, texts, strict=False)), texts[-1])
        return
    path = dial_file(arguments.shape, arguments.hit, arguments.work)
    cycle = cycle_of(SHAPES[arguments.shape]).tolist()
    n, names = arguments.tokens, arguments.settings
    shares = [
        (int(share), int(replaced or 0))
        for share, replaced in re.findall(r"(\d+)(?:/(\d+))?", arguments.shares)
    ]
    if arguments.server:
        prompts = {
            f"{share} %{edits(replaced)}": copied_prompt(
                cycle, share / 100, arguments.stretch, n, replaced
            )
            for share, replaced in shares
        }
        compare(arguments, path, prompts, cycle[-2 * n : -n])
        return
    rows = [
        (share, replaced, copied_prompt(cycle, share / 100, arguments.stretch, n, replaced))
        for share, replaced in shares
    ]
    one_copy = copied_prompt(cycle, 1.0, n, n)
    speeds: dict[tuple[int, int, str], list[float]] = {}
    whole: list[float] = []  # of "both" at 100 % in one stretch
    for i in range(arguments.rounds):
        with ExitStack() as stack:
            models = loaded(stack, path, arguments, rotated(names, i))

            def learned(name: str, prompt: list[int], models: dict[str, MTPLlama]) -> float:
                """The speed in a session that knows such texts."""
                speed(models[name], prompt, n if SETTINGS[name] != SETTINGS["off"] else WARM)
                tok_s, tokens = speed(models[name], prompt, n)
                assert tokens == cycle[:n], f"{name}: other tokens"
                return tok_s

            for share, replaced, prompt in rows:
                for name in models:
                    found = speeds.setdefault((share, replaced, name), [])
                    found.append(learned(name, prompt, models))
            if "both" in names:
                whole.append(learned("both", one_copy, models))
    heading("copied", *names, "both / head", "both / off", "switches", "ends, too")
    for share, replaced, _ in rows:
        by_name = {name: speeds[share, replaced, name] for name in names}
        line = [f"{median(values):.1f}" for values in by_name.values()]
        for other in ("head", "off"):
            known = "both" in by_name and other in by_name
            line.append(f"{median(by_name['both']) / median(by_name[other]):.2f}" if known else "")
        novel, copies = (speeds.get((pure, 0, "both"), []) for pure in (0, 100))
        copied = sum(map(len, copied_parts(share / 100, arguments.stretch, n)))
        for pure in (copies, whole):
            if replaced or not 0 < share < 100 or not pure or not novel:
                line.append("")
                continue
            each = zip(by_name["both"], pure, novel, strict=True)
            line.append(
                f"{median(b * (copied / p + (n - copied) / q) / n for b, p, q in each):.3f}"
            )
        row(f"{share} %{edits(replaced)}", *line)


if __name__ == "__main__":
    main()
