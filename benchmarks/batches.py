"""Say how fast builds of llama.cpp and of ik_llama.cpp evaluate batches of a few sizes.

    python benchmarks/batches.py MODEL.gguf --ours FOLDER [--ours FOLDER] --ik SOURCE
        [--copied] [--small-pages] [--rounds 60] [--threads 2] [--kernels WORDS] [--tokens N]

FOLDER is one of `mtp-gguf build-server` (its second line); its headers are those of the
llama-cpp-python that is installed with this Python. SOURCE is a checkout of ik_llama.cpp that is
built in SOURCE/build. Each engine loads the model in a process that stays, and evaluates some
batches when it is asked; the engines alternate in random order, so that a slow second affects all.
The model is read in huge pages first, where the system can. `--small-pages` measures each a second
time with a copy in pages of 4 KiB, `--copied` with the weights in huge pages of memory, and each
`--kernels` ours once more with these words in MTP_GGUF_KERNELS, such as 0 for ggml's own kernels,
or fixed,hint,one_stream. `--tokens`, repeatable, are the sizes (1, 4, and 4 that begin a sequence).
Prints a table for each kind of batch: the median time, and the median over the rounds of an
engine's speed divided by that of each other one, with the 95 % interval of that median (bootstrap).
The first round warms up.
"""

from __future__ import annotations

import os
import random
import subprocess
import sysconfig
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measuring import heading, median_with_interval, options, row

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.machine.huge_pages import read_in_huge_pages
from mtp_gguf.server.huge_pages import huge_page_environment


@dataclass(frozen=True)
class Kind:
    """Batches of so many tokens, within a sequence or at its beginning."""

    tokens: int
    begins: bool = False

    def __str__(self) -> str:
        return f"{self.tokens}{', a sequence begins' if self.begins else ''}"

    @property
    def request(self) -> str:
        """What batches.cpp reads: as many batches as take some 0.2 s."""
        return f"{self.tokens} {int(self.begins)} {max(1, 20 // (self.tokens + 1))}\n"


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


def start(
    stack: ExitStack, program: Path, kernels: str | None, *arguments: str
) -> subprocess.Popen[str]:
    """Start a program of `Engine.compile`, and wait until it has loaded its model."""
    variables = dict(huge_page_environment(os.environ) if arguments[1] == "1" else os.environ)
    if kernels is not None:
        variables["MTP_GGUF_KERNELS"] = kernels
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


def ask(process: subprocess.Popen[str], kind: Kind) -> float:
    """Have some batches evaluated, and return the seconds of one of them."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(kind.request)
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit(f"{process.args}: ended while it was measured")
    return float(answer)


def copy_in_small_pages(file: Path, folder: Path) -> Path:
    """Copy a file in parts that are too small for huge pages of the system's cache."""
    copy = folder / file.name
    with file.open("rb") as source, copy.open("wb", buffering=0) as to:
        while part := source.read(4096):
            to.write(part)
        os.fsync(to.fileno())
    return copy


def report(kind: Kind, times: dict[str, list[float]]) -> None:
    """Print the table of a kind of batch."""
    print()
    heading(kind, "ms", *(f"to {name}" for name in times))
    for name, own in times.items():
        cells = []
        for other in times.values():
            ratio, low, high = median_with_interval(np.array(other) / np.array(own))
            cells.append("1" if other is own else f"{ratio:.3f} ({low:.3f} to {high:.3f})")
        row(name, f"{1000 * np.median(own):.2f}", *cells)


def main() -> None:
    parser = options(__doc__, {"--rounds": 60, "--threads": 2})
    parser.add_argument("model", type=Path)
    parser.add_argument("--ours", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--ik", type=Path, metavar="SOURCE")
    parser.add_argument("--copied", action="store_true")
    parser.add_argument("--small-pages", action="store_true")
    parser.add_argument("--kernels", action="append", default=[], metavar="WORDS")
    parser.add_argument("--tokens", type=int, action="append", metavar="N")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.threads < 1:
        parser.error("--rounds, --threads: expected 1 or more")
    if not all(0 < n <= 512 for n in arguments.tokens or ()):
        parser.error("--tokens: expected 1 to 512")
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
        *(engine.libraries[0] / "libllama.so" for engine in engines),
    ):
        if not file.is_file():
            parser.error(f"{file}: expected a file")

    kinds = [Kind(1), Kind(4), Kind(4, begins=True)]
    if arguments.tokens:
        kinds = [Kind(n) for n in arguments.tokens]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = {}
        read_in_huge_pages([arguments.model])
        places = {"": (arguments.model, "0")}
        if arguments.small_pages:
            small = copy_in_small_pages(arguments.model, folder)
            places[", small pages"] = (small, "0")
        if arguments.copied:
            places[", copied"] = (arguments.model, "1")
        for engine in engines:
            program = engine.compile(folder)
            for place, (file, copied) in places.items():
                for words in [None, *(arguments.kernels if engine.name != "ik" else ())]:
                    name = engine.name + place + (f", {words}" if words is not None else "")
                    work = (str(file), copied, str(arguments.threads))
                    processes[name] = start(stack, program, words, *work)
        times: dict[Kind, dict[str, list[float]]] = {
            kind: {name: [] for name in processes} for kind in kinds
        }
        for number in range(arguments.rounds + 1):
            order = list(processes)
            random.shuffle(order)
            for kind in kinds:
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
