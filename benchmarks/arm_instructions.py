"""Count the instructions of few-column matrix products on ARM, of ggml and of our kernels.

    python benchmarks/arm_instructions.py FOLDER

FOLDER must be empty; ggml is built there with dot products and with i8mm (some minutes of CPU
time). Needs aarch64-linux-gnu-g++, qemu-aarch64 with plugins (7 or 8), gcc, cmake and ninja. The
table shows instructions per 256 weights and column, counted by emulation. The costs of quantizing
columns and of the graph are subtracted by counting matrices of two sizes. ggml repacks weights if
llama.cpp would.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from gguf import GGMLQuantizationType

from mtp_gguf.server.patches import apply, read_patches
from mtp_gguf.server.upstream_source import fetch_archive, unpack_llama_cpp

HERE = Path(__file__).with_suffix("")
KERNELS = HERE.parents[1] / "native" / "kernels"
SYSTEM = "/usr/aarch64-linux-gnu"  # the compiler's libraries for ARM
# Features to compile for, and the CPU model of qemu that runs the result.
SETS = {"dotprod": "neoverse-n1", "dotprod+i8mm": "max"}
REPACKED = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
TYPES = (*REPACKED, "IQ4_XS", "F16", "BF16", "F32")
COLUMNS = (1, 2, 3, 4, 8, 64)
N, ROWS = 1024, (128, 384)


def run(*words: str | Path) -> str:
    """Return what a command writes to stderr; exit if the command fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{words[0]}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stderr


def build(folder: Path, features: str) -> Path:
    """Compile product.cpp with the patched ggml for some features of ARM; return the program."""
    objects, program = folder / features, folder / f"product-{features}"
    settings = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_C_COMPILER": "aarch64-linux-gnu-gcc",
        "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        "GGML_NATIVE": "OFF",
        "GGML_CPU_ARM_ARCH": f"armv8.2-a+fp16+{features}",
        "GGML_OPENMP": "OFF",
        "LLAMA_BUILD_COMMON": "OFF",
    }
    options = [f"-D{name}={value}" for name, value in settings.items()]
    run("cmake", "-S", folder / "source", "-B", objects, "-G", "Ninja", *options)
    run("cmake", "--build", objects, "--target", "ggml-cpu", "--parallel", "2")
    compiler = ("aarch64-linux-gnu-g++", "-std=c++17", "-O2", "-I", folder / "source/ggml/include")
    files = (*KERNELS.glob("src/*.cpp"), *KERNELS.glob("src/lanes/*.cpp"))
    kernels = ("-shared", "-fPIC", "-fvisibility=hidden", "-I", KERNELS / "include")
    run(*compiler, *kernels, *files, "-o", objects / "bin/libmtp_kernels.so")
    libraries = ("-L", objects / "bin", "-lggml-cpu", "-lggml-base", "-lpthread", "-lm")
    found = f"-Wl,-rpath,{(objects / 'bin').resolve()}"
    run(*compiler, HERE / "product.cpp", *libraries, found, "-o", program)
    return program


def instructions(command: list[str | Path], kind: str, columns: int, layout: str) -> float:
    """Return the number of instructions per 256 weights and column."""
    number = GGMLQuantizationType[kind].value
    once = []
    for rows in ROWS:
        words = [[str(x) for x in (number, N, rows, columns, times, layout)] for times in (1, 3)]
        first, third = (int(run(*command, *each).split("executed ")[1]) for each in words)
        once.append((third - first) / 2)
    return (once[1] - once[0]) / ((ROWS[1] - ROWS[0]) * N / 256) / columns


def main() -> None:
    """Build the programs, count their instructions and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for llama.cpp's source and the programs")
    folder: Path = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    unpack_llama_cpp(fetch_archive(), folder / "source")
    apply(read_patches(), folder / "source")
    plugin = folder.resolve() / "count.so"
    run("gcc", "-O2", "-shared", "-fPIC", HERE / "count.c", "-o", plugin)
    for features, cpu in SETS.items():
        program = build(folder, features)
        print(f"| {features} | " + " | ".join(map(str, COLUMNS)) + " |", flush=True)
        for kind in TYPES:
            stock = "repacked" if kind in REPACKED else "plain"
            cells = []
            for columns in COLUMNS:
                counts = []
                for lanes, layout in (("0", stock), ("all", "plain")):
                    qemu = ["qemu-aarch64", "-cpu", cpu, "-E", f"MTP_GGUF_KERNELS={lanes}"]
                    qemu += ["-L", SYSTEM]
                    command: list[str | Path] = [*qemu, "-plugin", plugin, program]
                    counts.append(instructions(command, kind, columns, layout))
                cells.append(f"{counts[0]:.0f} → {counts[1]:.0f}")
            print(f"| {kind} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
