"""The native library loads with the llama.cpp it was built for and rejects any other."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_gguf.native import _bindings
from mtp_gguf.native.errors import LibraryMismatchError
from mtp_gguf.native.head import Head
from mtp_gguf.native.runtime import LIBMTP_VARIABLE, llama_cpp, runtime
from support.models import Models
from support.native_build import configure
from support.upstream.sdist import llama_cpp_source

HEADER = Path(__file__).parents[2] / "native" / "include" / "mtp.h"


@pytest.mark.stock
def test_it_resolves_to_the_llama_cpp_that_python_has_loaded() -> None:
    _bindings.library()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc here")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "/libllama.so" in line}
    assert len(loaded) == 1, "two copies of libllama in one process"
    assert Path(loaded.pop()).parent == runtime.folder.resolve()


def test_the_library_names_the_versions_it_was_built_for() -> None:
    text = _bindings.library().mtp_built_for().decode()
    assert re.fullmatch(r"ggml \d+\.\d+\.\d+ \([0-9a-f]{7,}\), llama.cpp [\d.]+\S*", text)
    version = llama_cpp.llama_version()
    assert text.endswith(version.decode() if isinstance(version, bytes) else version)


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer must be preloaded, and first")
def test_another_ggml_is_rejected_with_both_versions(tmp_path: Path) -> None:
    """A preloaded library that reports another version, with other numbers, simulates another."""
    source = tmp_path / "other.c"
    source.write_text(
        'const char * llama_version(void) { return "9.9.9"; }\n'
        'const char * ggml_type_name(int type) { return type ? "f32" : "f16"; }\n'
    )
    other = tmp_path / "other.so"
    compiled = subprocess.run(["cc", "-shared", "-o", other, source], check=False)
    if compiled.returncode:
        pytest.skip("no C compiler")
    code = "from mtp_gguf.native._bindings import library; library()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_PRELOAD": str(other)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert re.search(
        r"built for ggml .* llama.cpp 0\.\S+, but .* has loaded ggml .* llama.cpp 9\.9\.9, "
        r"whose ggml.h has another f32; use llama-cpp-python ",
        done.stderr,
    )


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBMTP_VARIABLE, "/nowhere/libmtp.so")
    with pytest.raises(LibraryMismatchError, match=r"/nowhere/libmtp\.so: cannot be loaded"):
        _bindings.library.__wrapped__()


def test_every_function_of_the_header_is_declared() -> None:
    """Whose prototypes are read at load."""
    lib, c = _bindings.library(), ctypes
    handle, texts = c.POINTER(c.c_void_p), c.POINTER(c.c_char_p)
    assert lib.mtp_head_load.argtypes == [c.c_char_p, c.POINTER(_bindings.HeadParams), handle]
    assert lib.mtp_tokenizer_fingerprint.argtypes == [texts, c.c_int32, c.POINTER(c.c_uint64)]
    assert (lib.mtp_last_error.restype, lib.mtp_head_free.restype) == (c.c_char_p, None)
    assert lib.mtp_call_for_struct.argtypes == [c.c_void_p, c.c_void_p]
    for name, arguments in re.findall(r"MTP_API [^;(]*?(\w+)\(([^;]*)\);", HEADER.read_text()):
        types = getattr(lib, name).argtypes
        count = 0 if arguments.strip() == "void" else arguments.count(",") + 1
        assert types is not None, name
        assert len(types) == count, name


def test_structs_have_the_size_of_their_c_types(tmp_path: Path) -> None:
    source = tmp_path / "sizes.c"
    names = re.findall(r"typedef struct (mtp_\w+) \{", HEADER.read_text())
    prints = "".join(f'printf("{n} %zu\\n", sizeof({n}));' for n in names)
    source.write_text(
        f'#include <stdio.h>\n#include "mtp.h"\nint main(void) {{ {prints} return 0; }}\n'
    )
    program = tmp_path / "sizes"
    if subprocess.run(["cc", f"-I{HEADER.parent}", "-o", program, source], check=False).returncode:
        pytest.skip("no C compiler")
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    for line in printed.splitlines():
        name, size = line.split()
        ours = getattr(_bindings, "".join(part.title() for part in name.split("_")[1:]))
        assert ctypes.sizeof(ours) == int(size), name


def test_null_pointers_are_rejected() -> None:
    lib = _bindings.library()
    assert lib.mtp_head_get_info(None, None) == 1
    assert b"expected a pointer, found NULL" in lib.mtp_last_error()
    assert lib.mtp_head_draft(None, 0, 0, None, None, 0, 0, None, None, None) == 1
    lib.mtp_head_free(None)


def test_gpus_are_named_as_llama_cpp_counts_them() -> None:
    lib = _bindings.library()
    names = [lib.mtp_gpu_name(i).decode() for i in range(-1, 3)]
    assert names[0] == "CPU"
    if not llama_cpp.llama_supports_gpu_offload():
        assert set(names) == {"CPU"}


def test_a_wheel_without_the_backend_that_is_asked_for_stops_the_install(tmp_path: Path) -> None:
    """pip takes llama-cpp-python's wheel from its cache, whatever CMAKE_ARGS says now."""
    if any(name != "CPU" for name in map(_device, range(2))):
        pytest.skip("a GPU's backend is here")
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        configure(HEADER.parents[2], tmp_path / "build", "-DGGML_CUDA=on")
    said = b" ".join(stopped.value.stderr.split())  # CMake wraps it
    assert b"pip cache remove llama_cpp_python" in said


def _device(index: int) -> str:
    return str(_bindings.library().mtp_gpu_name(index).decode())


BACKENDS = {
    "cuda": ("ggml/src/ggml-cuda/ggml-cuda.cu", "static bool ggml_backend_cuda_device_supports_op"),
    "metal": ("ggml/src/ggml-metal/ggml-metal-device.m", "bool ggml_metal_device_supports_op"),
}


@pytest.mark.upstream
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", ["dense-tied", "moe-fused"])
def test_every_op_of_the_graph_is_one_that_the_backend_knows(
    models: Models, spec: str, backend: str
) -> None:
    file, function = BACKENDS[backend]
    text = (llama_cpp_source() / file).read_text()
    body = text[text.index(function) :]
    known = set(re.findall(r"case GGML_(?:OP|UNARY_OP|GLU_OP)_(\w+):", body[: body.index("\n}\n")]))
    with Head(models.gguf(spec)) as head:
        used = {part for op in head.ops() for part in op.split(":")}
    # On a CPU a function of ours finds the largest logit, elsewhere these do.
    used = used - {"CUSTOM"} | {"ARGMAX", "ARANGE", "SUB", "SCALE"}
    assert len(used) > 15
    assert used <= known


@pytest.mark.upstream
def test_the_cpu_computes_every_op_of_the_graph(models: Models) -> None:
    """ggml-cpu's supports_op lists only exceptions; its dispatch lists the supported ops."""
    text = (llama_cpp_source() / "ggml/src/ggml-cpu/ggml-cpu.c").read_text()
    body = text[text.index("static void ggml_compute_forward(struct") :]
    known = set(re.findall(r"case GGML_OP_(\w+):", body[: body.index("\n}\n")]))
    for spec in ("dense-tied", "moe-fused"):
        with Head(models.gguf(spec)) as head:
            assert {op.split(":")[0] for op in head.ops()} <= known
