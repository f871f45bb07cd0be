"""Say how fast builds of llama.cpp and of ik_llama.cpp evaluate one token and batches of four.

    python benchmarks/batches.py MODEL.gguf --ours FOLDER [--ours FOLDER] --ik SOURCE
        [--copied] [--rounds 60] [--threads 2]

FOLDER is one of `mtp-gguf build-server` (its second line); its headers are those of the
llama-cpp-python that is installed with this Python. SOURCE is a checkout of ik_llama.cpp that is
built in SOURCE/build. Each engine loads the model in a process that stays, and evaluates some
batches when it is asked; the engines alternate in random order, so that a slow second affects all.
`--copied` measures each a second time with the weights copied into huge pages. Prints a table for
each kind of batch: the median time, and the median over the rounds of an engine's speed divided by
that of each other one, with the 95 % interval of that median (bootstrap). The first round warms up.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sysconfig
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from two_builds import median_with_interval

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.server.huge_pages import huge_page_environment

# Batches of each measurement, so that it takes some 0.2 s
KINDS = {"first": 8, "one": 16, "four": 8}


@dataclass(frozen=True)
class Engine:
    """A build, and where its llama.h and libraries are."""

    name: str
    includes: list[Path]
    libraries: list[Path]
    options: tuple[str, ...] = ()

    def compile(self, folder: Path) -> Path:
        """Compile batches.cpp with this build, and return the path of the program."""
        program = folder / self.name
        rpath = ":".join(str(library.resolve()) for library in self.libraries)
        command = ["c++", "-O2", *self.options, *(f"-I{include}" for include in self.includes)]
        command += [str(Path(__file__).with_suffix(".cpp")), "-o", str(program)]
        command += [*(f"-L{library}" for library in self.libraries), "-lllama", "-lggml"]
        command += [f"-Wl,-rpath,{rpath}", "-Wl,--allow-shlib-undefined"]
        try:
            subprocess.run(command, check=True)
        except OSError as error:
            raise SystemExit(f"c++: expected a compiler: {error.strerror}") from None
        except subprocess.CalledProcessError:
            raise SystemExit(f"{self.name}: batches.cpp cannot be compiled, see above") from None
        return program


def start(stack: ExitStack, program: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a program of `Engine.compile`, and wait until it has loaded its model."""
    variables = huge_page_environment(os.environ) if arguments[1] == "1" else os.environ
    process = stack.enter_context(
        subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=variables,
        )
    )
    assert process.stdout
    if process.stdout.readline() != "ready\n":
        raise SystemExit(f"{program.name}: {arguments[0]} cannot be loaded")
    return process


def ask(process: subprocess.Popen[str], kind: str) -> float:
    """Have some batches evaluated, and return the seconds of one of them."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(f"{kind} {KINDS[kind]}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit(f"{process.args}: ended while it was measured")
    return float(answer)


def report(kind: str, times: dict[str, list[float]]) -> None:
    """Print the table of a kind of batch."""
    print(f"\n| {kind} | ms | {' | '.join(f'to {name}' for name in times)} |")
    print("|" + " --- |" * (len(times) + 2))
    for name, own in times.items():
        cells = []
        for other in times.values():
            ratio, low, high = median_with_interval(np.array(other) / np.array(own))
            cells.append("1" if other is own else f"{ratio:.3f} ({low:.3f} to {high:.3f})")
        print(f"| {name} | {1000 * np.median(own):.2f} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ours", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--ik", type=Path, metavar="SOURCE")
    parser.add_argument("--copied", action="store_true")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.threads < 1:
        parser.error("--rounds, --threads: expected 1 or more")
    if arguments.copied:
        try:
            huge_page_environment(os.environ)
        except RequestError as error:
            parser.error(str(error).replace("--huge-pages", "--copied"))
    if not arguments.ours and not arguments.ik:
        parser.error("--ours, --ik: expected at least one of them")
    engines = []
    if arguments.ik:
        source = arguments.ik
        includes = [source / "include", source / "ggml/include"]
        libraries = [source / "build/src", source / "build/ggml/src"]
        engines.append(Engine("ik", includes, libraries, ("-DIK",)))
    headers = Path(sysconfig.get_path("purelib")) / "include"
    for i, folder in enumerate(arguments.ours):
        name = f"ours {i + 1}" if len(arguments.ours) > 1 else "ours"
        engines.append(Engine(name, [headers], [folder]))
    for file in (
        arguments.model,
        *(folder / "libllama.so" for e in engines for folder in e.libraries[:1]),
    ):
        if not file.is_file():
            parser.error(f"{file}: expected a file")

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = {}
        for engine in engines:
            program = engine.compile(folder)
            for copied in (False, True) if arguments.copied else (False,):
                name = engine.name + (", copied" if copied else "")
                options = (str(arguments.model), str(int(copied)), str(arguments.threads))
                processes[name] = start(stack, program, *options)
        times: dict[str, dict[str, list[float]]] = {
            kind: {name: [] for name in processes} for kind in KINDS
        }
        for number in range(arguments.rounds + 1):
            order = list(processes)
            random.shuffle(order)
            for kind in KINDS:
                for name in order:
                    time = ask(processes[name], kind)
                    if number > 0:
                        times[kind][name].append(time)
        for kind, found in times.items():
            report(kind, found)
        for process in processes.values():
            assert process.stdin
            process.stdin.close()


if __name__ == "__main__":
    main()
