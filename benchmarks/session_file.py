"""Measure what a session file saves: the first token of a new process, and restoring.

    python benchmarks/session_file.py --work FOLDER [--shape 0.8b] [--hit 0.8] [--tokens 8192]
        [--threads 2] [--rounds 3] [--json]

Uses the synthetic model of dial_model.py. One process reads a prompt of --tokens tokens and saves
its session. Then, in each round, one new process continues the prompt by a token from the session
file, and another one reads all of it; both must generate the same token. The time is that of the
first token, after the model is loaded; the time since the process was started is there as well.

Restoring is measured in one process, interleaved: a plain read of the session file from the page
cache into new memory, `read_session`, which checks the bytes too, and `load_session`, after which
the model holds the session. The file is read before, so that it is in the page cache. The table
shows medians.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median

from decode import dial_file, opened
from dial_model import SHAPES, cycle_of
from measuring import heading, in_new_process, options, row

from mtp_gguf.native.sessions.session_file import read_session

READS = 7  # of the file in a round


def save(model: Path, session: Path, prompt: list[int], threads: int) -> None:
    """Read the prompt and save its session."""
    with opened(model, None, len(prompt) + 256, threads) as llm:
        llm.eval(prompt)
        llm.save_session(session)


def first_token(
    model: Path, session: Path | None, prompt: list[int], threads: int, started: float
) -> tuple[int, float, float]:
    """The first token after a prompt, its seconds, and those since the process was started."""
    with opened(model, None, len(prompt) + 256, threads) as llm:
        began = time.perf_counter()
        if session:
            llm.load_session(session)
        with closing(llm.generate(prompt, temp=0.0)) as stream:
            token = next(stream)
        return token, time.perf_counter() - began, time.time() - started


def restore(model: Path, session: Path, n_ctx: int, threads: int) -> dict[str, list[float]]:
    """Seconds of reading and restoring the file, interleaved."""
    with opened(model, None, n_ctx, threads) as llm:
        ways: dict[str, Callable[[], object]] = {
            "plain read": session.read_bytes,
            "read_session": lambda: read_session(session),
            "load_session": lambda: llm.load_session(session),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(READS + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                result = way()
                if i:  # the first one warms up
                    seconds[name].append(time.perf_counter() - began)
                del result
        return seconds


def main() -> None:
    parser = options(__doc__, {"--hit": 0.8, "--tokens": 8192, "--threads": 2, "--rounds": 3})
    parser.add_argument("--work", type=Path, required=True, help="folder for the files")
    parser.add_argument("--shape", default="0.8b", choices=SHAPES)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model = dial_file(args.shape, args.hit, args.work)
    cycle = cycle_of(SHAPES[args.shape]).tolist()
    prompt = (cycle * (args.tokens // len(cycle) + 1))[: args.tokens + 1]
    session = args.work / "benchmark.session"
    in_new_process(save, model, session, prompt[:-1], args.threads)
    seconds: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        tokens = set()
        for name, file in (("session", session), ("prompt", None)):
            token, first, process = in_new_process(
                first_token, model, file, prompt, args.threads, time.time()
            )
            tokens.add(token)
            seconds.setdefault(name, []).append(first)
            seconds.setdefault(f"{name}, process", []).append(process)
        if len(tokens) > 1:
            raise SystemExit("the session continues with another token than the prompt")
        reads = in_new_process(restore, model, session, len(prompt) + 256, args.threads)
        for name, values in reads.items():
            seconds.setdefault(name, []).extend(values)
    size = session.stat().st_size
    session.unlink()
    ms = {name: median(values) * 1e3 for name, values in seconds.items()}
    ratios = {
        "prompt / session": ms["prompt"] / ms["session"],
        "prompt / session, process": ms["prompt, process"] / ms["session, process"],
        "read_session / plain read": ms["read_session"] / ms["plain read"],
        "load_session / plain read": ms["load_session"] / ms["plain read"],
    }
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs"
    if args.json:
        figures = {"machine": machine, "tokens": args.tokens, "bytes": size, "ms": ms}
        print(json.dumps({**figures, "ratios": ratios, "seconds": seconds}))
        return
    print(f"{args.shape} shape, {args.tokens} tokens, {size / 1e6:.0f} MB, {machine}\n")
    heading("what", "ms")
    for name, value in ms.items():
        row(name, f"{value:.1f}")
    print()
    heading("ratio", "")
    for name, ratio in ratios.items():
        row(name, f"{ratio:.2f}")


if __name__ == "__main__":
    main()
