"""ctypes declarations for mtp.h, read from the header, which the package contains.

`library()` loads libmtp once, after `runtime`, so that it resolves to the llama.cpp that llama_cpp
has loaded.
"""

import ctypes
import re
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from importlib import resources
from typing import Any

from .errors import (
    ContextFullError,
    DeviceFailedError,
    HeadMissingError,
    LibraryMismatchError,
    ModelRefusedError,
    NativeError,
)
from .libraries.layouts import UNDERSTOOD

_HEADER = (resources.files(__package__) / "include" / "mtp.h").read_text(encoding="utf-8")
_CODE = re.sub(r"/\*.*?\*/", "", _HEADER, flags=re.DOTALL)
_NUMBERS = {
    name: int(number) for name, number in re.findall(r"\b(MTP_\w+)[ =]+\(?(-?\d+)\b", _CODE)
}
_ENUMS = re.findall(r"typedef enum (\w+)", _CODE)

API_VERSION = _NUMBERS["MTP_API_VERSION"]
MAX_DEPTH = _NUMBERS["MTP_MAX_DEPTH"]
DEPTH_AUTO = _NUMBERS["MTP_DEPTH_AUTO"]

_BACKEND = _NUMBERS["MTP_ERROR_BACKEND"]
_DEVICE = _NUMBERS["MTP_ERROR_DEVICE"]

# The mtp_status values that have an exception class of their own.
_ERRORS: dict[int, type[NativeError]] = {
    _NUMBERS["MTP_ERROR_FILE"]: ModelRefusedError,
    _NUMBERS["MTP_ERROR_FORMAT"]: ModelRefusedError,
    _NUMBERS["MTP_ERROR_NO_HEAD"]: HeadMissingError,
    _NUMBERS["MTP_ERROR_UNSUPPORTED"]: ModelRefusedError,
    _NUMBERS["MTP_ERROR_FULL"]: ContextFullError,
    _NUMBERS["MTP_ERROR_VERSION"]: LibraryMismatchError,
    _DEVICE: DeviceFailedError,
}

_SCALARS = {
    "bool": c_bool,
    "double": c_double,
    "float": c_float,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "size_t": c_size_t,
    "uint32_t": c_uint32,
    "uint64_t": c_uint64,
    **dict.fromkeys(_ENUMS, c_int32),
}


def _ctype(declared: str) -> Any:
    """Return the ctypes of a parameter, result or field; structs of other libraries are opaque."""
    name = next(w for w in re.findall(r"\w+", declared) if w not in ("const", "struct"))
    stars = declared.count("*")
    found: Any
    if name == "char":
        found, stars = c_char_p, stars - 1
    elif name in _SCALARS:
        found = _SCALARS[name]
    elif struct := globals().get(_class_name(name)):
        found = struct
    else:
        found, stars = (c_void_p, stars - 1) if stars else (None, 0)
    for _ in range(stars):
        found = POINTER(found)
    return found


def _class_name(struct: str) -> str:
    return "".join(part.title() for part in struct.split("_")[1:])


def _struct(name: str) -> Any:
    """Return the class of a struct of the header."""
    (body,) = re.findall(rf"typedef struct {name} \{{(.*?)\}} {name};", _CODE, re.DOTALL)
    fields = [
        (field, _ctype(kind) * _NUMBERS[count] if count else _ctype(kind))
        for kind, field, count in re.findall(r"([^;]*?)(\w+)(?:\[(\w+)\])?;", body)
    ]
    return type(_class_name(name), (ctypes.Structure,), {"_fields_": fields})


HeadParams = _struct("mtp_head_params")
ImatrixEntry = _struct("mtp_imatrix_entry")
SessionParams = _struct("mtp_session_params")
SessionStats = _struct("mtp_session_stats")
Sampling = _struct("mtp_sampling")
CycleOutcome = _struct("mtp_cycle_outcome")
HeadInfo = _struct("mtp_head_info")
DraftTask = _struct("mtp_draft_task")
KeptRows = _struct("mtp_kept_rows")
CheckpointInfo = _struct("mtp_checkpoint_info")
SessionFileInfo = _struct("mtp_session_file_info")
SessionSection = _struct("mtp_session_section")
SessionField = _struct("mtp_session_field")


@cache
def library() -> ctypes.CDLL:
    """Load libmtp, once; LibraryMismatchError when it cannot be used with this llama_cpp."""
    from . import runtime  # noqa: PLC0415  (loads llama.cpp's libraries, which libmtp resolves to)

    lib = runtime.load_libmtp()
    if (found := lib.mtp_api_version()) != API_VERSION:
        raise LibraryMismatchError(
            f"{lib._name}: expected API version {API_VERSION}, found {found}"
        )
    _declare(lib)
    if lib.mtp_check_runtime():
        raise LibraryMismatchError(f"{lib.mtp_last_error().decode()}; {UNDERSTOOD}")
    return lib


def check(status: int) -> None:
    """Raise the exception for a status other than MTP_OK, with the library's error message.

    If llama.cpp itself or a device failed, its last log lines are appended.
    """
    if status:
        text = library().mtp_last_error().decode(errors="replace")
        if status in (_BACKEND, _DEVICE):
            text += indented_log()
        raise _ERRORS.get(status, NativeError)(text)


def indented_log() -> str:
    """Return llama.cpp's last log lines, indented, to append to an error message."""
    text: str = library().mtp_log_last().decode(errors="replace")
    return "".join(f"\n  {line}" for line in text.split("\n")[:-1])


def _declare(lib: ctypes.CDLL) -> None:
    for result, name, parameters in re.findall(
        r"MTP_API ([^;(]+?)(\w+)\(([^;]*)\);", " ".join(_CODE.split())
    ):
        function = getattr(lib, name)
        function.restype = _ctype(result)
        function.argtypes = [_ctype(p) for p in parameters.split(", ") if p != "void"]
