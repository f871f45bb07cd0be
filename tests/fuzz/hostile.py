"""Hostile GGUF files through every command that loads a model: told, never killed.

    python tests/fuzz/hostile.py --files 100000 --first 0 --report FILE.json

Each file is a tiny sound model after the mutations that its number draws (draw_mutations.py). A
worker process makes one file after the other and gives it to the commands; when it dies, the file
is tried once more on its own, so that the death is its own, and another worker goes on. The report
counts the outcomes and names the mutations of the first files of each kind of death.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import io
import json
import multiprocessing
import os
import pkgutil
import random
import re
import resource
import select
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.native_corpus import DENSE, MOE

from mtp_gguf.bench.model import BenchModel, Setting
from mtp_gguf.gguf_tools.errors import MtpGgufError
from mtp_gguf.gguf_tools.files.format import ValueType
from mtp_gguf.native._bindings import library
from mtp_gguf.native.chat.generate import Generation, generate
from mtp_gguf.native.llama.mtp_llama import MTPLlama
from support.commands import invoke
from support.draw_mutations import random_mutations
from support.gguf_mutations import (
    AddTensor,
    Content,
    Fill,
    Mutation,
    Retype,
    SetArray,
    mutated,
    read_content,
)
from support.models import Models

PROMPT = "def f(x):\n    return <|im_end|>1 é"
SECONDS = 20  # a file that takes longer hangs
MEMORY = 6 << 30  # address space of a worker
SHOWN = 3  # files named for each kind of death

# Several depths, because a command may go wrong with and without drafts.
_GENERATE = ("-p", PROMPT, "-n", "5", "-t", "1", "-c", "64", "--json", "--no-profile")


def base_contents(folder: Path) -> dict[str, Content]:
    """Sound models to begin with: dense and mixed, quantized, with each stored draft vocabulary."""
    models = Models(folder)
    dense, moe = (read_content(models.gguf(spec)) for spec in (DENSE, MOE))
    ids = dense.copy()
    SetArray("mtp_gguf.fastmtp.token_ids", ValueType.U32, tuple(range(800, 1024))).apply(ids)
    table = moe.copy()
    AddTensor("d2t", (1024,), "I64").apply(table)
    Fill("d2t", b"".join(i.to_bytes(8, "little") for i in range(1024))).apply(table)
    AddTensor("blk.2.nextn.shared_head_head.weight", (32, 1024)).apply(table)
    quantized = dense.copy()
    for tensor in quantized.tensors:
        if len(tensor.shape) == 2 and "conv1d" not in tensor.name:
            Retype(tensor.name, "Q8_0").apply(quantized)
            Fill(tensor.name, bytes([0, 28, *range(32)])).apply(quantized)
    return {"dense": dense, "moe": moe, "ids": ids, "table": table, "quantized": quantized}


def draw(contents: dict[str, Content], number: int) -> tuple[str, list[Mutation]]:
    """The model that file `number` begins with, and its mutations."""
    source = random.Random(number)
    name = source.choice(tuple(contents))
    return name, random_mutations(contents[name], source)


def _command(*words: object) -> str:
    result = invoke(*words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in (0, 1):
        raise AssertionError(f"exit code {result.exit_code}: {result.stderr}")
    if result.exit_code and words[0] not in ("doctor", "compare"):
        lines = result.stderr.rstrip("\n").split("\n")
        told = [line for line in lines if line.startswith("mtp-gguf: ")]
        assert told, result.stderr
    if result.exit_code == 0:
        return "accepted"
    return f"refused: {result.stderr[-400:]}"


def _bench(path: Path) -> str:
    with BenchModel(path, n_ctx=64, threads=1) as model:
        tokens = model.tokenize(PROMPT) or [1]
        with model.session(Setting(2)) as session:
            session.decode(tokens[:8])
            for _ in range(2):
                token = session.argmax()
                session.step(token, 2)
        model.piece(0)
        model.is_end(0)
        if model.write_chat:
            model.write_chat("x")
    return "accepted"


def _plain(path: Path) -> str:
    list(generate(path, [PROMPT], Generation(4, 0.8, 1, 128)))
    return "accepted"


def _head_of_another(path: Path, trunk: Path) -> str:
    options: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "n_threads_batch": 1, "profile": False}
    with contextlib.closing(MTPLlama(str(trunk), depth=2, mtp_head=str(path), **options)) as llm:
        for token, _ in zip(llm.generate([1, 2, 3]), range(4), strict=False):
            llm.detokenize([token])
    return "accepted"


def steps(path: Path, number: int, folder: Path) -> dict[str, Callable[[], str]]:
    """The commands for one file: `doctor`, `generate`, and one of the others by its number."""
    out = ("-o", folder / "o.gguf", "--overwrite")
    sound, trunk, corpus = (folder / name for name in ("dense.gguf", "trunk.gguf", "corpus.txt"))
    others: list[tuple[str, Callable[[], str]]] = [
        ("bench", lambda: _bench(path)),
        ("fastmtp add", lambda: _command("fastmtp", "add", path, "--corpus", corpus, *out)),
        ("plain", lambda: _plain(path)),
        ("convert", lambda: _command("convert", path, *out, "--quant", "Q4_K_M")),
        ("head of another", lambda: _head_of_another(path, sound)),
        ("graft from", lambda: _command("graft", trunk, "--from", path, *out, "--no-check")),
        ("extract", lambda: _command("extract", path, *out)),
        ("strip", lambda: _command("strip", path, *out)),
        ("compare", lambda: _command("compare", path, sound)),
        ("exact", lambda: _command("generate", path, *_GENERATE, "--depth", "auto", "--exact")),
        ("temperature", lambda: _command("generate", path, *_GENERATE, "--temp", "1")),
        ("no depth", lambda: _command("generate", path, *_GENERATE, "--depth", "0")),
        ("fastmtp show", lambda: _command("fastmtp", "show", path)),
        ("list-tensors", lambda: _command("list-tensors", path)),
    ]
    if number % 5:  # starts a process, and the commands beside it do not
        others = [other for other in others if other[0] != "convert"]
    name, step = others[number % len(others)]
    return {
        "doctor": lambda: _command("doctor", path),
        "generate": lambda: _command("generate", path, *_GENERATE, "--depth", "2"),
        name: step,
    }


def outcome(step: Callable[[], str]) -> str:
    """What a step came to: accepted, refused, or the exception that should not have been."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return step()
    except MtpGgufError:
        return "refused"
    except MemoryError:
        return "no memory"
    except BaseException as error:
        return f"traceback: {type(error).__name__}: {str(error)[:200]}"


