"""Compare builds of llama.cpp and its forks by their own llama-bench: prompts, batches, tokens.

    python benchmarks/engines.py MODEL.gguf NAME=FOLDER [NAME=FOLDER ...] [--threads 2,4]
        [--prompts 512,4096] [--batches 1,2,4,8,12,16,32,64] [--generate 48] [--rounds 3]

Each FOLDER has a llama-bench, or is above one (FOLDER/bin). The sides alternate with every single
measurement, so that a slow minute affects all of them; the tables show medians, and each side's in
relation to the first. A batch is a prompt of that many tokens, with the logits of its last token
only; benchmarks/verify.py measures batches with all logits. Flash attention is on for all sides.

Reading memory: the file's bytes, read from memory with that many threads, alternating with the
sides, because neighbours of a virtual machine take a changing part of the bandwidth. A single
token reads all tensors but the table of input embeddings and the MTP head; "of reading" is the
median over rounds of its share of that speed. Recurrent states, which are read and written, are
not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measuring import heading, numbers, options, row

from mtp_gguf.gguf_tools.model import open_model

READ_SECONDS = 0.5  # for a measurement of reading, about as long as one of a side
BATCH_TOKENS = 256  # measured for each batch size and round, in as many repetitions
PIECES = 16  # of the file for each thread


@dataclass(frozen=True)
class Side:
    """A program to measure."""

    name: str
    program: Path

    def speed(self, model: Path, threads: int, *, prompt: int = 0, generate: int = 0) -> float:
        """Return tokens per second of a prompt of that many tokens, or of generating as many."""
        repeat = max(1, BATCH_TOKENS // prompt) if 0 < prompt < BATCH_TOKENS else 1
        options = {"-m": model, "-t": threads, "-p": prompt, "-n": generate, "-r": repeat}
        command = [str(self.program), "-o", "json", "-fa", "1"]
        command += [str(word) for option in options.items() for word in option]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "LD_LIBRARY_PATH": str(self.program.parent)},
        )
        if done.returncode:
            raise SystemExit(f"{self.name}: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
        # some forks print other lines before the array
        rows = json.loads(done.stdout[done.stdout.index("[\n") :])
        (row,) = [row for row in rows if (row["n_prompt"], row["n_gen"]) == (prompt, generate)]
        return float(statistics.median(row["samples_ts"]))


def side(text: str) -> Side:
    """Parse NAME=FOLDER."""
    name, _, folder = text.partition("=")
    for program in (Path(folder) / "llama-bench", Path(folder) / "bin" / "llama-bench"):
        if name and folder and program.is_file():
            return Side(name, program.resolve())
    raise argparse.ArgumentTypeError(f"expected NAME=FOLDER with a llama-bench, found {text!r}")


def bytes_per_token(path: Path) -> int:
    """Return the size of the weights that a single token reads, its row of embeddings left out."""
    with open_model(path) as model:
        head = set(model.head.names)
        output = {"output.weight"} & model.tensors.keys()
        unread = head | ({"token_embd.weight"} if output else set())
        return sum(tensor.nbytes for name, tensor in model.tensors.items() if name not in unread)


class Reader:
    """Reads a file's bytes from memory with `threads` threads."""

    def __init__(self, path: Path, threads: int) -> None:
        weights = np.fromfile(path, np.int32, path.stat().st_size // 4)
        self.nbytes = weights.nbytes
        self.pieces = np.array_split(weights, PIECES * threads)
        self.pool = ThreadPoolExecutor(threads)

    def speed(self) -> float:
        """Return bytes per second, the median over whole files."""
        times: list[float] = []
        while sum(times) < READ_SECONDS:
            began = time.perf_counter()
            list(self.pool.map(np.max, self.pieces))
            times.append(time.perf_counter() - began)
        return self.nbytes / statistics.median(times)


def compare(arguments: argparse.Namespace, threads: int) -> dict[str, dict[str, float]]:
    """Print the tables for a number of threads; return tokens per second by row and side."""
    sides: list[Side] = arguments.sides
    first = sides[0].name
    ratios = [f"{first} / {other.name}" for other in sides[1:]]
    print(f"\n{threads} threads, tokens per second:\n")
    heading("", *(each.name for each in sides), *ratios)
    results: dict[str, dict[str, float]] = {}
    reader = Reader(arguments.model, threads)
    reads: list[float] = []
    generated: dict[str, list[float]] = {}
    rows = {f"prompt of {n}": {"prompt": n} for n in arguments.prompts}
    rows["one token at a time"] = {"generate": arguments.generate}
    rows |= {f"batch of {n}": {"prompt": n} for n in arguments.batches}
    for title, work in rows.items():
        seen: dict[str, list[float]] = {each.name: [] for each in sides}
        for _ in range(arguments.rounds):
            if "generate" in work:
                reads.append(reader.speed())
                generated = seen
            for each in sides:
                seen[each.name].append(each.speed(arguments.model, threads, **work))
        found = {name: statistics.median(values) for name, values in seen.items()}
        results[title] = found
        of_first = [f"{found[first] / found[other.name]:.2f}" for other in sides[1:]]
        row(title, *(f"{speed:.1f}" for speed in found.values()), *of_first)
    size = bytes_per_token(arguments.model)
    read = statistics.median(reads)
    span = f"{min(reads) / 1e9:.1f} to {max(reads) / 1e9:.1f}"
    print(
        f"\nreading memory: {read / 1e9:.1f} GB/s ({span}), a token's weights: {size / 1e6:.0f} MB"
    )
    for name, speeds in generated.items():
        shares = [speed * size / at_once for speed, at_once in zip(speeds, reads, strict=True)]
        span = f"{min(speeds):.1f} to {max(speeds):.1f} tokens per second"
        print(f"{name}: {statistics.median(shares):.0%} of reading, {span}")
    return results | {"bytes read per second": {"memory": read}}


def report_batches(results: dict[str, dict[str, float]], batches: list[int]) -> None:
    """Print each side's milliseconds of a batch in relation to its batch of one."""
    if batches[:1] != [1]:
        return
    one = results["batch of 1"]
    print()
    heading("batch, times one token", *one)
    for n in batches[1:]:
        speeds = results[f"batch of {n}"].items()
        row(n, *(f"{n * one[name] / speed:.2f}" for name, speed in speeds))


def main() -> None:
    parser = options(__doc__, {"--generate": 48, "--rounds": 3})
    parser.add_argument("model", type=Path)
    parser.add_argument("sides", type=side, nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--threads", type=numbers, default=[2, 4])
    parser.add_argument("--prompts", type=numbers, default=[512, 4096])
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 12, 16, 32, 64])
    arguments = parser.parse_args()
    if not arguments.model.is_file():
        parser.error(f"model: expected a GGUF file, found none at {arguments.model}")
    if len({each.name for each in arguments.sides}) < len(arguments.sides):
        parser.error("NAME=FOLDER: expected a different name for each folder")
    if arguments.generate < 1 or arguments.rounds < 1:
        parser.error("--generate and --rounds: expected 1 or more")
    if min(*arguments.threads, *arguments.prompts, *arguments.batches) < 1:
        parser.error("--threads, --prompts and --batches: expected numbers from 1")
    record: dict[str, object] = {"model": arguments.model.name, "machine": platform.machine()}
    for threads in arguments.threads:
        results = compare(arguments, threads)
        report_batches(results, arguments.batches)
        record[f"{threads} threads"] = results
    print(json.dumps(record))


if __name__ == "__main__":
    main()
