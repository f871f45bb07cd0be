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
import itertools
import json
import os
import platform
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measuring import heading, new_process, numbers, options, row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Measure = Callable[[str, int], float]

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
        n_ctx: int = PROMPT + 2048,
    ) -> None:
        # Only the measuring processes load libraries.
        from mtp_gguf.native.runtime import llama_cpp  # noqa: PLC0415

        self.api, self.clock = llama_cpp, clock
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = repack
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        self.params = llama_cpp.llama_context_default_params()
        self.params.n_ctx = n_ctx
        self.params.n_batch = self.params.n_ubatch = LONG_PROMPT
        self.params.n_rs_seq = drafts
        self.params.n_threads = self.params.n_threads_batch = threads
        self.begin()
        vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.ids = np.random.default_rng(1).integers(0, usable(vocab), n_ctx).tolist()

    def begin(self) -> None:
        """Return a context with these parameters."""
        self.context = self.api.llama_init_from_model(self.model, self.params)
        self.memory = self.api.llama_get_memory(self.context)
        self.batch = self.api.llama_batch_init(LONG_PROMPT, 0, 1)
        self.at = 0

    def beside(self, **params: object) -> Trunk:
        """Return another context of the model, with these parameters changed."""
        other = copy.copy(self)
        other.params = type(self.params).from_buffer_copy(self.params)
        for name, value in params.items():
            setattr(other.params, name, value)
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

    def verify(self, count: int, kept: int = 1) -> float:
        """Return the milliseconds of a batch with all logits and of rolling back all but `kept`."""
        if self.at + count > len(self.ids):
            self.start(PROMPT)
        took = self.decode(count, True)
        began = self.clock()
        if kept < count:
            self.at -= count - kept
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
    from decode import opened  # noqa: PLC0415 - as above

    llm = opened(path, depth, context + 960, threads)
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


_loaded: dict[str | int, Any] = {}  # of a measuring process: its trunk, and generations by depth


def measure(arguments: argparse.Namespace, repack: bool, kind: str, number: int) -> float:
    """Measure a kind of work once, in a measuring process."""
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    path, threads, context = arguments.model, arguments.threads, arguments.context
    key = number if kind == "decode" else "trunk"
    if key not in _loaded:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what llama.cpp says
        if kind == "decode":
            _loaded[key] = generation(path, threads, number, context, clock)
        else:
            drafts = max(arguments.batches) - 1
            _loaded[key] = Trunk(path, threads, drafts, repack, clock, context + 2048)
    if kind == "decode":
        return float(_loaded[key]())
    trunk: Trunk = _loaded[key]
    return trunk.start(number) if kind == "prompt" else trunk.verify(number)


def start(
    stack: ExitStack,
    arguments: argparse.Namespace,
    libraries: str,
    repack: bool = True,
    kernels: bool = False,
) -> Measure:
    """Start a measuring process with `libraries`, a value of MTP_GGUF_LIBS."""
    variables = {"MTP_GGUF_LIBS": libraries} | ({} if kernels else {"MTP_GGUF_KERNELS": "0"})
    process = stack.enter_context(new_process(**variables))
    return lambda kind, number: process.submit(measure, arguments, repack, kind, number).result()


class Rows:
    """Alternates requests between the sides; a row is printed before the next is measured."""

    def __init__(self, sides: dict[str, Measure], asked: int, rounds: int, until: float) -> None:
        """asked: the number of rows to come; until: the time by which the last should be ready."""
        self.sides, self.left, self.rounds, self.until = sides, asked, rounds, until
        self.results: dict[str, dict[str, float]] = {}

    def ask(self, kind: str, number: int, sides: Sequence[str] = ()) -> dict[str, float]:
        """Return the median of each side, or of these; the first round warms up and is dropped.

        Runs as many rounds as fit a fair share of the remaining time, at least one.
        """
        share = time.monotonic() + (self.until - time.monotonic()) / self.left
        self.left -= 1
        seen: dict[str, list[float]] = {side: [] for side in sides or self.sides}
        for i in range(self.rounds + 1):
            for side, values in seen.items():
                value = self.sides[side](kind, number)
                if i:
                    values.append(value)
            if i and time.monotonic() > share:
                break
        found = {side: statistics.median(values) for side, values in seen.items()}
        self.results[f"{kind} {number}"] = found
        return found


