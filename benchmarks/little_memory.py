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
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from decode import PROMPT_TOKENS, dial_file, opened
from dial_model import stretched
from measuring import in_new_process, in_rounds, numbers, options, random_prompts, words

from mtp_gguf.bench.stats import summarize
from mtp_gguf.native.runtime import llama_cpp

SHAPE, HIT = "35b-a3b", 0.8
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of the versions of control groups
VARIANTS = {
    "stock": {"MTP_GGUF_LIBS": "stock", "MTP_GGUF_KERNELS": "0"},
    "page faults": {"MTP_GGUF_READ_AHEAD": "0"},
    "read ahead": {},
}


def measure(model: Path, depth: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Return tokens per second, and MB read per token, of one generation after the warm-up."""
    (arguments.cgroup / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def mapped() -> Any:
        """As llama-server's --no-repack: weights in another order are copies, without room."""
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = mapped
    with opened(model, depth, 512, arguments.threads, lookup=False) as llm:
        stream = llm.generate(random_prompts(1, PROMPT_TOKENS)[0], temp=0.0)
        for _ in itertools.islice(stream, arguments.warm_up):
            pass
        before, began = bytes_read(), time.perf_counter()
        for _ in itertools.islice(stream, arguments.tokens):
            pass
        seconds = time.perf_counter() - began
        stream.close()
        read = bytes_read() - before
        return arguments.tokens / seconds, read / 1e6 / arguments.tokens


def bytes_read() -> int:
    """Return what this process has read from disks."""
    found = re.search(r"read_bytes: (\d+)", Path("/proc/self/io").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1])


def run(arguments: argparse.Namespace, model: Path, depth: int, name: str) -> tuple[float, float]:
    """Measure a variant in a process of its own."""
    with model.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = in_new_process(measure, model, depth, arguments, **VARIANTS[name])
    print(f"depth {depth}, {name}: {found}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Print a line for each depth and variant."""
    parser = options(
        __doc__,
        {
            "--share": 0.6,
            "--layers": 12,
            "--tokens": 48,
            "--warm-up": 64,
            "--threads": 2,
            "--rounds": 3,
        },
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for the model")
    parser.add_argument("--cgroup", type=Path, required=True)
    parser.add_argument("--depths", type=numbers, default=[0, 2])
    parser.add_argument("--variants", type=words, default=[*VARIANTS])
    arguments = parser.parse_args()
    source = dial_file(SHAPE, HIT, arguments.work)
    model = source.with_name(f"{source.stem}-{arguments.layers}-layers.gguf")
    if not model.exists():
        stretched(source, model, arguments.layers)
    size = model.stat().st_size
    limit = next(arguments.cgroup / name for name in LIMITS if (arguments.cgroup / name).exists())
    limit.write_text(str(int(size * arguments.share)), encoding="ascii")
    print(f"{model.name}: {size / 1e9:.1f} GB, {arguments.share:.0%} of it as memory")
    for depth in arguments.depths:
        jobs = {name: partial(run, arguments, model, depth, name) for name in arguments.variants}
        found = in_rounds(jobs, arguments.rounds, warm_up=False)
        first = [tok_s for tok_s, _ in found[arguments.variants[0]]]
        for name, rounds in found.items():
            speeds, read = zip(*rounds, strict=True)
            speed = summarize(speeds)
            ratio = summarize([own / other for own, other in zip(speeds, first, strict=True)])
            print(
                f"depth {depth}, {name:12} {speed.median:.2f} tokens/s ({speed.low:.2f} to "
                f"{speed.high:.2f}), {summarize(read).median:.0f} MB/token, ratio "
                f"{ratio.median:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
