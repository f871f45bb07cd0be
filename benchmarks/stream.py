"""Measure `convert --stream` and the planning of large releases: time, memory, disk, bytes read.

    python benchmarks/stream.py --shape 0.8B --work /path/with/space [--megabits 100] [--keep]

A checkpoint of random weights with the family's real shape is served by the hub of the tests, on
loopback, which sends each connection no more than --megabits per second (0: no limit); a conversion
has eight connections. It is converted to four types from one read, then to each of them by a
conversion of its own, as separate processes, and the bytes are compared. Then a release of a
checkpoint of a terabyte is planned, of which only the headers exist. The tables have the form of
benchmarks/README.md; --json prints all figures.

The 4B shape takes 32 GB of disk in `--work` (0.8B: 6 GB), which are released at the end; --keep
keeps the checkpoint. Needs the extra `test`.
"""

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from filecmp import cmp
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import psutil  # noqa: E402
from measuring import heading, row  # noqa: E402

from convert import checkpoint_of, in_child, parser, polling, spawn  # noqa: E402
from support.hub_commands import environment  # noqa: E402
from support.hub_server import Hub  # noqa: E402
from support.sparse_checkpoints import TERABYTE, write_sparse  # noqa: E402

TYPES = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
MODEL = "somebody/Random"
_OUTPUTS = (".gguf", ".partial")


@dataclass(frozen=True)
class Step:
    """One process: wall seconds, CPU seconds, peak memory, what it read, and its other files.

    beyond_mb: the most at any time on the disk that is not an output.
    """

    name: str
    seconds: float
    cpu_seconds: float
    peak_mb: float
    read_mb: float
    beyond_mb: float


@dataclass
class Peaks:
    """The most memory of a process, and the most room on the disk that is not an output's."""

    memory: int = 0
    disk: int = 0


@contextmanager
def watched(pid: int, folder: Path) -> Iterator[Peaks]:
    """Poll the memory of a process and the room that files in `folder` take."""
    peaks = Peaks()
    process = psutil.Process(pid)

    def size(path: Path) -> int:
        try:
            return 0 if path.suffix in _OUTPUTS else path.lstat().st_blocks * 512
        except OSError:  # the file was removed in the meantime
            return 0

    def look() -> None:
        peaks.disk = max(peaks.disk, sum(map(size, folder.rglob("*"))))
        with suppress(psutil.Error):  # it has ended
            peaks.memory = max(peaks.memory, process.memory_info().rss)

    with polling(look, 0.05):
        yield peaks


def measure(name: str, words: Sequence[object], folder: Path, hub: Hub) -> Step:
    """Run `mtp-gguf WORDS` with its cache and temporary files in `folder`."""
    for sub in ("home", "tmp"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    program = shutil.which("mtp-gguf") or "mtp-gguf"
    command = [program, *map(str, words)]
    env = environment(hub, folder / "home", TMPDIR=str(folder / "tmp"))
    hub.requests.clear()
    began = time.monotonic()
    pid = spawn(command, env)
    with watched(pid, folder) as peaks:
        _, status, usage = os.wait4(pid, 0)
        seconds = time.monotonic() - began
    if status:
        raise SystemExit(f"{name} failed: {' '.join(command)}")
    step = Step(
        name,
        round(seconds, 2),
        round(usage.ru_utime + usage.ru_stime, 2),
        round(peaks.memory / 1e6),
        round(hub.weights_sent / 1e6),
        round(peaks.disk / 1e6, 1),
    )
    print(json.dumps(asdict(step)), file=sys.stderr, flush=True)
    shutil.rmtree(folder / "home")
    return step


def stream_steps(checkpoint: Path, work: Path, rate: float) -> list[Step]:
    """The conversion from one read, then one conversion for each type; all files must agree."""
    one, each = work / "one", work / "each"
    with Hub(MODEL, {"main": checkpoint}, bytes_per_second=rate) as hub:
        also = ("--also", ",".join(TYPES[1:]))
        words = ("convert", MODEL, "--stream", "--quant", TYPES[0])
        one.mkdir(parents=True)
        each.mkdir()
        output = one / f"{TYPES[0]}.gguf"
        steps = [measure("four types from one read", (*words, *also, "-o", output), one, hub)]
        for kind in TYPES:
            output = each / f"{kind}.gguf"
            step = measure(kind, (*words[:-1], kind, "-o", output), each, hub)
            steps.append(step)
            if not cmp(output, one / output.name, shallow=False):
                raise SystemExit(f"{kind}: other bytes than from one read")
            output.unlink()
    shutil.rmtree(one)
    shutil.rmtree(each)
    return steps


def plan_step(work: Path) -> Step:
    """The dry run of a release of a terabyte."""
    folder = work / "terabyte"
    in_child(write_sparse, folder, TERABYTE)
    words = ("publish", folder, "--types", ",".join(TYPES), "--to", "me/Terabyte", "--dry-run")
    with Hub(MODEL, {}) as hub:
        step = measure("plan of a terabyte", words, work / "plan", hub)
    shutil.rmtree(folder)
    shutil.rmtree(work / "plan")
    return step


def main() -> None:
    options = parser(__doc__, {"--megabits": 100.0})
    options.add_argument("--json", action="store_true", help="print all figures as JSON")
    args = options.parse_args()
    with checkpoint_of(args) as checkpoint:
        one, *each = stream_steps(checkpoint, args.work, args.megabits * 1e6 / 8)
    plan = plan_step(args.work)
    together = sum(step.seconds for step in each)
    ratio = one.seconds / together
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs"
    limit = f"{args.megabits:g} Mbit/s for each of eight connections"
    if args.json:
        steps = [asdict(step) for step in (one, *each, plan)]
        print(json.dumps({"machine": machine, "limit": limit, "ratio": ratio, "steps": steps}))
        return
    print(f"{args.shape} shape, {limit}, {machine}\n")
    heading("step", "seconds", "CPU seconds", "peak memory", "read", "disk beyond the outputs")
    for s in (one, *each, plan):
        sizes = (f"{s.peak_mb:.0f} MB", f"{s.read_mb:.0f} MB", f"{s.beyond_mb:.1f} MB")
        row(s.name, f"{s.seconds:.1f}", f"{s.cpu_seconds:.1f}", *sizes)
    print(f"\n{ratio:.2f} of the time of the four conversions ({together:.1f} s)")


if __name__ == "__main__":
    main()