def batches(rows: Rows, counts: list[int], context: int) -> None:
    """Print the table of batches and a prompt, relative to a batch of one if that is first."""
    sides = list(rows.sides)
    titles = [title for side in sides for title in (f"{side} ms", "to one")]
    heading("batch", *titles, *(f"patched / {side}" for side in sides[:-1]))
    for ask in rows.sides.values():
        ask("prompt", context)
    one: dict[str, float] = {}
    for count in counts:
        found = rows.ask("batch", count)
        one = found if count == 1 else one
        to_one = {side: f"{found[side] / one[side]:.2f}" if one else "" for side in sides}
        cells = [cell for side in sides for cell in (f"{found[side]:.1f}", to_one[side])]
        row(count, *cells, *patched_to(found))
    prompt = max(LONG_PROMPT, context)
    found = rows.ask("prompt", prompt)
    cells = [cell for side in sides for cell in (f"{found[side]:.0f}", "")]
    row(f"prompt of {prompt}", *cells, *patched_to(found))


def patched_to(found: dict[str, float]) -> list[str]:
    """Return the ratio of patched to each other side."""
    return [f"{found['patched'] / found[side]:.2f}" for side in found if side != "patched"]


def decoding(rows: Rows, depths: list[int]) -> None:
    """Print tokens per second by depth, relative to plain decoding if depth 0 is first."""
    print()
    heading("depth", "stock tok/s", "patched tok/s", "patched / stock", "/ stock at depth 0")
    plain = 0.0
    for depth in depths:
        s, p = rows.ask("decode", depth, ("stock", "patched")).values()
        plain = s if depth == 0 else plain
        to_plain = f"{p / plain:.2f}" if plain else ""
        row(depth, f"{s:.1f}", f"{p:.1f}", f"{p / s:.2f}", to_plain)


def main() -> None:
    parser = options(
        __doc__, {"--threads": 2, "--context": PROMPT, "--rounds": 15, "--seconds": 240.0}
    )
    parser.add_argument("model")
    parser.add_argument("--patched", type=Path, help="folder of the patched libraries")
    parser.add_argument(
        "--depths", type=numbers, default=[0, 1, 2, 3], help="depths to decode at; empty: none"
    )
    parser.add_argument(
        "--batches", type=numbers, default=[1, 2, 3, 4], help="batch sizes in tokens"
    )
    parser.add_argument(
        "--not-repacked",
        action="store_true",
        help="also measure stock libraries without repacked weights",
    )
    parser.add_argument(
        "--kernels", action="store_true", help="plug our kernels into the patched libraries"
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="measure CPU time, for busy machines; use with --threads 1",
    )
    arguments = parser.parse_args()
    if not Path(arguments.model).is_file():
        parser.error(f"model: expected a GGUF file, found none at {arguments.model}")
    if not arguments.batches or min(arguments.batches) < 1 or max(arguments.batches) > PROMPT:
        parser.error(f"--batches: expected numbers from 1 to {PROMPT}")
    if arguments.context < 1:
        parser.error(f"--context: expected 1 or more, found {arguments.context}")
    asked = len(arguments.batches) + 1 + len(arguments.depths)
    with ExitStack() as stack:
        sides = {"stock": start(stack, arguments, "stock")}
        if arguments.not_repacked:
            sides["not repacked"] = start(stack, arguments, "stock", repack=False)
        patched = str(arguments.patched or "fast")
        sides["patched"] = start(stack, arguments, patched, kernels=arguments.kernels)
        rows = Rows(sides, asked, arguments.rounds, time.monotonic() + arguments.seconds)
        batches(rows, arguments.batches, arguments.context)
        if arguments.depths:
            decoding(rows, arguments.depths)
    machine = {"machine": platform.machine(), "threads": arguments.threads}
    print(json.dumps({"model": Path(arguments.model).name, **machine, "results": rows.results}))


if __name__ == "__main__":
    main()
