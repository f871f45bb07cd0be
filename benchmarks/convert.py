"""Time, peak memory and bytes written: `mtp-gguf convert` beside upstream's two steps, in one run.

    python benchmarks/convert.py --shape 0.8B --work /path/with/space

A checkpoint of random weights with the family's real shape is generated, then converted to Q4_K_M
with an F16 head: by us in one pass; by convert_hf_to_gguf.py to BF16 and the linked llama.cpp's
quantizer after it (both from the pinned source distribution, as tests/upstream runs them). Each
step is a process of its own. Needs the extras `test` and `upstream`.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import numpy as np  # noqa: E402
from checkpoints import Spec, write_checkpoint  # noqa: E402

from mtp_gguf.gguf_tools.format import open_gguf  # noqa: E402

_REAL = {"interval": 4, "head_dim": 256, "linear_dim": 128, "vocab_size": 248320}
SHAPES = {
    "tiny": Spec("tiny", layers=4),
    "0.8B": Spec(
        "0.8B",
        hidden=1024,
        intermediate=3584,
        layers=24,
        heads=8,
        kv_heads=2,
        k_heads=16,
        v_heads=16,
        tied=True,
        **_REAL,
    ),
    "4B": Spec(
        "4B",
        hidden=2560,
        intermediate=9216,
        layers=32,
        heads=16,
        kv_heads=4,
        k_heads=16,
        v_heads=32,
        tied=True,
        shards=4,
        **_REAL,
    ),
}

_UPSTREAM_CONVERT = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from upstream.convert_upstream import convert
convert(Path(sys.argv[2]), Path(sys.argv[3]), "bf16")
"""
_UPSTREAM_QUANTIZE = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from upstream.convert_upstream import quantize
quantize(Path(sys.argv[2]), Path(sys.argv[3]), "Q4_K_M", [(sys.argv[4], "F16")])
"""


@dataclass(frozen=True)
class Step:
    """One process: wall seconds, CPU seconds of all its threads, peak memory, its output's size."""

    name: str
    seconds: float
    cpu_seconds: float
    peak_mb: float
    written_mb: float


def measure(name: str, command: list[str], output: Path) -> Step:
    output.unlink(missing_ok=True)
    began = time.monotonic()
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=quiet)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.monotonic() - began
    if status:
        raise SystemExit(f"{name} failed: {' '.join(command)}")
    size = output.stat().st_size / 1e6
    cpu = usage.ru_utime + usage.ru_stime
    step = Step(name, round(seconds, 2), round(cpu, 2), round(usage.ru_maxrss / 1e3), round(size))
    print(json.dumps(asdict(step)), file=sys.stderr)
    return step


def disk_seconds(path: Path, size: int) -> float:
    """Seconds that writing `size` bytes takes on this disk, flushed: the limit of any converter."""
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
    """Tensors that are not the same, bit for bit, in both files; by how much where it is ssm_a.

    torch's exponential depends on its build and is off by one in the last place here and there;
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.8B")
    parser.add_argument("--work", type=Path, required=True, help="folder for the files")
    parser.add_argument("--runs", type=int, default=1, help="rounds, ours and upstream's in turn")
    args = parser.parse_args()
    spec = SHAPES[args.shape]
    checkpoint = args.work / f"checkpoint-{spec.name}"
    if not (checkpoint / "config.json").is_file():
        shutil.rmtree(checkpoint, ignore_errors=True)
        # In a process of its own: a child's peak memory starts from its parent's on Linux.
        maker = multiprocessing.get_context("spawn").Process(
            target=write_checkpoint, args=(checkpoint, spec)
        )
        maker.start()
        maker.join()
    ours, wide, theirs = (args.work / f"{n}.gguf" for n in ("ours", "bf16", "theirs"))
    tests = str(ROOT / "tests")
    converter = shutil.which("mtp-gguf") or "mtp-gguf"
    rounds = []
    for _ in range(args.runs):
        rounds.append(
            [
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
                        rf"blk\.{spec.layers}\..*",
                    ],
                    theirs,
                ),
            ]
        )
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
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
