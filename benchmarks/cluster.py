"""Measure `publish --cluster` with 1, 2, 4 and 8 workers: time, bytes read, memory of a worker.

    python benchmarks/cluster.py --shape 0.8B --work /path/with/space [--megabits 3] [--upload]

A checkpoint of random weights with the family's real shape is served by the hub of the tests, on
loopback, which sends each connection no more than --megabits per second. A worker has eight
connections, so that its network is the limit as long as the CPUs can follow. The time is that from
the first request for a file of weights to the model card, which is written last: with the plan, but
without the start and the end of Python and Dask. With --upload, the workers upload files of 200 MB
themselves, and the time ends with the command. All runs must give the same bytes.

The 0.8B shape takes 5 GB of disk in `--work`, and with the default bandwidth twenty minutes.
--keep keeps the checkpoint. Needs the extras `test` and `cluster`.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import psutil  # noqa: E402
from measuring import heading, row  # noqa: E402
from stream import MODEL  # noqa: E402

from convert import checkpoint_of, parser, polling  # noqa: E402
from mtp_gguf.bench.environment import sha256  # noqa: E402
from support.hub_commands import environment  # noqa: E402
from support.upload_hub import TARGET, UploadHub  # noqa: E402

_POLL = 0.1  # seconds
_SHARD = "200M"  # of files that workers upload


@dataclass(frozen=True)
class Run:
    """One conversion: how long it took, and what was read.

    peak_mb: the most resident memory of a worker. cpu_seconds: of the command and its workers.
    """

    workers: int
    seconds: float
    read_mb: float
    peak_mb: float
    cpu_seconds: float


class Usage:
    """Of a command: the peak memory of its workers, and the CPU seconds of all processes by id."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self.cpu: dict[int, float] = {}
        self._process = psutil.Process(pid)

    def update(self) -> None:
        """Read both of the processes that run now."""
        with suppress(psutil.Error):
            for process in (self._process, *self._process.children(recursive=True)):
                times = process.cpu_times()
                self.cpu[process.pid] = times.user + times.system
                if "spawn_main" in " ".join(process.cmdline()):
                    self.peak = max(self.peak, process.memory_info().rss)


def measure(workers: int, types: str, folder: Path, hub: UploadHub, *, upload: bool) -> Run:
    """Publish with this many workers."""
    began: list[float] = []

    def note() -> str:
        began.append(time.time())
        return ""

    hub.trouble = note
    hub.requests.clear()
    hub.created = None
    hub.stored.clear()
    words = ["publish", MODEL, "--types", types, "--to", TARGET, "-o", str(folder / "out")]
    words += ["--cluster", f"local:{workers}", "--no-check"]  # random weights: no draft is right
    words += ["--worker-upload", "--split-max-size", _SHARD] if upload else ["--no-upload"]
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    env = environment(hub, folder / "home", TMPDIR=str(folder / "tmp"), HF_HUB_DISABLE_XET="1")
    program = shutil.which("mtp-gguf") or "mtp-gguf"
    with subprocess.Popen([program, *words], env=env, stdout=subprocess.DEVNULL) as process:
        usage = Usage(process.pid)
        with polling(usage.update, _POLL):
            status = process.wait()
            ended = time.time()
    if status:
        raise SystemExit(f"failed: {' '.join(words)}")
    if not upload:
        ended = (folder / "out" / "README.md").stat().st_mtime
    shutil.rmtree(folder / "home")
    run = Run(
        workers,
        round(ended - began[0], 1),
        round(hub.weights_sent / 1e6),
        round(usage.peak / 1e6),
        round(sum(usage.cpu.values()), 1),
    )
    print(json.dumps(asdict(run)), file=sys.stderr, flush=True)
    return run


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each GGUF in a folder."""
    return {path.name: sha256(path) for path in folder.glob("*.gguf")}


def main() -> None:
    options = parser(__doc__, {"--megabits": 3.0})
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--types", default="Q8_0")
    options.add_argument("--upload", action="store_true", help="let the workers upload")
    args = options.parse_args()
    runs, known = [], None
    rate = args.megabits * 1e6 / 8
    with checkpoint_of(args) as checkpoint:
        for workers in args.workers:
            folder = args.work / f"{workers}-workers"
            with UploadHub(MODEL, {"main": checkpoint}, bytes_per_second=rate) as hub:
                runs.append(measure(workers, args.types, folder, hub, upload=args.upload))
                found = digests(folder / "out")
                if args.upload:
                    found = {
                        name: hashlib.sha256(data).hexdigest() for name, data in hub.stored.items()
                    }
            if known not in (None, found):
                raise SystemExit(f"{workers} workers: other bytes than with {args.workers[0]}")
            known = found
            shutil.rmtree(folder)
    print(
        f"{args.shape} shape, {args.types}, {args.megabits:g} Mbit/s for each connection, ", end=""
    )
    print(f"{platform.machine()}, {os.cpu_count()} CPUs\n")
    heading("workers", "seconds", "of linear", "read", "memory of a worker", "CPU seconds")
    for run in runs:
        linear = runs[0].seconds * runs[0].workers / (run.seconds * run.workers)
        figures = (f"{run.seconds:.1f}", f"{linear:.2f}", f"{run.read_mb:.0f} MB")
        row(run.workers, *figures, f"{run.peak_mb:.0f} MB", f"{run.cpu_seconds:.0f}")


if __name__ == "__main__":
    main()
