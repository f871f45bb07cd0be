"""What a saved session has to have in common with the model that continues it."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.tensor_types import BY_ID
from mtp_gguf.gguf_tools.profile import identify

from .._bindings import library
from ..libraries.exact import kernels
from ..libraries.loaded import device_name, loaded_versions
from ..runtime import llama_cpp, plugged_kernels
from .loaded import LoadedModel

# In these words of `session_fields`, and in no others, a field is compared.
KEPT, PLACED = "kept", "placed"


def session_fields() -> dict[tuple[str, str], str]:
    """Return why a field is compared or not, by the parameters ("model", "context") and its name.

    KEPT; PLACED, if it matters with a GPU only; or the reason why it never does. The list is that
    of native/src/session_fields.h, which llama-server has, too.
    """
    lines = library().mtp_session_fields().decode().splitlines()
    found = (line.split(" ", 2) for line in lines)
    return {(parameters, name): why for parameters, name, why in found}


def identity_of(llm: LoadedModel) -> dict[str, str]:
    """Return what a session of this model is saved with, in printable ASCII.

    The model's files are identified by their size and samples of their bytes, not by their names.
    """
    metadata = llm.metadata
    architecture = metadata.get("general.architecture", "")
    found: dict[str, object] = {
        "program": "MTPLlama",
        "state": getattr(llama_cpp, "LLAMA_STATE_SEQ_VERSION", "unknown"),
        "llama.cpp": loaded_versions(),
        "kernels": f"{kernels()} {plugged_kernels.instructions}",
        "system": llama_cpp.llama_print_system_info().decode(),
        "architecture": architecture,
        "name": metadata.get("general.name", ""),
        "model": _file(llm.model_path),
    }
    if llm.head is not None:
        found["head"] = _file(llm._mtp_options["mtp_head"] or llm.model_path)
    if llm.lora_path:
        found |= {"adapter": _file(llm.lora_path), "adapter_scale": float(llm.lora_scale)}
    if original := metadata.get(f"{architecture}.rope.scaling.original_context_length"):
        found["long_rope"] = llm.n_ctx() > int(original)  # llama.cpp has a rotation for each
    for parameters, values in (("model", llm.model_params), ("context", llm.context_params)):
        found |= _compared(llm, parameters, values)
    for key, value in sorted((llm.kv_overrides or {}).items()):
        found[f"override {key}"] = f"{type(value).__name__} {value}"
    return {_printable(name, 255): _printable(value, 4095) for name, value in found.items()}


def _compared(llm: LoadedModel, parameters: str, values: ctypes.Structure) -> dict[str, object]:
    """Return the compared fields of a struct of llama.cpp's; one that nobody listed is compared."""
    listed = session_fields()
    compared = {KEPT, PLACED} if device_name(-1) != "CPU" else {KEPT}
    pointers: dict[str, object] = {
        "tensor_split": llm.tensor_split,
        "tensor_buft_overrides": [llm._mtp_options[o] for o in ("n_cpu_moe", "tensor_overrides")],
    }
    found: dict[str, object] = {}
    for name, *_ in values._fields_:
        if listed.get((parameters, name), KEPT) in compared:
            # llama.cpp keeps floats of 32 bits; their shortest decimal form is exact.
            value: Any = pointers[name] if name in pointers else getattr(values, name)
            if name in {"type_k", "type_v"}:
                value = BY_ID[value].name if value in BY_ID else str(value)
            found[name] = value
    return found


def check_identity(path: Path, saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    """RequestError, with the field that differs, if the session in a file is of another model.

    A session saved without a head, or continued without one, fits: the head starts anew.
    """
    for name in {**here, **saved}:
        expected, found = here.get(name), saved.get(name)
        if name == "head" and (found is None or expected is None):
            continue
        if found != expected:
            raise RequestError(
                f"{path}: {name}: expected {_shown(expected)} as in the loaded model, found "
                f"{_shown(found)}; load the model and settings of the session, or name another file"
            )


def _file(path: object) -> str:
    found = identify(Path(str(path)))
    return f"{found.size} bytes {found.fingerprint}"


def _printable(value: object, most: int) -> str:
    """Return a text as session files can hold it; a long one ends with a digest of the whole."""
    text = str(value).encode("unicode_escape").decode()
    if len(text) > most:
        digest = hashlib.sha256(text.encode()).hexdigest()
        text = f"{text[: most - len(digest)]}{digest}"
    return text


def _shown(value: str | None) -> str:
    return "none" if value is None else repr(value[:100])
