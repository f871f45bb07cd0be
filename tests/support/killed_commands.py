"""Kills commands, fills their disk and changes their input while they run; a program, as it forks.

    cd tests; python -m support.killed_commands FOLDER ROUNDS [SEED]

Each trial copies the inputs, runs a command in a child with what it imports already loaded, does
something to it at a random moment, and checks the promise: no half-written file under a name, no
input lost, and the same command afterwards gives what it always gives. Prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_gguf.gguf_tools.heads.draft_list import list_faults, read_draft_list
from mtp_gguf.gguf_tools.model import open_model
from support.checkpoints import SMALL, write_checkpoint
from support.commands import held, invoke, succeed


@dataclass(frozen=True)
class Job:
    """A command on files in the folder `{}`: what it reads, and what it writes.

    in_place: the one input that it is meant to change.
    """

    words: tuple[str, ...]
    outputs: tuple[str, ...]
    in_place: str | None = None


JOBS = {
    "convert": Job(("convert", "{}/hf", "-o", "{}/new.gguf", "--quant", "Q8_0"), ("new.gguf",)),
    "convert over": Job(
        ("convert", "{}/hf", "-o", "{}/old.gguf", "--quant", "Q8_0", "--overwrite"), ("old.gguf",)
    ),
    "convert also": Job(
        (
            *("convert", "{}/hf", "-o", "{}/old-F16.gguf", "--quant", "F16"),
            *("--also", "Q8_0", "--overwrite"),
        ),
        ("old-F16.gguf", "old-Q8_0.gguf"),
    ),
    "graft": Job(
        ("graft", "{}/trunk.gguf", "--from", "{}/whole.gguf", "-o", "{}/new.gguf", "--no-check"),
        ("new.gguf",),
    ),
    "strip": Job(("strip", "{}/whole.gguf", "-o", "{}/new.gguf"), ("new.gguf",)),
    "list of another length in place": Job(
        ("fastmtp", "add", "{}/whole.gguf", "-n", "256", "--in-place"), (), "whole.gguf"
    ),
    "list of the same length in place": Job(
        ("fastmtp", "add", "{}/listed.gguf", "--ids", "{}/ids.txt", "--in-place"), (), "listed.gguf"
    ),
}


class Scene:
    """The inputs, made once, and what each job makes of them undisturbed."""

    def __init__(self, folder: Path) -> None:
        self.inputs = folder / "inputs"
        self.inputs.mkdir(parents=True)
        write_checkpoint(self.inputs / "hf", SMALL)
        whole, listed = self.inputs / "whole.gguf", self.inputs / "listed.gguf"
        succeed("convert", self.inputs / "hf", "-o", whole, "--quant", "Q8_0")
        succeed("strip", whole, "-o", self.inputs / "trunk.gguf")
        succeed("fastmtp", "add", whole, "-n", "200", "-o", listed)
        with open_model(listed) as model:
            draft = read_draft_list(model)
        assert draft is not None
        (self.inputs / "ids.txt").write_text("\n".join(map(str, reversed(draft.ids))))
        for name in ("old", "old-F16", "old-Q8_0"):
            (self.inputs / f"{name}.gguf").write_bytes(b"what stood there")
        self.before = held(self.inputs)
        self.folder = folder / "trial"
        self.after: dict[str, dict[str, bytes]] = {}
        self.seconds: dict[str, float] = {}
        for name, job in JOBS.items():
            self.fresh()
            began = time.monotonic()
            assert self.wait(self.start(job)) == 0, name
            self.seconds[name] = time.monotonic() - began
            self.after[name] = held(self.folder)

    def fresh(self) -> None:
        """The inputs again, as they were."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.inputs, self.folder)

    def start(self, job: Job, prepare: Callable[[], None] = lambda: None) -> int:
        """Run a job in a child; its process id. It ends with its exit code, 70 for a traceback."""
        child = os.fork()
        if child:
            return child
        code = 70
        try:
            prepare()
            result = invoke(*(word.format(self.folder) for word in job.words))
            told = result.exit_code == 0 or result.stderr.count("mtp-gguf: ") == 1
            expected = result.exception is None or isinstance(result.exception, SystemExit)
            code = result.exit_code if told and expected else 70
            if code == 70:
                os.write(2, f"{result.stderr}{result.exception!r}\n".encode())
        finally:
            os._exit(code)

    def wait(self, child: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def check(self, name: str, code: int) -> str:
        """Hold the folder against the promise; what came of the job."""
        job = JOBS[name]
        now = {k: v for k, v in held(self.folder).items() if not Path(k).name.startswith(".")}
        before, after = self.before, self.after[name]
        changeable = {*job.outputs, job.in_place}
        assert {k: v for k, v in now.items() if k not in changeable} == {
            k: v for k, v in before.items() if k not in changeable
        }, f"{name}: an input is another"
        for output in job.outputs:
            assert now.get(output) in (before.get(output), after[output]), f"{name}: {output}"
        if job.in_place:
            assert job.in_place in now
            if now[job.in_place] not in (before[job.in_place], after[job.in_place]):
                self.check_between(name, self.folder / job.in_place)
        done = all(now.get(k) == after[k] for k in changeable if k)
        if code == 0:
            assert done, f"{name}: it said that it was done"
        return "done" if done else "not done"

    def check_between(self, name: str, path: Path) -> None:
        """A list changed in place is the old one, hidden, or the new one; all else is as it was."""
        with open_model(path) as model, open_model(self.inputs / path.name) as original:
            new, old = read_draft_list(model), read_draft_list(original)
            assert old is not None
            assert new is None or sorted(new.ids) == sorted(old.ids), name
            assert new is None or not list_faults(new.ids, 1024, ())
            for tensor in model.tensors:
                assert model.read(tensor) == original.read(tensor)

    def again(self, name: str) -> None:
        """The same command afterwards gives what it always gives, and cleans up."""
        job = JOBS[name]
        words = [word.format(self.folder) for word in job.words]
        outputs = [self.folder / output for output in job.outputs]
        if any(output.exists() for output in outputs) and "--overwrite" not in words:
            words.append("--overwrite")
        succeed(*words)
        after = self.after[name]
        now = held(self.folder)
        for key in {*job.outputs, job.in_place} - {None}:
            assert now[str(key)] == after[str(key)], f"{name}: {key} after another run"
        assert not [k for k in now if k.endswith(".partial")], "a leftover stays"


def kill(scene: Scene, name: str, chance: random.Random) -> str:
    """SIGKILL at a random moment."""
    child = scene.start(JOBS[name])
    time.sleep(chance.uniform(0, 1.1 * scene.seconds[name]))
    os.kill(child, signal.SIGKILL)
    code = scene.wait(child)
    assert code in (0, -signal.SIGKILL), f"{name}: exit code {code}"
    return scene.check(name, code)


def stop(scene: Scene, name: str, chance: random.Random) -> str:
    """SIGTERM at a random moment: nothing is left behind."""
    child = scene.start(JOBS[name])
    time.sleep(chance.uniform(0, 1.1 * scene.seconds[name]))
    os.kill(child, signal.SIGTERM)
    code = scene.wait(child)
    assert code in (0, 128 + signal.SIGTERM, -signal.SIGTERM), f"{name}: exit code {code}"
    assert not list(scene.folder.glob(".*.partial"))
    return scene.check(name, code)


def starve(scene: Scene, name: str, chance: random.Random) -> str:
    """`ulimit -f`: no file may become longer than this, as on a full disk."""
    limit = chance.choice((0, 1, 4096, 100_000, 400_000, 700_000, 10**7))

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code = scene.wait(scene.start(JOBS[name], prepare))
    assert code in (0, 1), f"{name}: exit code {code}"
    assert not list(scene.folder.glob(".*.partial"))
    return scene.check(name, code)


def inputs_of(scene: Scene, name: str) -> list[Path]:
    words = [Path(word.format(scene.folder)) for word in JOBS[name].words if "{}" in word]
    named = [path for path in words if path.exists() and path.name not in JOBS[name].outputs]
    return [
        file for path in named for file in ([path] if path.is_file() else sorted(path.iterdir()))
    ]


def shorten(scene: Scene, name: str, chance: random.Random) -> str:
    """An input is cut off at a random moment, by another process: told, or done before."""
    return _change(scene, name, chance, os.truncate)


def rewrite(scene: Scene, name: str, chance: random.Random) -> str:
    """An input gets other bytes at a random moment: told, or done before; never a mix."""

    def write(path: Path, at: int) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(os.urandom(1 + min(len(file.read()), 4096)))

    return _change(scene, name, chance, write)


def _change(
    scene: Scene, name: str, chance: random.Random, change: Callable[[Path, int], None]
) -> str:
    job = JOBS[name]
    path = chance.choice([p for p in inputs_of(scene, name) if p.suffix != ".jinja"])
    size = path.stat().st_size
    child = scene.start(job)
    time.sleep(chance.uniform(0, 1.1 * scene.seconds[name]))
    change(path, chance.randrange(size))
    code = scene.wait(child)
    assert code in (0, 1), f"{name}: exit code {code} over {path.name}"
    now = held(scene.folder)
    if code:
        for output in job.outputs:
            assert now.get(output) == scene.before.get(output), f"{name}: {output} after a failure"
    elif any(now[output] != scene.after[name][output] for output in job.outputs):
        # The change came before the command has read the file: what it gives is that of the change.
        for output in job.outputs:
            if output not in scene.before:
                (scene.folder / output).unlink()
        assert scene.wait(scene.start(job)) == 0
        assert held(scene.folder) == now, f"{name}: a mix, after {path.name} changed"
    assert not list(scene.folder.glob(".*.partial"))
    return "done" if code == 0 else "not done"


HARMS: Sequence[Callable[[Scene, str, random.Random], str]] = (kill, stop, starve, shorten, rewrite)


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    chance = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    scene = Scene(folder)
    counts: Counter[str] = Counter()
    for _ in range(rounds):
        for harm in HARMS:
            for name, job in JOBS.items():
                if harm in (shorten, rewrite) and job.in_place:
                    continue  # whoever writes to it meanwhile changes what was to be changed
                scene.fresh()
                counts[f"{harm.__name__}: {harm(scene, name, chance)}"] += 1
                if harm in (kill, stop, starve):
                    scene.again(name)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
