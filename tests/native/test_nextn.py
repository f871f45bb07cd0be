"""llama.cpp's NextN functions are found under their C++ names and under their C names."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "native"

# Libraries in place of llama.cpp's: with the functions as a C++ header exports them, as llama.h
# does, and without one of them.
STUB = "struct llama_context; static float state;"
SET = """
LLAMA void llama_set_embeddings_nextn(llama_context *, bool on, bool) { state = on ? 2.5f : 0; }
"""
GET = "LLAMA float * llama_get_embeddings_nextn(llama_context *) { return &state; }"
CALLER = """
#include "error.h"
#include "session/nextn.h"
extern "C" int call(float * out) {
    return mtp::guard([&] {
        mtp::nextn().set(nullptr, true, false);
        *out = *mtp::nextn().get(nullptr);
    });
}
"""
RUN = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
library, out = ctypes.CDLL(sys.argv[2]), ctypes.c_float()
library.mtp_last_error.restype = ctypes.c_char_p
print(library.call(ctypes.byref(out)), out.value, library.mtp_last_error().decode())
"""


def compile_library(folder: Path, name: str, code: str, *options: object) -> Path:
    compiler = shutil.which("c++")
    if not compiler or sys.platform == "win32":
        pytest.skip("needs a C++ compiler that links shared libraries the Unix way")
    source = folder / f"{name}.cpp"
    source.write_text(code)
    out = folder / f"lib{name}.so"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-o", out, source, *options]
    subprocess.run(list(map(str, command)), check=True)
    return out


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    headers = Path(sysconfig.get_path("purelib")) / "include"
    options = ("-I", SOURCES / "src", "-I", SOURCES / "include", "-I", headers)
    files = (SOURCES / "src" / "session" / "nextn.cpp", SOURCES / "src" / "error.cpp")
    return compile_library(tmp_path_factory.mktemp("caller"), "caller", CALLER, *options, *files)


@pytest.mark.parametrize(
    ("names", "functions", "want"),
    [
        ("c++", SET + GET, "0 2.5 "),
        ("c", SET + GET, "0 2.5 "),
        ("c", SET, "7 0.0 llama.cpp: expected the function llama_get_embeddings_nextn, found none"),
    ],
)
def test_both_names_are_found(
    names: str, functions: str, want: str, caller: Path, tmp_path: Path
) -> None:
    linkage = 'extern "C"' if names == "c" else ""
    stub = compile_library(tmp_path, "stub", f"{STUB}\n{functions}", f"-DLLAMA={linkage}")
    command = [sys.executable, "-c", RUN, str(stub), str(caller)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(want)
