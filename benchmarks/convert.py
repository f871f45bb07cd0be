"""Compare `mtp-gguf convert` with upstream's two steps: time, peak memory and bytes written.

    python benchmarks/convert.py --shape 0.8B --work /path/with/space [--runs 3]

A checkpoint of random weights with the family's real shape is generated, then converted to Q4_K_M
with an F16 head: by mtp-gguf in one pass; by upstream with convert_hf_to_gguf.py to BF16 and then
the linked llama.cpp's quantizer (both from the pinned source distribution, as
tests/support/upstream runs them). Each step is a separate process. For reference, the disk's own
limit is measured: writing and flushing the same bytes. The table has the form of
benchmarks/README.md; --json prints all figures.

The 4B shape takes 28 GB of disk (0.8B: 5 GB) in `--work`, and a few minutes to generate. The
converted files are removed at the end, and so is the checkpoint unless --keep is given. Needs the
extras `test` and `upstream`.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import dial_model  # noqa: E402
import numpy as np  # noqa: E402
from measuring import heading, options, row  # noqa: E402

from mtp_gguf.gguf_tools.files.format import open_gguf  # noqa: E402
from support import checkpoints  # noqa: E402
from support.checkpoints import Array, Spec, write_checkpoint  # noqa: E402

SHAPES = {
    "tiny": Spec("tiny", layers=4),
    "0.8B": replace(dial_model.SHAPES["0.8b"], name="0.8B", tied=True),
    "4B": replace(dial_model.SHAPES["4b"], name="4B", tied=True, shards=4),
}

_UPSTREAM_CONVERT = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support.upstream.convert_upstream import convert
convert(Path(sys.argv[2]), Path(sys.argv[3]), "bf16")
"""
_UPSTREAM_QUANTIZE = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support.upstream.convert_upstream import quantize
quantize(Path(sys.argv[2]), Path(sys.argv[3]), "Q4_K_M", [(sys.argv[4], "F16")])
"""


@dataclass(frozen=True)
class Step:
    """One process: wall seconds, CPU seconds of all threads, peak memory, size of the output.

    temporary_mb: the largest total size of its other files at any time.
    """

    name: str
    seconds: float
    cpu_seconds: float
    peak_mb: float
    written_mb: float
    temporary_mb: float


# Number of random values; longer tensors repeat them, not aligned with any block size.
_DRAWN = (1 << 20) + 7


def write_large(folder: Path, spec: Spec) -> None:
    """Write a checkpoint, quickly and with at most one tensor in memory."""
    drawn = np.asarray(np.random.default_rng(0).standard_t(5, _DRAWN), np.float32)
    stored = checkpoints.stored_tensors

    def repeated(_name: str, shape: tuple[int, ...], _seed: int, std: float) -> Array:
        return np.resize(drawn * np.float32(std), shape)

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:

        def on_disk(spec: Spec) -> Iterator[tuple[str, Array]]:
            for index, (name, array) in enumerate(stored(spec)):
                path = Path(scratch) / str(index)
                array.tofile(path)
                yield name, np.memmap(path, array.dtype, "r", shape=array.shape)

        with patch.multiple(checkpoints, _bell=repeated, stored_tensors=on_disk):
            write_checkpoint(folder, spec)


def parser(description: str, defaults: Mapping[str, float]) -> argparse.ArgumentParser:
    """Return a parser with the options that name a checkpoint, for `checkpoint_of`."""
    made = options(description, defaults)
    made.add_argument("--shape", choices=SHAPES, default="0.8B")
    made.add_argument("--work", type=Path, required=True, help="folder for the files")
    made.add_argument("--keep", action="store_true", help="keep the checkpoint for another run")
    return made


@contextmanager
def checkpoint_of(args: argparse.Namespace) -> Iterator[Path]:
    """Write the checkpoint of `parser`, unless an earlier run kept it; remove it at the end."""
    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint: Path = args.work / f"checkpoint-{args.shape}"
    if not (checkpoint / "config.json").is_file():
        shutil.rmtree(checkpoint, ignore_errors=True)
        in_child(write_large, checkpoint, SHAPES[args.shape])
    yield checkpoint
    if not args.keep:
        shutil.rmtree(checkpoint)


def in_child(function: object, *arguments: object) -> None:
    """Call in a process of its own, because on Linux a child's peak memory starts from ours."""
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=function, args=arguments)  # type: ignore[arg-type]
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit("the checkpoint could not be written")


