"""Reads GGUF files with ggml itself: `gguf_init_from_file` of the libggml in llama_cpp.

`describe` runs it in a subprocess with a forked child for each file, so that an abort of ggml is
reported like any other result.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# gguf.h: enum gguf_type, the names of its getters, and whether a value is a float.
GETTERS: dict[int, tuple[str, Any]] = {
    0: ("u8", ctypes.c_uint8),
    1: ("i8", ctypes.c_int8),
    2: ("u16", ctypes.c_uint16),
    3: ("i16", ctypes.c_int16),
    4: ("u32", ctypes.c_uint32),
    5: ("i32", ctypes.c_int32),
    6: ("f32", ctypes.c_float),
    7: ("bool", ctypes.c_bool),
    8: ("str", ctypes.c_char_p),
    10: ("u64", ctypes.c_uint64),
    11: ("i64", ctypes.c_int64),
    12: ("f64", ctypes.c_double),
}
STRING, ARRAY = 8, 9

Answer = dict[str, Any] | None | str


def describe(paths: Iterable[Path]) -> list[Answer]:
    """For each file what ggml reads in it; None where ggml refuses it, "crashed" where it dies.

    A description is {"version", "alignment", "data_offset", "keys": [[key, type, element type or
    None, value]], "tensors": [[name, four dimensions, type, relative offset, bytes]]}, with strings
    as hexadecimal digits of their bytes.
    """
    listed = "\0".join(str(path) for path in paths)
    result = subprocess.run(
        [sys.executable, __file__], input=listed, capture_output=True, text=True, check=True
    )
    answers: list[Answer] = json.loads(result.stdout)
    return answers


def ggml_base() -> ctypes.CDLL:
    """The libggml-base that llama_cpp would load, without importing llama_cpp."""
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "lib"
    (library,) = [p for p in folder.iterdir() if p.stem == "libggml-base" and p.suffix != ".a"]
    return ctypes.CDLL(str(library))


class InitParams(ctypes.Structure):
    """struct gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _bind() -> Callable[..., Any]:
    library = ggml_base()

    def call(name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(library, name)
        function.restype = result
        return function(*arguments)

    return call


def _describe(call: Callable[..., Any], path: str) -> Answer:
    params = InitParams(no_alloc=True)
    pointer = call("gguf_init_from_file", ctypes.c_void_p, os.fsencode(path), params)
    if pointer is None:
        return None
    file = ctypes.c_void_p(pointer)
    size, int64 = ctypes.c_size_t, ctypes.c_int64

    def value(index: ctypes.c_int64, kind: int) -> Any:
        name, result = GETTERS[kind]
        found = call(f"gguf_get_val_{name}", result, file, index)
        return found.hex() if kind == STRING else found

    def array(index: ctypes.c_int64, kind: int) -> list[Any]:
        count = call("gguf_get_arr_n", size, file, index)
        if kind == STRING:
            get = "gguf_get_arr_str"
            return [call(get, ctypes.c_char_p, file, index, size(i)).hex() for i in range(count)]
        data = call("gguf_get_arr_data", ctypes.c_void_p, file, index)
        return list((GETTERS[kind][1] * count).from_address(data)) if count else []

    keys = []
    for i in range(call("gguf_get_n_kv", int64, file)):
        index = int64(i)
        key = call("gguf_get_key", ctypes.c_char_p, file, index).hex()
        kind = call("gguf_get_kv_type", ctypes.c_int, file, index)
        if kind == ARRAY:
            element = call("gguf_get_arr_type", ctypes.c_int, file, index)
            keys.append([key, kind, element, array(index, element)])
        else:
            keys.append([key, kind, None, value(index, kind)])
    tensors = []
    for i in range(call("gguf_get_n_tensors", int64, file)):
        index = int64(i)
        shape = call("gguf_get_tensor_ne", ctypes.POINTER(ctypes.c_int64), file, index)
        tensors.append(
            [
                call("gguf_get_tensor_name", ctypes.c_char_p, file, index).hex(),
                shape[:4],
                call("gguf_get_tensor_type", ctypes.c_int, file, index),
                call("gguf_get_tensor_offset", size, file, index),
                call("gguf_get_tensor_size", size, file, index),
            ]
        )
    return {
        "version": call("gguf_get_version", ctypes.c_uint32, file),
        "alignment": call("gguf_get_alignment", size, file),
        "data_offset": call("gguf_get_data_offset", size, file),
        "keys": keys,
        "tensors": tensors,
    }


def _describe_in_child(call: Callable[..., Any], path: str) -> Answer:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            json.dump(_describe(call, path), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    answer: Answer = json.loads(text) if status == 0 else "crashed"
    return answer


if __name__ == "__main__":
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # ggml says there why it refuses a file
    bound = _bind()
    listed = sys.stdin.read()
    print(json.dumps([_describe_in_child(bound, p) for p in listed.split("\0") if p]))
