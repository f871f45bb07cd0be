"""ctypes declarations from prototypes of C."""

import ctypes
import re
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_void_p
from typing import Any

_SCALARS = {
    "bool": ctypes.c_bool,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "long": ctypes.c_long,
    "size_t": ctypes.c_size_t,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
}


def ctype(declared: str, known: Mapping[str, Any]) -> Any:
    """Return the ctypes of a parameter, result or field.

    known: the ctypes of enums and structs by their names; other structs are opaque.
    """
    name = next(w for w in re.findall(r"\w+", declared) if w not in ("const", "struct"))
    stars = declared.count("*")
    found: Any
    if name == "char":
        found, stars = c_char_p, stars - 1
    elif name in _SCALARS:
        found = _SCALARS[name]
    elif name in known:
        found = known[name]
    else:
        found, stars = (c_void_p, stars - 1) if stars else (None, 0)
    for _ in range(stars):
        found = POINTER(found)
    return found


def declare(
    library: ctypes.CDLL, prototypes: str, known: Mapping[str, Any] | None = None
) -> ctypes.CDLL:
    """Declare the functions of prototypes, which have no comments; return the library.

    known: as for `ctype`. A pointer that is passed as a number is `void *` here, whatever it points
    to in the header.
    """
    for result, name, parameters in re.findall(
        r"([^;(]+?)(\w+)\(([^;]*?)\);", " ".join(prototypes.split())
    ):
        function = getattr(library, name)
        function.restype = ctype(result, known or {})
        function.argtypes = [ctype(p, known or {}) for p in parameters.split(", ") if p != "void"]
    return library