@contextmanager
def polling(look: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call a function every so many seconds, in a thread."""
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(seconds):
            look()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def spawn(command: list[str], environment: dict[str, str]) -> int:
    """Start a process whose output is dropped; its id."""
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    return os.posix_spawn(command[0], command, environment, file_actions=quiet)


@contextmanager
def watched(folder: Path, output: Path) -> Iterator[list[int]]:
    """Poll the size of the files in `folder`, except `output`."""
    found = [0]

    def size(path: Path) -> int:
        try:
            return path.stat().st_size if output.name not in path.name else 0
        except OSError:  # the file was removed in the meantime
            return 0

    before = sum(size(p) for p in folder.rglob("*") if p.is_file())

    def look() -> None:
        now = sum(size(p) for p in folder.rglob("*") if p.is_file())
        found[0] = max(found[0], now - before)

    with polling(look, 0.1):
        yield found


def measure(name: str, command: list[str], output: Path) -> Step:
    output.unlink(missing_ok=True)
    scratch = output.parent / "tmp"
    scratch.mkdir(exist_ok=True)
    with watched(output.parent, output) as temporary:
        began = time.monotonic()
        pid = spawn(command, os.environ | {"TMPDIR": str(scratch)})
        _, status, usage = os.wait4(pid, 0)
        seconds = time.monotonic() - began
    if status:
        raise SystemExit(f"{name} failed: {' '.join(command)}")
    size = output.stat().st_size / 1e6
    cpu = usage.ru_utime + usage.ru_stime
    step = Step(
        name,
        round(seconds, 2),
        round(cpu, 2),
        round(usage.ru_maxrss / 1e3),
        round(size),
        round(temporary[0] / 1e6),
    )
    print(json.dumps(asdict(step)), file=sys.stderr)
    return step


def disk_seconds(path: Path, size: int) -> float:
    """Return the seconds to write and flush `size` bytes: the lower limit of any converter."""
    block = os.urandom(1 << 24)
    began = time.monotonic()
    with path.open("wb") as file:
        for _ in range(0, size, len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.monotonic() - began
    path.unlink()
    return seconds


def differences(ours: Path, theirs: Path) -> list[str]:
    """Return the tensors that are not bit-identical in both files; for ssm_a, with the difference.

    torch's exponential depends on its build and is sometimes off by one unit in the last place;
    docs/decisions.md has more.
    """
    found = []
    with open_gguf(ours) as a, open_gguf(theirs) as b:
        for tensor in a.tensors:
            other = b.by_name.get(tensor.name)
            if other is None or (other.shape, other.type) != (tensor.shape, tensor.type):
                found.append(f"{tensor.name}: another shape or type")
                continue
            x = a.source.read(tensor.offset, tensor.nbytes)
            y = b.source.read(other.offset, other.nbytes)
            if x != y and tensor.name.endswith("ssm_a"):
                steps = np.abs(np.frombuffer(x, "<i4") - np.frombuffer(y, "<i4"))
                found.append(f"{tensor.name}: {(steps > 0).sum()} values, {steps.max()} ulp")
            elif x != y:
                found.append(f"{tensor.name}: other bytes")
    return found


def _round(checkpoint: Path, head: int, ours: Path, wide: Path, theirs: Path) -> list[Step]:
    """Measure each step once. head: the block of the MTP head."""
    tests = str(ROOT / "tests")
    converter = shutil.which("mtp-gguf") or "mtp-gguf"
    return [
        measure(
            "mtp-gguf convert",
            [converter, "convert", str(checkpoint), "-o", str(ours), "--mtp-f16", "--json"],
            ours,
        ),
        measure(
            "convert_hf_to_gguf.py",
            [sys.executable, "-c", _UPSTREAM_CONVERT, tests, str(checkpoint), str(wide)],
            wide,
        ),
        measure(
            "llama-quantize",
            [
                *(sys.executable, "-c", _UPSTREAM_QUANTIZE, tests, str(wide), str(theirs)),
                rf"blk\.{head}\..*",
            ],
            theirs,
        ),
    ]


def main() -> None:
    made = parser(__doc__, {"--runs": 1})
    made.add_argument("--json", action="store_true", help="print all figures as JSON")
    args = made.parse_args()
    ours, wide, theirs = (args.work / f"{n}.gguf" for n in ("ours", "bf16", "theirs"))
    with checkpoint_of(args) as checkpoint:
        head = SHAPES[args.shape].layers
        rounds = [_round(checkpoint, head, ours, wide, theirs) for _ in range(args.runs)]
    best = [min(steps, key=lambda s: s.seconds) for steps in zip(*rounds, strict=True)]
    upstream = best[1].seconds + best[2].seconds
    result = {
        "shape": args.shape,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "steps": [asdict(step) for step in best],
        "different_tensors": differences(ours, theirs),
        "times_faster": round(upstream / best[0].seconds, 2),
        "peak_ratio": round(max(best[1].peak_mb, best[2].peak_mb) / best[0].peak_mb, 2),
        "written_ratio": round((best[1].written_mb + best[2].written_mb) / best[0].written_mb, 2),
        "disk_limit_seconds": round(disk_seconds(args.work / "probe", ours.stat().st_size), 2),
    }
    for path in (ours, wide, theirs):
        path.unlink()
    shutil.rmtree(args.work / "tmp")
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        report(result, best)


def report(result: dict[str, Any], best: list[Step]) -> None:
    """Print the figures as a table for benchmarks/README.md."""
    cores = os.cpu_count() or 1
    print(f"{result['shape']} shape, {result['machine']}\n")
    heading(
        *("step", "seconds", "CPU seconds", "cores busy", "peak memory", "written", "temporary")
    )
    # The output of upstream's first step is only the input of the second.
    between = best[1].written_mb
    for step, extra in zip(best, (0, between, 0), strict=True):
        busy = step.cpu_seconds / (step.seconds * cores)
        sizes = (step.peak_mb, step.written_mb, step.temporary_mb + extra)
        seconds = (f"{step.seconds:.2f}", f"{step.cpu_seconds:.2f}")
        row(step.name, *seconds, f"{busy:.0%}", *(f"{size:.0f} MB" for size in sizes))
    print(
        f"\n{result['times_faster']} x faster than the two steps together; the disk takes "
        f"{result['disk_limit_seconds']} s for the same file, flushed.\n"
        f"Tensors that differ: {', '.join(result['different_tensors']) or 'none'}"
    )


if __name__ == "__main__":
    main()
