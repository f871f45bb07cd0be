"""llama_cpp's structs are fitted to libraries whose structs have other fields.

The libraries are compiled here: with the fields of llama_cpp's `llama_context_params`, in C, and
with those of other versions. tests/native/test_other_versions.py has real ones.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from mtp_gguf.native.errors import LibraryMismatchError
from mtp_gguf.native.libraries import layouts
from mtp_gguf.native.libraries.layouts import STRUCTS, Sample, fit_structs, fitting
from mtp_gguf.native.runtime import _sample, llama_cpp

DECLARED = llama_cpp.llama_cpp.llama_context_params
_C_TYPES = {
    ctypes.c_uint32: "uint32_t",
    ctypes.c_int32: "int32_t",
    ctypes.c_float: "float",
    ctypes.c_bool: "bool",
    ctypes.c_size_t: "size_t",
}
Line = tuple[str, str, str]  # C type, name and value of a field


def lines(struct: type[ctypes.Structure]) -> list[Line]:
    """The fields of a struct, with the defaults of the loaded llama.cpp; pointers are NULL."""
    values = getattr(llama_cpp, STRUCTS[struct.__name__])()
    out = []
    for name, kind, *_ in struct._fields_:
        plain = kind in _C_TYPES
        value = str(getattr(values, name)).lower() if plain else "NULL"
        out.append((_C_TYPES.get(kind, "void *"), name, value))
    return out


def names(fields: Sequence[Line]) -> list[str]:
    return [name for _, name, _ in fields]


def insert(fields: Sequence[Line], after: str, *added: Line) -> list[Line]:
    at = names(fields).index(after) + 1
    return [*fields[:at], *added, *fields[at:]]


def compiled(folder: Path, fields: Sequence[Line]) -> ctypes.CDLL:
    """A library with the struct's defaults, and where each of its fields is."""
    compiler = shutil.which("cc")
    if not compiler or sys.platform == "win32":
        pytest.skip("needs a C compiler that links shared libraries the Unix way")
    members = "".join(f"    {kind} {name};\n" for kind, name, _ in fields)
    values = ", ".join(f".{name} = {value}" for _, name, value in fields)
    code = (
        "#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n"
        f"struct params {{\n{members}}};\n"
        f"struct params defaults(void) {{ struct params p = {{ {values} }}; return p; }}\n"
        "int32_t threads(void * model, struct params p) { return model ? 0 : p.n_threads_batch; }\n"
        "bool unified(struct params * p) { return p->kv_unified; }\n"
    )
    code += "".join(f"size_t at_{n} = offsetof(struct params, {n});\n" for n in names(fields))
    source, out = folder / "params.c", folder / "libparams.so"
    source.write_text(code)
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", out, source], check=True)
    return ctypes.CDLL(str(out))


CACHE = ("size_t", "moe_cache_size", "0")
SHARE = ("float", "moe_cache_cpu_share", "0.5f")
SAME = lines(DECLARED)
B11549 = insert(SAME, "type_v", CACHE)
V1 = [line for line in insert(SAME, "type_v", CACHE, SHARE) if line[1] != "defrag_thold"]


@pytest.mark.parametrize("fields", [SAME, B11549, V1], ids=["same", "b11549", "1.0"])
def test_known_changes_are_found(fields: list[Line], tmp_path: Path) -> None:
    library = compiled(tmp_path, fields)
    found = fitting(DECLARED, _sample(library.defaults))
    assert found is not None
    assert (found is DECLARED) == (fields == SAME)
    assert [name for name, *_ in found._fields_] == names(fields)
    for name in names(fields):
        assert getattr(found, name).offset == ctypes.c_size_t.in_dll(library, f"at_{name}").value


@pytest.mark.parametrize(
    "fields",
    [
        [*SAME, ("void *", "new", "NULL")],
        [*SAME, ("bool", "new", "true")],
        SAME[:-1],
        insert(SAME, "n_batch", ("uint32_t", "new", "0")),
        insert(SAME, "cb_eval", ("void *", "new", "NULL")),
        insert(SAME, "swa_full", ("bool", "new", "true")),
        insert(SAME, "swa_full", ("int32_t", "new", "7")),  # where there was padding
        [line if line[1] != "type_k" else ("int32_t", "type_k", "8") for line in SAME],
        [line for line in SAME if line[1] != "op_offload"],
    ],
    ids=lambda fields: "-".join(sorted({*fields} ^ {*SAME})[0]) if fields != SAME else "same",
)
def test_other_fields_are_not_understood(fields: list[Line], tmp_path: Path) -> None:
    assert fitting(DECLARED, _sample(compiled(tmp_path, fields).defaults)) is None


def bindings(library: ctypes.CDLL) -> ModuleType:
    """A module that declares the functions of `library` as llama_cpp does."""
    module = ModuleType("bindings.bindings")
    functions = {"llama_context_default_params": library.defaults, "init": library.threads}
    library.defaults.restype = DECLARED
    library.threads.argtypes = [ctypes.c_void_p, DECLARED]
    library.unified.argtypes = [ctypes.POINTER(DECLARED)]
    library.unified.restype = ctypes.c_bool
    vars(module).update(functions, unified=library.unified, llama_context_params=DECLARED)
    return module


def test_functions_take_and_return_the_struct_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compiled(tmp_path, V1)
    module = bindings(library)
    monkeypatch.setitem(sys.modules, "bindings", ModuleType("bindings"))
    monkeypatch.setattr(
        layouts, "STRUCTS", {"llama_context_params": "llama_context_default_params"}
    )
    fit_structs(module, _sample)
    params = module.llama_context_default_params()
    assert isinstance(params, module.llama_context_params)
    assert params.n_threads == 4
    assert params.type_v == 1
    params.n_threads_batch, params.kv_unified = 7, True
    params.defrag_thold = 0.5  # as callers that know an older version may do
    assert module.init(None, params) == 7
    assert module.unified(params)
    nothing = Sample(bytes(1024), bytes(1024))
    with pytest.raises(
        LibraryMismatchError, match=r"llama_context_params: .*; use llama-cpp-python"
    ):
        fit_structs(module, lambda _: nothing)


def test_the_loaded_libraries_are_understood() -> None:
    for name, function in STRUCTS.items():
        declared = getattr(llama_cpp.llama_cpp, name)
        found = fitting(declared, _sample(getattr(llama_cpp.llama_cpp, function)))
        assert found is declared, name
