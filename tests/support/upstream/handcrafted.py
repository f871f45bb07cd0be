"""The files that llama.cpp's own reader is tested with, made by that test's own code."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from support.upstream.sdist import llama_cpp_source

DRIVER = Path(__file__).with_suffix(".cpp")


def build(folder: Path) -> Path:
    """Compile upstream's test with our own main; the program."""
    source = llama_cpp_source()
    test = source / "tests" / "test-gguf.cpp"
    compiler = shutil.which("c++")
    assert compiler, "a C++ compiler is needed, as for the package itself"
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    libraries = Path(spec.origin).parent / "lib"
    every = " ".join(f"CASE({name})" for name in cases(test.read_text(encoding="utf-8")))
    program = folder / "handcrafted"
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O1",
            f'-DTEST_GGUF="{test}"',
            f"-DEVERY_CASE={every}",
            *(f"-I{source / place}" for place in ("include", "ggml/include", "ggml/src", "common")),
            str(DRIVER),
            f"-L{libraries}",
            f"-Wl,-rpath,{libraries}",
            "-lggml",
            "-lggml-base",
            "-o",
            str(program),
        ],
        check=True,
        capture_output=True,
    )
    return program


def cases(text: str) -> list[str]:
    """Names of the enum of handcrafted files, those left out by a comment excepted."""
    match = re.search(r"enum handcrafted_file_type \{(.*?)\};", text, re.DOTALL)
    assert match
    return re.findall(r"^\s*(HANDCRAFTED_\w+)\s*=", match[1], re.MULTILINE)


def write(program: Path, seed: int, folder: Path) -> dict[str, tuple[Path, bool]]:
    """Write every case: by name the file and whether upstream expects it to be read."""
    output = subprocess.run(
        [str(program), str(seed), str(folder)], check=True, capture_output=True, text=True
    ).stdout
    pairs = [line.split() for line in output.splitlines()]
    return {name: (folder / f"{name}.gguf", expected == "1") for name, expected in pairs}
