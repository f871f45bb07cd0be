"""Measure the cost of verification, stock and patched: batches, a prompt, decoding.

    python benchmarks/verify.py MODEL.gguf [--patched FOLDER] [--depths 0,1,2,3] [--rounds 15]
        [--seconds 240] [--batches 1,2,3,4] [--context 64] [--not-repacked] [--kernels]

FOLDER contains other patched libraries (default: those that mtp-gguf ships); the stock ones are
those that llama-cpp-python installed. One process for each keeps the model loaded, and the two
alternate with every single measurement, so that a slow minute affects both; the tables show
medians. Neither has the kernels of libmtp_kernels, unless --kernels plugs them into the patched
ones: then llama.cpp as it comes is compared with what this package installs. A row is
printed when it is ready, with fewer rounds if --seconds leaves no time for all.

A batch decodes that many tokens after --context others, with the logits of all, in a context that
can roll back the drafts of the largest batch; then all but one token are rolled back. Decoding uses
MTPLlama as in benchmarks/decode.py, for synthetic models (benchmarks/dial_model.py).
--not-repacked adds the stock libraries with weights in the layout of the file.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPT = 64
LONG_PROMPT = 512
TOKENS = 128  # generated in one measurement


class Trunk:
    """A context of the model's trunk, used through llama.cpp's own C API."""

    def __init__(
        self,
        path: str,
        threads: int,
        drafts: int,
        repack: bool,
        clock: Callable[[], float],
        context: int = PROMPT,
    ) -> None:
        # Only the measuring processes load libraries.
        from mtp_gguf.native.runtime import llama_cpp  # noqa: PLC0415

        self.api, self.clock = llama_cpp, clock
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = repack
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        self.params = llama_cpp.llama_context_default_params()
        self.params.n_ctx = context + 2048
        self.params.n_batch = self.params.n_ubatch = LONG_PROMPT
        self.params.n_rs_seq = drafts
        self.params.n_threads = self.params.n_threads_batch = threads
        self.begin()
        vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.ids = np.random.default_rng(1).integers(0, usable(vocab), self.params.n_ctx).tolist()

    def begin(self) -> None:
        """Return a context with these parameters."""
        self.context = self.api.llama_init_from_model(self.model, self.params)
        self.memory = self.api.llama_get_memory(self.context)
        self.batch = self.api.llama_batch_init(LONG_PROMPT, 0, 1)
        self.at = 0

    def beside(self, callback: Any) -> Trunk:
        """Return another context of the model, which calls back for each operation."""
        other = copy.copy(self)
        other.params = type(self.params).from_buffer_copy(self.params)
        other.params.cb_eval = ctypes.cast(callback, type(self.params.cb_eval))
        other.begin()
        return other

    def decode(self, count: int, all_rows: bool) -> float:
        """Return the milliseconds of one decode of the next `count` tokens."""
        for i in range(count):
            self.batch.token[i] = self.ids[self.at + i]
            self.batch.pos[i] = self.at + i
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = 0
            self.batch.logits[i] = all_rows or i == count - 1
        self.batch.n_tokens = count
        began = self.clock()
        status = self.api.llama_decode(self.context, self.batch)
        self.api.llama_synchronize(self.context)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        self.at += count
        return (self.clock() - began) * 1e3

    def start(self, count: int) -> float:
        """Return the milliseconds of a prompt of `count` tokens with empty memory."""
        self.api.llama_memory_clear(self.memory, True)
        self.at = 0
        pieces = range(0, count, LONG_PROMPT)
        return sum(self.decode(min(LONG_PROMPT, count - piece), False) for piece in pieces)

    def verify(self, count: int) -> float:
        """Return the milliseconds of a batch with all logits and of rolling back all but one."""
        took = self.decode(count, True)
        began = self.clock()
        if count > 1:
            self.at -= count - 1
            if not self.api.llama_memory_seq_rm(self.memory, 0, self.at, -1):
                raise RuntimeError("llama_memory_seq_rm refused")
        return took + (self.clock() - began) * 1e3


def usable(vocab: int) -> int:
    """Return the number of ids before all padding and control tokens."""
    return min(20_000, vocab * 2 // 3)


def generation(
    path: str, threads: int, depth: int, context: int, clock: Callable[[], float]
) -> Any:
    """Return a function that generates once after `context` tokens, in tokens per second."""
    from mtp_gguf.native import MTPLlama  # noqa: PLC0415 - as above

    llm = MTPLlama(
        path, depth=depth, n_ctx=context + 960, n_threads=threads, n_threads_batch=threads
    )
    prompt = np.random.default_rng(1).integers(0, usable(llm.n_vocab()), context).tolist()

    def once() -> float:
        llm.reset()
        stream = llm.generate(prompt, temp=0.0)
        next(stream)
        began = clock()
        generated = len(list(itertools.islice(stream, TOKENS)))
        seconds = clock() - began
        stream.close()
        return generated / seconds

    return once


def measure(arguments: argparse.Namespace) -> None:
    """Answer requests on standard input, one per line: a kind and a number."""
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    path, threads, drafts = arguments.model, arguments.threads, max(arguments.batches) - 1
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # libraries may write to standard output
    os.dup2(2, 1)
    trunk: Trunk | None = None
    generations: dict[int, Any] = {}
    for line in sys.stdin:
        kind, number = line.split()
        n = int(number)
        if kind == "decode":
            if n not in generations:
                generations[n] = generation(path, threads, n, arguments.context, clock)
            value = generations[n]()
        else:
            repack = not arguments.not_repacked
            trunk = trunk or Trunk(path, threads, drafts, repack, clock, arguments.context)
            value = {"prompt": trunk.start, "batch": trunk.verify}[kind](n)
        print(value, file=answers)


class Process:
    """A measuring process with `libraries`, a value of MTP_GGUF_LIBS."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        libraries: str,
        repack: bool = True,
        kernels: bool = False,
    ) -> None:
        environment = {**os.environ, "MTP_GGUF_LIBS": libraries}
        if not kernels:
            environment["MTP_GGUF_KERNELS"] = "0"
        command = [sys.executable, __file__, arguments.model, "--measure"]
        command += ["--threads", str(arguments.threads)]
        command += ["--batches", ",".join(map(str, arguments.batches))]
        command += ["--context", str(arguments.context)]
        command += ["--cpu-time"] if arguments.cpu_time else []
        command += [] if repack else ["--not-repacked"]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )

    def ask(self, kind: str, number: int) -> float:
        """Request one measurement and return its result."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(kind, number, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process that measures {kind} {number} ended")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


class Rows:
    """Alternates requests between the sides; a row is printed before the next is measured."""

    def __init__(
        self, processes: dict[str, Process], asked: int, rounds: int, until: float
    ) -> None:
        """asked: the number of rows to come; until: the time by which the last should be ready."""
        self.processes, self.left, self.rounds, self.until = processes, asked, rounds, until
        self.results: dict[str, dict[str, float]] = {}

    def ask(self, kind: str, number: int, sides: Sequence[str] = ()) -> dict[str, float]:
        """Return the median of each side, or of these; the first round warms up and is dropped.

        Runs as many rounds as fit a fair share of the remaining time, at least one.
        """
        share = time.monotonic() + (self.until - time.monotonic()) / self.left
        self.left -= 1
        seen: dict[str, list[float]] = {side: [] for side in sides or self.processes}
        for i in range(self.rounds + 1):
            for side, values in seen.items():
                value = self.processes[side].ask(kind, number)
                if i:
                    values.append(value)
            if i and time.monotonic() > share:
                break
        row = {side: statistics.median(values) for side, values in seen.items()}
        self.results[f"{kind} {number}"] = row
        return row


def batches(rows: Rows, counts: list[int], context: int) -> None:
    """Print the table of batches and a prompt, relative to a batch of one if that is first."""
    sides = list(rows.processes)
    titles = [title for side in sides for title in (f"{side} ms", "to one")]
    line("batch", *titles, *(f"patched / {side}" for side in sides[:-1]))
    line(*["---"] * (1 + len(titles) + len(sides) - 1))
    for process in rows.processes.values():
        process.ask("prompt", context)
    one: dict[str, float] = {}
    for count in counts:
        row = rows.ask("batch", count)
        one = row if count == 1 else one
        to_one = {side: f"{row[side] / one[side]:.2f}" if one else "" for side in sides}
        cells = [cell for side in sides for cell in (f"{row[side]:.1f}", to_one[side])]
        line(str(count), *cells, *patched_to(row))
    prompt = max(LONG_PROMPT, context)
    row = rows.ask("prompt", prompt)
    cells = [cell for side in sides for cell in (f"{row[side]:.0f}", "")]
    line(f"prompt of {prompt}", *cells, *patched_to(row))


def patched_to(row: dict[str, float]) -> list[str]:
    """Return the ratio of patched to each other side."""
    return [f"{row['patched'] / row[side]:.2f}" for side in row if side != "patched"]


def decoding(rows: Rows, depths: list[int]) -> None:
    """Print tokens per second by depth, relative to plain decoding if depth 0 is first."""
    print()
    line("depth", "stock tok/s", "patched tok/s", "patched / stock", "/ stock at depth 0")
    line(*["---"] * 5)
    plain = 0.0
    for depth in depths:
        row = rows.ask("decode", depth, ("stock", "patched"))
        s, p = row["stock"], row["patched"]
        plain = s if depth == 0 else plain
        to_plain = f"{p / plain:.2f}" if plain else ""
        line(str(depth), f"{s:.1f}", f"{p:.1f}", f"{p / s:.2f}", to_plain)


def line(*cells: str) -> None:
    """Print a line of a table without buffering."""
    print(f"| {' | '.join(cells)} |", flush=True)


def numbers(text: str) -> list[int]:
    """Parse a comma-separated list of numbers."""
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--patched", type=Path, help="folder of the patched libraries")
    parser.add_argument(
        "--depths", type=numbers, default=[0, 1, 2, 3], help="depths to decode at; empty: none"
    )
    parser.add_argument(
        "--batches", type=numbers, default=[1, 2, 3, 4], help="batch sizes in tokens"
    )
    parser.add_argument("--context", type=int, default=PROMPT, help="tokens before a batch")
    parser.add_argument(
        "--not-repacked",
        action="store_true",
        help="also measure stock libraries without repacked weights",
    )
    parser.add_argument(
        "--kernels", action="store_true", help="plug our kernels into the patched libraries"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="rounds per row, if time allows")
    parser.add_argument("--seconds", type=float, default=240, help="approximate time to use")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="measure CPU time, for busy machines; use with --threads 1",
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not Path(arguments.model).is_file():
        parser.error(f"model: expected a GGUF file, found none at {arguments.model}")
    if arguments.measure:
        measure(arguments)
        return

    if not arguments.batches or min(arguments.batches) < 1 or max(arguments.batches) > PROMPT:
        parser.error(f"--batches: expected numbers from 1 to {PROMPT}")
    if arguments.context < 1:
        parser.error(f"--context: expected 1 or more, found {arguments.context}")
    processes = {"stock": Process(arguments, "stock")}
    if arguments.not_repacked:
        processes["not repacked"] = Process(arguments, "stock", repack=False)
    patched = str(arguments.patched or "fast")
    processes["patched"] = Process(arguments, patched, kernels=arguments.kernels)
    asked = len(arguments.batches) + 1 + len(arguments.depths)
    rows = Rows(processes, asked, arguments.rounds, time.monotonic() + arguments.seconds)
    try:
        batches(rows, arguments.batches, arguments.context)
        if arguments.depths:
            decoding(rows, arguments.depths)
    finally:
        for process in processes.values():
            process.close()
    machine = {"machine": platform.machine(), "threads": arguments.threads}
    print(json.dumps({"model": Path(arguments.model).name, **machine, "results": rows.results}))


if __name__ == "__main__":
    main()
