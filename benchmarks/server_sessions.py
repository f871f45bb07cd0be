"""Measure what --session-dir gains in long conversations, and what writing them costs.

    python benchmarks/server_sessions.py MODEL.gguf --work FOLDER [--stock LLAMA_SERVER]
        [--patched LLAMA_SERVER] [--part turns|writing] [--tokens 1500] [--rounds 3] [--threads 2]

`turns`: two clients alternate on one slot. Their conversations begin with --tokens tokens, of which
two thirds, such as a system prompt and tools, are the same. Each turn adds what a tool has returned
and asks for an answer, whose first half, its thoughts, is missing in the next prompt. After half of
the turns the server is started again. Three servers do that one after the other: the patched one
(that of `mtp-gguf build-server`) with and without --session-dir, and a stock one. The table has the
seconds to the first token, and how many tokens were read.

`writing`: while one slot decodes, another one reads a new conversation, is idle, and is written.
The table has the speed of the first slot from the copy of the other one's states until the file is
complete, relative to its speed afterwards, when both slots are as they were.
Tokens are counted by the server, which sends none until the characters of a text are complete.
"""

from __future__ import annotations

import argparse
import json
import shutil
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from decode import request, server
from measuring import heading, options, patched_server, row

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS, TURNS = 2, 4
RESULT, ANSWER = 200, 32  # tokens that a turn adds
CONTEXT = 4096  # of a slot, beyond the first tokens of a conversation
SHORT, DECODED = 32, 3000  # tokens of the slot that decodes, at most
IDLE = 1.9  # seconds; after two, the states of an idle slot are copied, and then written
QUIET = 4.0  # seconds, after which nothing is left to write
REST = 4.0  # seconds of decoding afterwards