def import_commands() -> None:
    """Import what the commands would import, once for all workers."""
    for room in ("cli", "gguf_tools", "convert", "native", "bench"):
        package = import_module(f"mtp_gguf.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"mtp_gguf.{room}."):
            import_module(module.name)


def _work(
    contents: dict[str, Content], numbers: Sequence[int], folder: Path, pipe: int, log: Path
) -> None:
    """In a process of its own: one file after the other; a line before and after each step."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["GGML_NO_BACKTRACE"] = "1"
    err = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(err, 2)
    faulthandler.enable()
    multiprocessing.cpu_count = lambda: 1  # llama_cpp's default for threads
    told = _aborts_told(err)
    path = folder / f"file-{os.getpid()}.gguf"
    for number in numbers:
        name, mutations = draw(contents, number)
        path.write_bytes(mutated(contents[name], mutations))
        os.ftruncate(err, 0)
        os.lseek(err, 0, os.SEEK_SET)
        for step_name, step in steps(path, number, folder).items():
            os.write(pipe, f"> {number} {step_name}\n".encode())
            found = outcome(step).replace("\n", " ")
            os.write(pipe, f"< {number} {step_name}\t{found}\n".encode())
        os.write(pipe, f". {number}\n".encode())
    path.unlink(missing_ok=True)
    del told


def _aborts_told(log: int) -> object:
    """Have ggml write why it aborts into `log`, for as long as the result lives."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    callback = kind(lambda message: os.write(log, message + b"\n") and None)
    library().ggml_set_abort_callback(callback)  # of the ggml that libmtp is linked to
    return callback


def _lines(pipe: int, seconds: float) -> Iterator[str | None]:
    """Lines of the worker; None when it has said nothing for so long."""
    rest = b""
    while True:
        if not select.select([pipe], [], [], seconds)[0]:
            yield None
            return
        data = os.read(pipe, 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")


def death(status: int, log: str) -> str:
    """Why a worker died: the assertion that failed, or where in Python it was."""
    name = signal.Signals(status).name if status in set(signal.Signals) else str(status)
    stated = re.search(r"[\w./-]*?([\w-]+\.\w+):(\d+): (GGML_ASSERT\(.*\) failed|.{1,120})", log)
    what = re.search(r"what\(\):\s*(.*)", log)
    if stated and "File" not in stated[0]:
        return f"{name}: {stated[1]}:{stated[2]}: {stated[3]}"
    if what:
        return f"{name}: {what[1]}"
    frames = re.findall(r'File ".*?([\w-]+\.py)", line (\d+) in (\w+)', log)[:3]
    return f"{name} in {' < '.join(f'{f}:{line} {n}' for f, line, n in frames)}"


class Campaign:
    """Files by number, their outcomes counted."""

    def __init__(self, contents: dict[str, Content], folder: Path) -> None:
        self.contents = contents
        self.folder = folder
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.deaths: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.death_counts: Counter[str] = Counter()
        self.surprises: Counter[str] = Counter()  # accepted by doctor, refused by generate
        self.files = 0

    def run(self, numbers: Sequence[int], until: float = float("inf")) -> None:
        """Give each file to the commands."""
        at = 0
        while at < len(numbers) and time.monotonic() < until:
            at += self._batch(numbers[at : at + 500])

    def _batch(self, numbers: Sequence[int]) -> int:
        """Run a worker until it ends or dies; how many files that was."""
        read, write = os.pipe()
        log = self.folder / f"log-{os.getpid()}.txt"
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(read)
                _work(self.contents, numbers, self.folder, write, log)
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        done = 0
        step = ""
        hung = False
        outcomes: dict[str, str] = {}
        for line in _lines(read, SECONDS):
            if line is None:
                hung = True
                os.kill(child, signal.SIGKILL)
                break
            if line.startswith(">"):
                step = line.split(" ", 2)[2]
            elif line.startswith("<"):
                step, found = line.split(" ", 2)[2].split("\t", 1)
                outcomes[step] = found
                self._count(step, found, numbers[done])
            else:
                if outcomes.get("doctor") == "accepted" != outcomes.get("generate"):
                    said = re.sub(r"/\S+|[0-9]+|'[^']*'", "#", outcomes["generate"])
                    self.surprises[said[:160]] += 1
                done += 1
                self.files += 1
                outcomes = {}
        os.close(read)
        _, status = os.waitpid(child, 0)
        if status == 0 and not hung:
            return done
        if done == len(numbers):  # while it ended
            return done
        text = log.read_text(errors="replace")
        kind = "hangs" if hung else death(os.WTERMSIG(status) or status, text)
        kind = f"{step}: {kind}"
        self.counts[step]["death"] += 1
        self._note(kind, numbers[done], text)
        self.files += 1
        return done + 1

    def _count(self, step: str, found: str, number: int) -> None:
        kind = found.split(":", 1)[0]
        self.counts[step][kind] += 1
        if kind not in ("accepted", "refused"):
            self._note(f"{step}: {re.sub(r'[0-9]+', '#', found)[:120]}", number, found)

    def _note(self, kind: str, number: int, text: str) -> None:
        self.death_counts[kind] += 1
        if len(self.deaths[kind]) < SHOWN:
            name, mutations = draw(self.contents, number)
            self.deaths[kind].append(
                {"number": number, "model": name, "mutations": repr(mutations), "log": text[:600]}
            )

    def report(self) -> dict[str, Any]:
        """What was found, for JSON."""
        return {
            "files": self.files,
            "outcomes": {step: dict(counts) for step, counts in self.counts.items()},
            "doctor accepts, generate does not": dict(self.surprises),
            "faults": [
                {"kind": kind, "count": count, "first": self.deaths[kind]}
                for kind, count in self.death_counts.most_common()
            ],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        contents = base_contents(folder)
        (folder / "dense.gguf").write_bytes(contents["dense"].encode())
        invoke("strip", folder / "dense.gguf", "-o", folder / "trunk.gguf")
        (folder / "corpus.txt").write_text("def f(x): return x\n" * 20)
        import_commands()
        campaign = Campaign(contents, folder)
        began = time.monotonic()
        numbers = range(options.first, options.first + options.files)
        for start in range(0, len(numbers), 500):
            campaign.run(numbers[start : start + 500])
            text = json.dumps(campaign.report(), indent=1)
            if options.report:
                options.report.write_text(text)
            print(campaign.files, f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if not options.report:
        print(text)


if __name__ == "__main__":
    main()
