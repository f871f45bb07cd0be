"""One step of gpu.py, on the first GPU or the CPU; each line printed is a row in JSON.

python benchmarks/gpu_table.py STEP SHAPE --work FOLDER [--backend cuda]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from decode import (
    PROMPT_TOKENS,
    converted,
    dial_file,
    dial_files,
    one_round,
    prefill_ms,
    server,
    server_round,
    together,
)
from dial_model import SHAPES, stretched
from measuring import options, random_prompts

from mtp_gguf.native import MTPLlama
from mtp_gguf.native.libraries import devices
from mtp_gguf.native.libraries.loaded import device_name
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.server.build import find_build
from support import counted_cycles, places, preloading
from support.models import DEMO
from support.native_trunk import Trunk

HIT = 0.8
PERIOD = 4  # three linear attention layers and one of full attention
TRAINED = "demo"  # instead of a shape: the tests' trained model
CPU_MOE = "-cpu-moe"  # of a shape's name: the experts are on the CPU
LONG_PROMPT = 512
ALL = 999
TEXT = 64  # tokens
CLIENTS = 4
GREEDY = (1, 3)  # depths
PART = 400  # tokens: the demo model's context is 512
MOST_ROWS = 16
REPEATS = 5
# Models whose checkpoint would not fit into memory: their first PERIOD layers are repeated.
STRETCHED = {"27b": 64, "35b-a3b": 40}


def few_layers(shape: str) -> str:
    """The name of a shape with PERIOD layers, which can be made."""
    short = f"{shape}-{PERIOD}"
    SHAPES[short] = replace(SHAPES[shape], name=short, layers=PERIOD)
    return short


def model_file(shape: str, work: Path, quant: str = "Q4_K_M") -> Path:
    """The GGUF of a shape, or of the tests' trained model in a type, made once."""
    if shape == TRAINED:
        return converted(DEMO, work / f"{shape}-{quant}.gguf", quant)
    layers = STRETCHED.get(shape)
    if layers is None:
        return dial_file(shape, HIT, work)
    target = work / f"{shape}-{layers}-layers.gguf"
    if not target.exists():
        small = dial_file(few_layers(shape), HIT, work)
        partial = target.with_suffix(".part")
        stretched(small, partial, layers)
        partial.rename(target)
        small.unlink()
    return target


def text_rows(path: Path, layers: int) -> Iterator[dict[str, Any]]:
    """The text and acceptance at each depth, there and on the CPU."""

    def generate(depth: int | str, n_gpu_layers: int) -> tuple[list[int], list[float]]:
        with MTPLlama(
            str(path), depth=depth, n_ctx=256, n_gpu_layers=n_gpu_layers, profile=False
        ) as llm:
            tokens = [*itertools.islice(llm.generate([5, 6, 7], temp=0.0), TEXT)]
            return tokens, llm.mtp_stats.acceptance

    wanted, _ = generate(0, 0)
    for depth in (0, 1, 2, 3, 4, "auto"):
        tokens, there = generate(depth, layers)
        _, on_cpu = generate(depth, 0)
        same = next(
            (i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), TEXT
        )
        yield {
            "depth": depth,
            f"tokens as on the CPU, of {TEXT}": same,
            "acceptance": " ".join(f"{share:.2f}" for share in there),
            "on the CPU": " ".join(f"{share:.2f}" for share in on_cpu),
        }


