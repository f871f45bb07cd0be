"""The program of emulated_driver.cpp with the patched ggml and our kernels, compiled for ARM."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from mtp_gguf.server.patches import apply as apply_patches
from mtp_gguf.server.patches import read_patches
from mtp_gguf.server.upstream_source import fetch_archive, unpack_llama_cpp

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSTEM = "/usr/aarch64-linux-gnu"  # the compiler's libraries for ARM
KERNELS = Path(__file__).parents[3] / "native" / "kernels"
TOOLS = (COMPILER, "aarch64-linux-gnu-gcc", EMULATOR, "cmake", "ninja")
OPTIONS = (
    "CMAKE_SYSTEM_NAME=Linux",
    "CMAKE_SYSTEM_PROCESSOR=aarch64",
    "CMAKE_C_COMPILER=aarch64-linux-gnu-gcc",
    f"CMAKE_CXX_COMPILER={COMPILER}",
    "CMAKE_BUILD_TYPE=Release",
    "BUILD_SHARED_LIBS=ON",
    "GGML_NATIVE=OFF",
    "GGML_CPU_ARM_ARCH=armv8-a",  # no dot products: our kernels alone have them, at run time
    "GGML_OPENMP=OFF",
    "LLAMA_BUILD_COMMON=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_TOOLS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
)


def missing_tools() -> list[str]:
    """What of the tools is not on the PATH."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def build_driver(folder: Path) -> Path:
    """The program, made in an empty folder in some minutes of CPU time."""
    source, objects, program = folder / "source", folder / "build", folder / "driver"
    unpack_llama_cpp(fetch_archive(), source)
    apply_patches(read_patches(), source)
    commands: list[list[str | Path]] = [
        ["cmake", "-S", source, "-B", objects, "-G", "Ninja", *(f"-D{o}" for o in OPTIONS)],
        ["cmake", "--build", objects, "--target", "ggml-cpu", "--parallel", "2"],
        [
            *(COMPILER, "-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"),
            *("-I", KERNELS / "include", "-I", source / "ggml/include"),
            *(*KERNELS.glob("src/*.cpp"), *KERNELS.glob("src/lanes/*.cpp")),
            *("-Wl,-soname,libmtp_kernels.so", "-o", objects / "bin/libmtp_kernels.so"),
        ],
        [
            *(COMPILER, "-O2", "-I", source / "ggml/include"),
            *(Path(__file__).with_name("emulated_driver.cpp"), "-o", program),
            *("-L", objects / "bin", "-lggml-cpu", "-lggml-base", "-lpthread", "-lm", "-ldl"),
            f"-Wl,-rpath,{objects / 'bin'}",
        ],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return program