def stream(url: str, prompt: list[int], tokens: int) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events of a greedy completion, each with the moment at which it came."""
    more = {"stream": True, "return_tokens": True, "timings_per_token": True}
    with urllib.request.urlopen(request(url, prompt, tokens, **more), timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield time.perf_counter(), json.loads(line[6:])


def talk(url: str, text: list[int]) -> tuple[float, int]:
    """Extend a conversation by an answer without its thoughts; what its first token took."""
    began = time.perf_counter()
    first, tokens, read = 0.0, [], 0
    for moment, event in stream(url, text, ANSWER):
        first = first or moment - began
        tokens += event.get("tokens", [])
        read = event.get("timings", {}).get("prompt_n", read)
    text += tokens[ANSWER // 2 : ANSWER]
    return first, read


def measure_turns(arguments: argparse.Namespace, binary: Path, *options: str) -> list[Any]:
    """Seconds to the first token and tokens read for each turn of each client."""
    draw = np.random.default_rng(1)
    texts = draw.integers(0, 20_000, (CLIENTS, arguments.tokens)).tolist()
    n_same = arguments.tokens * 2 // 3
    texts = [texts[0][:n_same] + text[n_same:] for text in texts]
    options = ("-c", str(arguments.tokens + CONTEXT), *options)
    found = []
    for _ in range(2):
        with server(binary, arguments.model, 0, arguments.threads, *options) as url:
            for _ in range(TURNS // 2):
                for text in texts:
                    n_before = len(text)
                    found.append((n_before, *talk(url, text)))
                    text.extend(draw.integers(0, 20_000, RESULT).tolist())
    return found


def print_turns(arguments: argparse.Namespace, patched: Path, folder: Path) -> None:
    sides = {
        "with `--session-dir`": measure_turns(arguments, patched, "--session-dir", str(folder)),
        "without": measure_turns(arguments, patched),
    }
    if arguments.stock:
        sides["stock"] = measure_turns(arguments, arguments.stock)
    heading("turn", "prompt", *(cell for name in sides for cell in (f"{name}: s", "tokens")))
    for i, rows in enumerate(zip(*sides.values(), strict=True)):
        turn, client = divmod(i, CLIENTS)
        restarted = ", after a restart" if turn == TURNS // 2 else ""
        cells = (cell for _, seconds, read in rows for cell in (f"{seconds:.2f}", f"{read:,}"))
        row(f"{turn + 1} of client {client + 1}{restarted}", f"{rows[0][0]:,}", *cells)
    totals = ([sum(r[i] for r in rows) for i in (1, 2)] for rows in sides.values())
    row("all", "", *(cell for seconds, read in totals for cell in (f"{seconds:.1f}", f"{read:,}")))


def settle(folder: Path) -> set[Path]:
    """Wait until all slots that are idle have been written; the files that are there."""
    files, since = set(folder.iterdir()), time.perf_counter()
    while time.perf_counter() < since + QUIET:
        time.sleep(0.1)
        found = set(folder.iterdir())
        if found != files:
            files, since = found, time.perf_counter()
    return files


def speed(moments: list[float], counts: list[int], start: float, end: float) -> float:
    """Tokens per second between two moments, with `counts` tokens decoded at `moments`."""
    first, last = np.interp([start, end], moments, counts)
    return float(last - first) / (end - start)


def speed_while_writing(url: str, prompt: list[int], folder: Path) -> tuple[float, float]:
    """The speed of a slot while another one is written, relative to its other speed; seconds."""
    known = settle(folder)
    began = ended = 0.0

    def watch() -> None:
        nonlocal began, ended
        for _ in stream(url, prompt, 1):
            pass
        began = time.perf_counter() + IDLE
        while not set(folder.glob("*.session")) - known:
            time.sleep(0.01)
        ended = time.perf_counter()

    watcher = threading.Thread(target=watch, daemon=True)
    moments: list[float] = []
    counts: list[int] = []
    for moment, event in stream(url, prompt[-SHORT:], DECODED):
        if not moments:
            watcher.start()
        moments.append(moment)
        counts.append(event["timings"]["predicted_n"])
        if ended and moment > ended + REST:
            break
    if not ended:
        raise SystemExit(f"nothing was written while {DECODED} tokens were decoded")
    afterwards = speed(moments, counts, ended, moments[-1])
    return speed(moments, counts, began, ended) / afterwards, ended - began


def print_writing(arguments: argparse.Namespace, patched: Path, folder: Path) -> None:
    draw = np.random.default_rng(1)
    slots = ("-np", "2", "-c", str(2 * (arguments.tokens + CONTEXT)))
    more = (*slots, "--session-dir", str(folder))
    with server(patched, arguments.model, 0, arguments.threads, *more) as url:
        rounds = [
            speed_while_writing(url, draw.integers(0, 20_000, arguments.tokens).tolist(), folder)
            for _ in range(arguments.rounds)
        ]
    size = max(file.stat().st_size for file in folder.iterdir())
    print(f"files of {size / 1e6:.0f} MB, each written in {median(s for _, s in rounds):.2f} s\n")
    heading("speed of a slot while another one is written", "bar")
    shares = sorted(share for share, _ in rounds)
    row(f"{median(shares):.3f} ({shares[0]:.3f} to {shares[-1]:.3f})", "0.95 or more")


def main() -> None:
    parser = options(__doc__, {"--tokens": 1500, "--rounds": 3, "--threads": 2})
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="for the sessions")
    parser.add_argument("--stock", type=Path)
    parser.add_argument("--patched", type=Path, help="default: that of `mtp-gguf build-server`")
    parser.add_argument("--part", choices=("turns", "writing"))
    arguments = parser.parse_args()
    patched = patched_server(parser, arguments.patched)
    folder = arguments.work / "sessions"
    with ExitStack() as stack:
        for part, measure in (("turns", print_turns), ("writing", print_writing)):
            if arguments.part in (None, part):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                measure(arguments, patched, folder)
                print()


if __name__ == "__main__":
    main()
