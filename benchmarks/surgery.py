"""Compare list-tensors with gguf-dump, graft with cp, and compare with cmp: time and bytes.

    python benchmarks/surgery.py --checkpoint FOLDER --work /path/with/space

The checkpoint is one that benchmarks/convert.py generated (random weights, the family's real
shape). Each command is a separate process, files come from the page cache, the commands compared
alternate, and medians are reported. A graft is timed on a base with several times this model's
tensors (--times), because with a file that fits into the kernel's write buffer `cp` seems to take
no time. `cp` is timed twice, alone and followed by the fsync that mtp-gguf does before it renames a
file. The graft is timed without measuring acceptance (`--no-check`). Comparing identical files is
timed against `cmp`. The bytes that a graft fetches are counted by a hub server on loopback.
"""

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from measuring import options

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from mtp_gguf.gguf_tools.files.rewrite import OutputSpec, copies, write  # noqa: E402
from mtp_gguf.gguf_tools.model import open_model  # noqa: E402
from support.hub_server import Hub  # noqa: E402

PROGRAM = shutil.which("mtp-gguf", path=str(Path(sys.executable).parent)) or "mtp-gguf"
DUMP = shutil.which("gguf-dump", path=str(Path(sys.executable).parent)) or "gguf-dump"


def run(*command: object, **env: str) -> None:
    """Run a command; show its output only if it fails."""
    words = [str(word) for word in command]
    result = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )
    if result.returncode:
        sys.exit(f"{' '.join(words)}: {result.stdout}{result.stderr}")


def seconds(
    runs: int, *, without: Path | None = None, **jobs: Callable[[], object]
) -> dict[str, float]:
    """Return the median wall time of each job; runs alternate, and the first is not counted.

    without: the file that every job writes; it is removed before each run. Pending writes of the
    previous job are flushed first, so that they do not count toward this one.
    """
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(runs + 1):
        for name, job in jobs.items():
            if without is not None:
                without.unlink(missing_ok=True)
            os.sync()
            began = time.perf_counter()
            job()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def repeated(model: Path, target: Path, times: int) -> None:
    """Write `model` with all its tensors several times, under different names."""
    with open_model(model) as held:
        tensors = copies(held)
        more = (
            dataclasses.replace(
                tensor, spec=dataclasses.replace(tensor.spec, name=f"copy{i}.{tensor.name}")
            )
            for i in range(1, times)
            for tensor in tensors
        )
        write(target, OutputSpec(held.metadata(), (*tensors, *more)))


def copy(source: Path, target: Path, *, sync: bool) -> None:
    """Copy a file with `cp`; with `sync`, flush it to the disk."""
    run("cp", source, target)
    if sync:
        run("sync", target)


def fetched(trunk: Path, checkpoint: Path, work: Path) -> dict[str, int]:
    """Return the bytes and requests of a graft from a hub id, and the bytes of the head."""
    with Hub("owner/model", {"main": checkpoint}) as hub:
        environment = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(work / "home"),
            "NO_PROXY": "*",
        }
        target = work / "fetched.gguf"
        run(
            PROGRAM, "graft", trunk, "--from", "owner/model", "-o", target, "--overwrite",
            "--no-check", **environment,
        )  # fmt: skip
        asked = [a.range for a in hub.requests if a.path.startswith("/cdn/") and a.method == "GET"]
    total = 0
    for given in asked:
        first, _, last = given.removeprefix("bytes=").partition("-")
        total += int(last) - int(first) + 1
    head = weights = 0
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        weights += path.stat().st_size
        for name, entry in header.items():
            if "mtp." in name:
                head += entry["data_offsets"][1] - entry["data_offsets"][0]
    return {"head": head, "fetched": total, "requests": len(asked), "checkpoint": weights}


def main() -> None:
    parser = options(__doc__, {"--runs": 5, "--times": 3})
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    work, runs, checkpoint = arguments.work, arguments.runs, arguments.checkpoint
    work.mkdir(parents=True, exist_ok=True)
    whole, trunk, again, plain, high, large, several = (
        work / f"{name}.gguf"
        for name in ("whole", "trunk", "again", "plain", "high", "large", "several")
    )
    for target, quant in ((whole, "Q4_K_M"), (high, "Q8_0"), (large, "F32")):
        if not target.exists():
            run(PROGRAM, "convert", checkpoint, "-o", target, "--quant", quant, "--mtp-f16")
    run(PROGRAM, "strip", whole, "-o", trunk, "--overwrite")
    run(PROGRAM, "strip", large, "-o", plain, "--overwrite")
    size = whole.stat().st_size

    def ours(*words: object) -> Callable[[], None]:
        return lambda: run(PROGRAM, *words)

    with open_model(whole) as model:
        header = model.first.data_offset
    took = seconds(min(runs, 3), ours=ours("list-tensors", whole), dump=lambda: run(DUMP, whole))
    print(
        f"list-tensors of {size / 1e6:.0f} MB, header {header / 1e6:.1f} MB: {took['ours']:.2f} s, "
        f"gguf-dump {took['dump']:.2f} s ({took['dump'] / took['ours']:.1f} x)"
    )

    run(PROGRAM, "graft", plain, "--from", large, "-o", again, "--no-check", "--overwrite")
    run("cmp", again, large)
    repeated(plain, several, arguments.times)
    took = seconds(
        runs,
        without=again,
        graft=ours("graft", several, "--from", large, "-o", again, "--no-check"),
        cp=lambda: copy(several, again, sync=False),
        synced=lambda: copy(several, again, sync=True),
    )
    print(
        f"graft, base of {several.stat().st_size / 1e9:.2f} GB: {took['graft']:.2f} s; "
        f"cp {took['cp']:.2f} s (graft {took['graft'] / took['cp']:.2f} x), "
        f"cp and fsync {took['synced']:.2f} s (graft {took['graft'] / took['synced']:.2f} x)"
    )
    several.unlink()

    run("cp", whole, again)
    took = seconds(
        runs,
        same=ours("compare", whole, again),
        cmp=lambda: run("cmp", whole, again),
        decoded=ours("compare", whole, high),
    )
    print(
        f"compare, same bytes: {took['same']:.2f} s, {2 * size / took['same'] / 1e9:.2f} GB/s "
        f"(cmp {2 * size / took['cmp'] / 1e9:.2f}); Q4_K_M with Q8_0: {took['decoded']:.2f} s, "
        f"{(size + high.stat().st_size) / took['decoded'] / 1e9:.2f} GB/s"
    )
    cost = fetched(trunk, checkpoint, work)
    print(
        f"graft from a hub id: {cost['fetched'] / 1e6:.2f} MB in {cost['requests']} requests for "
        f"a head of {cost['head'] / 1e6:.2f} MB (checkpoint {cost['checkpoint'] / 1e6:.0f} MB): "
        f"{cost['fetched'] / cost['head']:.3f} x"
    )


if __name__ == "__main__":
    main()
