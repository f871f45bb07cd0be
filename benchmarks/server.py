"""Compare drafting in a stock llama-server, the patched one, and MTPLlama on the same libraries.

    python benchmarks/server.py MODEL.gguf --stock LLAMA_SERVER [--plain MODEL.gguf]
        [--depths 1,2,3] [--part alone|together] [--into ROWS.jsonl] [--side-by-side]
        [--prompts KINDS]

The patched server is the one from `mtp-gguf build-server`.

A row is one depth with one client (`alone`) or with as many clients as slots (`together`, where
the speed is the sum over all of them). Measurements within a row are interleaved, so that a slow
minute affects all of them; the row shows medians of the rounds. Each row is printed when it is
ready and saved in the file of --into, whose rows are not measured again, so a table can be measured
in several sessions. The ratios follow at the end. With --side-by-side, all rows of a part are
interleaved, because the machine's speed can change from row to row by more than two depths differ;
this takes the memory of all of them.

MODEL has a FastMTP vocabulary in the layout `ids`, which the stock server ignores; --plain names
the same model without one, for the patched server. Meant for synthetic models
(benchmarks/dial_model.py), whose acceptance rate is known; for a real model, --prompts names kinds
of the prompts of `mtp-gguf bench`, the first of each of which is answered.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from decode import kinds_of, opened, prompts_of, round_of, server, server_rounds, together
from measuring import in_rounds, numbers, options, patched_server, random_prompts

if TYPE_CHECKING:
    from collections.abc import Callable

    Speeds = dict[str, float]
    Rows = dict[tuple[str, int], Speeds]

PROMPT_TOKENS = 64
CONTEXT = 1024  # context of each slot, in tokens
PARTS = ("alone", "together")
STOCK, PATCHED, PLAIN, SESSION = "stock", "patched", "patched, no list", "session"


def main() -> None:
    arguments, patched = read_arguments()
    rows: Rows = {}
    if arguments.into and arguments.into.exists():
        for line in arguments.into.read_text().splitlines():
            row = json.loads(line)
            rows[row["part"], row["depth"]] = row["tok_s"]
    for part in PARTS if arguments.part is None else (arguments.part,):
        missing = [depth for depth in arguments.depths if (part, depth) not in rows]
        groups = [missing] if arguments.side_by_side else [[depth] for depth in missing]
        for depths in groups:
            with ExitStack() as stack:
                jobs: dict[tuple[int, str], Callable[[], float]] = {}
                for depth in depths:
                    jobs |= start(stack, arguments, patched, part, depth)
                found = in_rounds(jobs, arguments.rounds)
            measured: dict[int, Speeds] = {depth: {} for depth in depths}
            for (depth, name), speeds in found.items():
                measured[depth][name] = median(speeds)
            for depth, row in measured.items():
                rows[part, depth] = row
                print(said(part, depth, row), flush=True)
                if arguments.into:
                    line = json.dumps({"part": part, "depth": depth, "tok_s": row})
                    with arguments.into.open("a") as file:
                        file.write(line + "\n")
    print_ratios(rows)


def read_arguments() -> tuple[argparse.Namespace, Path]:
    """Read the command line and find the patched server."""
    parser = options(__doc__, {"--slots": 4, "--threads": 2, "--tokens": 128, "--rounds": 3})
    parser.add_argument("model", type=Path)
    parser.add_argument("--stock", type=Path, required=True)
    parser.add_argument("--plain", type=Path, help="MODEL without a draft vocabulary")
    parser.add_argument("--depths", type=numbers, default=[1, 2, 3])
    parser.add_argument("--part", choices=PARTS, help="measure only this part")
    parser.add_argument("--side-by-side", action="store_true", help="interleave rows, too")
    parser.add_argument("--into", type=Path, help="read and save rows in this file")
    parser.add_argument(
        "--prompts", type=kinds_of, help="kinds of the prompts of bench, for a real model"
    )
    return parser.parse_args(), patched_server(parser)


def start(
    stack: ExitStack, arguments: argparse.Namespace, patched: Path, part: str, depth: int
) -> dict[tuple[int, str], Callable[[], float]]:
    """Start what a row compares; return functions that measure tokens per second."""
    slots = 1 if part == "alone" else arguments.slots
    prompts = random_prompts(slots, PROMPT_TOKENS)
    if arguments.prompts:
        prompts = prompts_of(arguments.model, arguments.prompts)
        if slots > 1:
            prompts = [prompts[i % len(prompts)] for i in range(slots)]
    kinds = {STOCK: (arguments.stock, arguments.model), PATCHED: (patched, arguments.model)}
    if arguments.plain:
        kinds[PLAIN] = (patched, arguments.plain)
    runs: dict[tuple[int, str], Callable[[], float]] = {}
    for name, (binary, model) in kinds.items():
        more = ["-np", str(slots), "-c", str(slots * CONTEXT)]
        url = stack.enter_context(server(binary, model, depth, arguments.threads, *more))
        runs[depth, name] = partial(
            together if slots > 1 else server_rounds, url, prompts, arguments.tokens
        )
    if slots == 1:
        llm = stack.enter_context(opened(arguments.model, depth, CONTEXT, arguments.threads))
        runs[depth, SESSION] = lambda: round_of(llm, prompts, arguments.tokens)["tok_s"]
    return runs


def said(part: str, depth: int, row: Speeds) -> str:
    """Return a row as one line of text."""
    words = ", ".join(f"{name} {speed:.1f}" for name, speed in row.items())
    return f"{part}, depth {depth}: {words} tok/s"


def print_ratios(rows: Rows) -> None:
    """Print the ratios of the rows."""
    for part in PARTS:
        table = {depth: row for (of, depth), row in rows.items() if of == part}
        best = {
            name: max(row[name] for row in table.values() if name in row)
            for name in dict.fromkeys(name for row in table.values() for name in row)
        }
        for name in (PATCHED, PLAIN):
            if name in best:
                ratio = best[name] / best[STOCK]
                print(f"{part}: {name} {ratio:.2f} x {STOCK}, each at its best depth")
        for depth, row in table.items():
            if SESSION in row:
                print(f"depth {depth}: {PATCHED} {row[PATCHED] / row[SESSION]:.2f} x {SESSION}")


if __name__ == "__main__":
    main()
