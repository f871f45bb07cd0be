"""Measure decoding where the memory has no room for the file: ours, and stock libraries.

    mkdir /sys/fs/cgroup/memory/experts    # a control group, here of version 1
    python benchmarks/little_memory.py --work FOLDER --cgroup /sys/fs/cgroup/memory/experts
        [--share 0.6] [--layers 12] [--depths 0,2] [--tokens 48] [--rounds 3]

The model is a synthetic one of the 35B-A3B shape (benchmarks/dial_model.py), whose four layers are
repeated, and whose head is right 80 % of the time. Its router chooses experts at random, so no
expert is used more often than others: with real models more of what is needed is in memory.

Each variant runs in a process of its own in the control group, with the file's pages dropped
before; it generates some tokens to fill the memory, and is measured over the next ones. Prints
tokens per second (median and quartiles of the rounds), MB read from the disk per token, and the
median of the rounds' ratios to the first variant of the depth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from decode import PROMPT_TOKENS, dial_file

from mtp_gguf.bench.stats import summarize
from mtp_gguf.gguf_tools.files.format import ArrayRef, Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import OutputSpec, TensorCopy, write
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native import MTPLlama
from mtp_gguf.native.runtime import llama_cpp

SHAPE, HIT = "35b-a3b", 0.8
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of the versions of control groups
VARIANTS = {
    "stock": {"MTP_GGUF_LIBS": "stock", "MTP_GGUF_KERNELS": "0"},
    "page faults": {"MTP_GGUF_READ_AHEAD": "0"},
    "read ahead": {},
}


def stretched(source: Path, layers: int) -> Path:
    """Return a model whose trunk repeats the layers of another one; made unless it is there."""
    target = source.with_name(f"{source.stem}-{layers}-layers.gguf")
    if target.exists():
        return target
    with open_model(source) as model:
        keys, key = model.metadata(), f"{model.architecture}.block_count"
        block = int(model.first.integer(key)) - 1  # of the head
        tensors = []
        for name in model.tensors:
            copy = TensorCopy.of(model, name)
            layer = re.match(r"blk\.(\d+)\.", name)
            if layer is None:
                tensors.append(copy)
                continue
            number = int(layer[1])
            for place in [layers] if number == block else range(number, layers, block):
                new = f"blk.{place}.{name[layer.end() :]}"
                tensors.append(replace(copy, spec=replace(copy.spec, name=new)))
        keys[key] = Value(ValueType.U32, layers + 1)
        for name, value in model.first.keys.items():
            if isinstance(value, ArrayRef) and value.count == block + 1:  # of each layer
                each = list(model.first.array(name) or ())
                repeated = [*each[:block] * (layers // block), each[block]]
                keys[name] = Value(value.type, tuple(repeated))
        write(target, OutputSpec(keys, tuple(tensors)))
    return target


def measure(model: str, depth: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return tokens per second, and MB read per token, of one generation after the warm-up."""
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def mapped() -> Any:
        """As llama-server's --no-repack: weights in another order are copies, without room."""
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = mapped
    with MTPLlama(
        model,
        depth=depth,
        lookup=False,
        profile=False,
        n_ctx=512,
        n_threads=arguments.threads,
        n_threads_batch=arguments.threads,
    ) as llm:
        prompt = np.random.default_rng(1).integers(0, 20_000, PROMPT_TOKENS).tolist()
        stream = llm.generate(prompt, temp=0.0)
        for _ in itertools.islice(stream, arguments.warm_up):
            pass
        before, began = bytes_read(), time.perf_counter()
        for _ in itertools.islice(stream, arguments.tokens):
            pass
        seconds = time.perf_counter() - began
        stream.close()
        read = bytes_read() - before
        return {"tok_s": arguments.tokens / seconds, "mb": read / 1e6 / arguments.tokens}


def bytes_read() -> int:
    """Return what this process has read from disks."""
    found = re.search(r"read_bytes: (\d+)", Path("/proc/self/io").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1])


def run(arguments: argparse.Namespace, model: Path, depth: int, name: str) -> dict[str, float]:
    """Measure a variant in a process of its own."""
    with model.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    words = [sys.executable, __file__, "--child", str(model), "--depths", str(depth)]
    words += ["--cgroup", str(arguments.cgroup), "--tokens", str(arguments.tokens)]
    words += ["--threads", str(arguments.threads), "--warm-up", str(arguments.warm_up)]
    done = subprocess.run(
        words, env={**os.environ, **VARIANTS[name]}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name}, depth {depth}: exit code {done.returncode}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a line for each depth and variant."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, help="folder for the model")
    parser.add_argument("--cgroup", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.6, help="of the file, as memory")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--depths", default="0,2")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--warm-up", type=int, default=64, help="tokens before those")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    depths = [int(depth) for depth in arguments.depths.split(",")]
    if arguments.child:
        (arguments.cgroup / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        print(json.dumps(measure(arguments.child, depths[0], arguments)))
        return
    model = stretched(dial_file(SHAPE, HIT, arguments.work), arguments.layers)
    size = model.stat().st_size
    limit = next(arguments.cgroup / name for name in LIMITS if (arguments.cgroup / name).exists())
    limit.write_text(str(int(size * arguments.share)), encoding="ascii")
    print(f"{model.name}: {size / 1e9:.1f} GB, {arguments.share:.0%} of it as memory")
    names = arguments.variants.split(",")
    for depth in depths:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for number in range(arguments.rounds):
            for place in range(len(names)):
                name = names[(place + number) % len(names)]
                found[name].append(run(arguments, model, depth, name))
                print(f"depth {depth}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
        for name in names:
            speeds = [one["tok_s"] for one in found[name]]
            pairs = zip(speeds, found[names[0]], strict=True)
            ratio = summarize([speed / first["tok_s"] for speed, first in pairs])
            speed = summarize(speeds)
            read = summarize([one["mb"] for one in found[name]])
            print(
                f"depth {depth}, {name:12} {speed.median:.2f} tokens/s ({speed.low:.2f} to "
                f"{speed.high:.2f}), {read.median:.0f} MB/token, ratio {ratio.median:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