def batch_rows(path: Path, quant: str, layers: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of llama.cpp for a batch of so many rows with logits, medians.

    Removes the file unless it is the one that other steps use.
    """
    with MTPLlama(str(path), depth=0, n_ctx=512, n_gpu_layers=layers, profile=False) as llm:
        context = llm.ctx
        memory = llama_cpp.llama_get_memory(context)
        first = 0.0
        for rows in range(1, MOST_ROWS + 1):
            batch = llama_cpp.llama_batch_init(rows, 0, 1)
            for i in range(rows):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 5 + i, i, 1, 1
                batch.seq_id[i][0] = 0
            batch.n_tokens = rows
            times = []
            for _ in range(REPEATS + 2):
                llama_cpp.llama_memory_clear(memory, False)
                began = time.perf_counter()
                if llama_cpp.llama_decode(context, batch):
                    raise RuntimeError(f"llama_decode failed for {rows} rows")
                llama_cpp.llama_synchronize(context)
                times.append((time.perf_counter() - began) * 1e3)
            llama_cpp.llama_batch_free(batch)
            ms = statistics.median(times[2:])  # the first ones compile and warm up
            first = first or ms
            yield {"type": quant, "rows": rows, "ms": ms, "times one row": ms / first}
    if quant != "Q4_K_M":
        path.unlink()


def call_rows(path: Path, library: Path, on_gpu: bool) -> Iterator[dict[str, Any]]:
    """What a cycle of three drafts exchanges with the device, and how long the device idles."""
    there = (("gpu", ""), ("whole", ", embeddings there")) if on_gpu else (("cpu", ""),)
    cases = [(place, "greedy", 1, f"greedy{more}") for place, more in there]
    cases += [(there[0][0], "rejection", 1, "rejection sampling")]
    cases += [(there[0][0], "slots", 4, "four sequences, greedy")]
    for place, kind, sequences, title in cases:
        found = counted_cycles.count(library, path, place, kind, sequences)
        each = {name: value / found["cycles"] for name, value in found.items()}
        idle = [f"{1 - found[busy] / found['ns']:.1%}" for busy in ("busy_most", "busy_least")]
        yield {
            "decoding": title,
            "graph launches": each["graphs"],
            "waits": each["syncs"],
            "bytes down": round(each["bytes_down"]),
            "bytes up": round(each["bytes_up"]),
            "graphs on the CPU": each["cpu_graphs"],
            "cycle ms": each["ns"] / 1e6,
            **({"device idle, at least": idle[0], "at most": idle[1]} if on_gpu else {}),
        }


def answers(
    trunk: Trunk, text: list[int], n: int, width: int, accepted: Callable[[], int], other: int
) -> list[tuple[int, int]]:
    """The likeliest token after each of the first n of a text, and a checksum of all logits.

    Where the text ends, that token continues it. width: rows of each batch; accepted: how many of
    them are tokens of the text. The rest is the token `other`, which is rolled back.
    """
    memory = llama_cpp.llama_get_memory(trunk.context)
    llama_cpp.llama_memory_clear(memory, True)
    batch = llama_cpp.llama_batch_init(width, 0, 1)
    batch.n_tokens = width
    found: list[tuple[int, int]] = []
    while len(found) < n:
        at = len(found)
        part = text[at : min(at + accepted(), n)]
        for i, token in enumerate(itertools.islice(itertools.chain(part, [other] * width), width)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, at + i, 1, 1
            batch.seq_id[i][0] = 0
        if llama_cpp.llama_decode(trunk.context, batch):
            raise RuntimeError(f"llama_decode failed for {width} rows")
        for i in range(len(part)):
            row = trunk.logits(i)
            found.append((int(np.argmax(row)), zlib.crc32(row)))
        if len(text) == len(found):
            text.append(found[-1][0])
        if not llama_cpp.llama_memory_seq_rm(memory, 0, len(found), -1):
            raise RuntimeError("the rest of a batch could not be rolled back")
    llama_cpp.llama_batch_free(batch)
    return found


def greedy_rows(path: Path, on_gpu: bool, n: int) -> Iterator[dict[str, Any]]:
    """How many tokens of a text would be others with drafts, and how many rows of logits.

    Compared with plain decoding, and with plain decoding in batches padded to as many rows as
    verify drafts. All follow the text of plain decoding.
    """
    parts = [([5 + i], min(PART, n - i * PART)) for i in range(-(-n // PART))]
    rng = np.random.default_rng(1)
    with (
        places.use(places.place("gpu" if on_gpu else "cpu")),
        closing(Trunk(path, max(GREEDY), PART + max(GREEDY) + 1)) as trunk,
    ):

        def decode(width: int, accepted: Callable[[], int], other: int) -> list[tuple[int, int]]:
            cases = [answers(trunk, text, size, width, accepted, other) for text, size in parts]
            return [*itertools.chain(*cases)]

        plain = decode(1, lambda: 1, 0)
        for depth in GREEDY:
            drafted = decode(depth + 1, partial(rng.integers, 1, depth + 2), 1)
            padded = decode(depth + 1, lambda: 1, 0)
            row: dict[str, Any] = {"drafts": depth, "tokens": n}
            for name, other in (("plain", plain), ("padded", padded)):
                pairs = [*zip(drafted, other, strict=True)]
                row[f"not as {name}"] = sum(ours[0] != theirs[0] for ours, theirs in pairs)
                row[f"logits not as {name}"] = sum(ours != theirs for ours, theirs in pairs)
            yield row


def measure(path: Path, depth: int | str, arguments: argparse.Namespace, cpu_moe: int) -> Any:
    """Our session at one depth: medians of the rounds."""
    with MTPLlama(
        str(path),
        depth=depth,
        max_depth=6,
        n_ctx=2048,
        n_gpu_layers=arguments.layers,
        n_cpu_moe=cpu_moe,
        profile=False,
    ) as llm:
        usable = min(20_000, llm.n_vocab() * 2 // 3)  # no padding, no control tokens
        [drawn] = random_prompts(1, PROMPT_TOKENS + LONG_PROMPT, usable)
        prompt, long_prompt = drawn[:PROMPT_TOKENS], drawn[PROMPT_TOKENS:]
        one_round(llm, prompt, arguments.tokens)  # compiles and warms up
        rounds = [one_round(llm, prompt, arguments.tokens) for _ in range(arguments.rounds)]
        prefill_ms(llm, long_prompt)
        trunk_ms, head_ms = prefill_ms(llm, long_prompt)
        free, total = devices.device_memory(device_name(arguments.layers))
    row: dict[str, Any] = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    parts = ("draft_ms", "verify_ms", "sample_ms", "rollback_ms")
    return {
        "decoding": "plain" if depth == 0 else f"ours, depth {depth}",
        "tok/s": row["tok_s"],
        "tokens a cycle": row["tokens_per_cycle"],
        "cycle ms": row["cycle_ms"],
        **{part.removesuffix("_ms"): row[part] for part in parts},
        "rest": row["cycle_ms"] - sum(row[part] for part in parts),
        "prompt tok/s": round(LONG_PROMPT * 1e3 / (trunk_ms + head_ms)),
        "used MiB": (total - free) >> 20,
    }


def measure_server(
    binary: str,
    path: Path,
    depth: int | str,
    arguments: argparse.Namespace,
    cpu_moe: int,
    *more: str,
) -> tuple[float, float]:
    """Tokens a second of llama-server at a depth: of one client, and of all CLIENTS."""
    options = ["-ngl", str(arguments.layers), "--n-cpu-moe", str(cpu_moe), *more]
    options += ["-np", str(CLIENTS), "-c", str(CLIENTS * 1024)]
    if depth == "auto":
        options += ["--spec-type", "draft-mtp", "--spec-draft-n-max", "auto:4"]
    prompts = random_prompts(CLIENTS, PROMPT_TOKENS, 700)
    number = depth if isinstance(depth, int) else 0
    with server(binary, str(path), number, 4, *options) as url:
        rounds = range(arguments.rounds + 1)
        one = [server_round(url, prompts[0], arguments.tokens) for _ in rounds]
        every = [together(url, prompts, arguments.tokens) for _ in rounds]
    return statistics.median(one[1:]), statistics.median(every[1:])


def depth_rows(path: Path, arguments: argparse.Namespace, cpu_moe: int) -> Iterator[dict[str, Any]]:
    """Plain, ours and llama-server's, and plain again."""
    depths = [d if d == "auto" else int(d) for d in arguments.depths.split(",")]
    plain = 0.0
    for depth in (0, *depths, 0):
        row = measure(path, depth, arguments, cpu_moe)
        plain = plain or row["tok/s"]
        yield {"decoding": row.pop("decoding"), "× plain": row["tok/s"] / plain, **row}
    build = find_build()
    ours = build and str(build.server)
    other = ("llama-server's own steps", ours, "--no-spec-draft-fused")
    if arguments.stock:
        other = ("llama-server without patches", arguments.stock, "")
    numbers = [depth for depth in depths if depth != "auto"]
    sides = (*other, numbers), ("our llama-server", ours, "", depths)
    for name, binary, option, tried in sides:
        for depth in [0, *tried] if binary else []:
            more = [option] if depth and option else []
            speed, every = measure_server(binary, path, depth, arguments, cpu_moe, *more)
            yield {
                "decoding": f"{name}, depth {depth}",
                "tok/s": speed,
                "× plain": speed / plain,
                f"tok/s of {CLIENTS} clients": every,
            }


def main() -> int:
    parser = options(__doc__, {"--tokens": 128, "--rounds": 3})
    parser.add_argument("step", choices=["text", "batches", "depths", "calls", "greedy"])
    parser.add_argument("shape")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--quant", default="Q4_K_M")
    parser.add_argument("--depths", default="1,2,3,4,auto")
    parser.add_argument("--stock", help="llama-server without patches")
    parser.add_argument("--counter", type=Path, help="device_calls.so, if it is not to be compiled")
    arguments = parser.parse_args()
    shape = arguments.shape.removesuffix(CPU_MOE)
    arguments.layers = 0 if arguments.backend == "cpu" else ALL
    if shape not in (known := [*SHAPES, TRAINED]):
        parser.error(f"expected one of {', '.join(known)}, found {shape}")
    if arguments.layers and device_name(ALL) == "CPU":
        parser.error("ggml finds no GPU")
    arguments.work.mkdir(parents=True, exist_ok=True)
    on_gpu = arguments.layers > 0
    if arguments.step == "text":
        rows = text_rows(model_file(shape, arguments.work), arguments.layers)
    elif arguments.step == "calls":
        counter = arguments.counter or preloading.build("device_calls", arguments.work)
        rows = call_rows(model_file(shape, arguments.work), counter, on_gpu)
    elif arguments.step == "greedy":
        n = arguments.tokens * (16 if shape == TRAINED else 4)
        path = model_file(shape, arguments.work, arguments.quant)
        rows = greedy_rows(path, on_gpu, n)
    elif arguments.step == "batches":
        quants = arguments.quant.split(",")
        files = dial_files(few_layers(shape), HIT, arguments.work, quants)
        each = map(batch_rows, files, quants, itertools.repeat(arguments.layers))
        rows = itertools.chain.from_iterable(each)
    else:
        cpu_moe = ALL if arguments.shape.endswith(CPU_MOE) else 0
        rows = depth_rows(model_file(shape, arguments.work), arguments, cpu_moe)
    for row in rows:
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
