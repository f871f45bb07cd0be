"""The library in a ggml whose structures and numbers are not those that it knows.

    pytest -m slow tests/kernels/test_altered_ggml.py

builds the pinned ggml once for each alteration, a quarter of a minute each.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native.runtime import native_library
from mtp_gguf.server.upstream_source import fetch_archive, unpack_llama_cpp
from support import llama_libraries
from support.llama_sources import compiled

pytestmark = pytest.mark.slow

GGML, IMPL = "ggml/include/ggml.h", "ggml/src/ggml-cpu/ggml-cpu-impl.h"
PLAN, CODE = "ggml/include/ggml-cpu.h", "ggml/src/ggml.c"
CPU = "ggml/src/ggml-cpu/ggml-cpu.c"
# Plain C without optimization, which compiles fast
OPTIONS = (
    *(f"-DCMAKE_{language}_FLAGS_RELEASE=-O0" for language in ("C", "CXX")),
    *(f"-DGGML_{name}=OFF" for name in ("NATIVE", "SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")),
    *(f"-DGGML_{name}=OFF" for name in ("OPENMP", "LLAMAFILE", "CPU_REPACK")),
)
# Where it is used: the reason, the operations computed, whether the results are right
COMPUTE = """
import ctypes, json, sys
import numpy as np
from pathlib import Path
from support.kernels.ggml_calls import F32, Ggml
ggml = Ggml(*map(Path, sys.argv[1:]))
rng = np.random.default_rng(1)
x, w = rng.standard_normal((3, 256), np.float32), rng.standard_normal((16, 256), np.float32)
products = ggml.product(F32, ggml.encode(F32, w), 16, x, 2)
right = [np.allclose(products, x @ w.T, atol=1e-3), (ggml.likeliest(x) == x.argmax(axis=1)).all()]
right.append((ggml.scaled(np.ones((2, 16400), np.float32), 0.5, 2, in_place=False) == 0.5).all())
names = ("MUL_MAT", "ARGMAX", "SCALE")
print(json.dumps([ggml.plugged.reason, [n for n in names if ggml.plugged.computed(n)],
                  [bool(each) for each in right], ggml.plugged.left_to_ggml()]))
"""
ALL = ["MUL_MAT", "ARGMAX", "SCALE"]


def answer_of(folder: Path, *edits: tuple[str, str, str]) -> Any:
    """What COMPUTE prints in the pinned ggml with texts replaced, each in a file."""
    tree = folder / "source"
    unpack_llama_cpp(fetch_archive(), tree)
    for file, before, after in edits:
        text = (tree / file).read_text("utf-8")
        assert before in text, (file, before)
        (tree / file).write_text(text.replace(before, after), "utf-8")
    for file in (CODE, CPU):  # structures are initialized by the names that are comments
        text = (tree / file).read_text("utf-8")
        (tree / file).write_text(re.sub(r"/\*(\.(?!hash_table)\w+) *=\*/", r"\1 =", text), "utf-8")
    libraries = compiled(tree, folder / "build", ["ggml-cpu"], OPTIONS)
    words = (libraries, native_library("mtp_kernels"))
    return llama_libraries.answer(libraries, COMPUTE, *words)


def added(file: str, before: str, field: str = "void * added[2];") -> tuple[str, str, str]:
    """A field in front of a line."""
    return file, before, f"{field}\n        {before}"


@pytest.mark.parametrize(
    ("struct", "edit", "field"),
    [
        ("ggml_tensor", added(GGML, "int64_t ne[GGML_MAX_DIMS]; // number"), "ne"),
        ("ggml_tensor", added(GGML, "size_t  nb[GGML_MAX_DIMS]; // stride"), "nb"),
        ("ggml_tensor", added(GGML, "// compute data\n        enum ggml_op op;"), "op"),
        ("ggml_tensor", added(GGML, "// op params - allocated", "int32_t added[4];"), "op_params"),
        ("ggml_tensor", added(GGML, "struct ggml_tensor * src[GGML_MAX_SRC];"), "src"),
        (
            "ggml_tensor",
            (GGML, "#define GGML_MAX_SRC            10", "#define GGML_MAX_SRC            12"),
            "view_src",
        ),
        ("ggml_tensor", added(GGML, "// source tensor and offset for views"), "view_src"),
        ("ggml_tensor", added(GGML, "size_t               view_offs;"), "view_offs"),
        ("ggml_tensor", added(GGML, "void * data;\n\n        char name"), "data"),
        ("ggml_tensor", added(GGML, "char name[GGML_MAX_NAME];\n\n        void * extra"), "name"),
        ("ggml_compute_params", added(IMPL, "// ith = thread index", "int added;"), "nth"),
        ("ggml_compute_params", added(IMPL, "size_t wsize;"), "wsize"),
        ("ggml_compute_params", added(IMPL, "void * wdata;"), "wdata"),
        (
            "ggml_compute_params",
            added(IMPL, "struct ggml_threadpool * threadpool;", "size_t added;"),
            "threadpool",
        ),
        ("ggml_compute_params", added(IMPL, "bool use_ref;"), "use_ref"),
        (
            "ggml_compute_params",
            added(PLAN, "int n_threads;\n        struct ggml_threadpool"),
            "threadpool",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_struct_with_another_field(
    struct: str, edit: tuple[str, str, str], field: str, tmp_path: Path
) -> None:
    reason, computed, right, _ = answer_of(tmp_path, edit)
    assert reason.endswith(f": its {struct} has another field {field} than expected")
    assert computed == []
    assert right == [True] * 3


def test_operations_with_other_numbers(tmp_path: Path) -> None:
    """One more in front of all that are computed here, and two that changed their places."""
    edits = [
        (GGML, "GGML_OP_NONE = 0,\n", "GGML_OP_NONE = 0,\n        GGML_OP_ADDED,\n"),
        (CODE, '    "NONE",\n', '    "NONE",\n    "ADDED",\n'),
        (CODE, '    "none",\n', '    "none",\n    "added",\n'),
        (CODE, "GGML_OP_COUNT == 101", "GGML_OP_COUNT > 101"),
        # two that change places
        (GGML, "        GGML_OP_SCALE,\n", ""),
        (GGML, "        GGML_OP_ARGMAX,\n", "        GGML_OP_SCALE,\n"),
        (GGML, "        GGML_OP_MUL_MAT,\n", "        GGML_OP_ARGMAX,\n        GGML_OP_MUL_MAT,\n"),
        (CODE, '    "SCALE",\n', ""),
        (CODE, '    "ARGMAX",\n', '    "SCALE",\n'),
        (CODE, '    "MUL_MAT",\n', '    "ARGMAX",\n    "MUL_MAT",\n'),
    ]
    reason, computed, right, left = answer_of(tmp_path, *edits)
    assert reason == ""
    assert computed == ALL
    assert right == [True] * 3
    assert left == []
