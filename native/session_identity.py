"""What a saved session has to have in common with the model that continues it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.profile import identify
from mtp_gguf.gguf_tools.tensor_types import BY_ID

if TYPE_CHECKING:
    from .llama import MTPLlama

# Fields of llama.cpp's context parameters that the stored state depends on, with their types.
_CONTEXT = {
    "flash_attn_type": int,
    "rope_scaling_type": int,
    "rope_freq_base": float,
    "rope_freq_scale": float,
    "yarn_ext_factor": float,
    "yarn_attn_factor": float,
    "yarn_beta_fast": float,
    "yarn_beta_slow": float,
    "yarn_orig_ctx": int,
    "swa_full": bool,
}


def identity_of(llm: MTPLlama) -> dict[str, str]:
    """Return what a session of this model is saved with, in printable ASCII.

    The model's files are identified by their size and samples of their bytes, not by their names.
    """
    params = llm.context_params
    found: dict[str, object] = {
        "program": "MTPLlama",
        "architecture": llm.metadata.get("general.architecture", ""),
        "name": llm.metadata.get("general.name", ""),
        "model": _file(llm.model_path),
    }
    if llm.head is not None:
        found["head"] = _file(llm._mtp_options["mtp_head"] or llm.model_path)
    if llm.lora_path:
        found |= {"adapter": _file(llm.lora_path), "adapter_scale": float(llm.lora_scale)}
    found |= {"cache_type_k": _type_name(params.type_k), "cache_type_v": _type_name(params.type_v)}
    # llama.cpp keeps floats of 32 bits; their shortest decimal form is exact.
    found |= {name: convert(getattr(params, name)) for name, convert in _CONTEXT.items()}
    for key, value in sorted((llm.kv_overrides or {}).items()):
        found[f"override {key}"] = f"{type(value).__name__} {value}"
    return {_printable(name, 255): _printable(value, 4095) for name, value in found.items()}


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


def _type_name(number: int) -> str:
    return BY_ID[number].name if number in BY_ID else str(number)


def _printable(value: object, most: int) -> str:
    """Return a text as session files can hold it; a long one ends with a digest of the whole."""
    text = str(value).encode("unicode_escape").decode()
    if len(text) > most:
        digest = hashlib.sha256(text.encode()).hexdigest()
        text = f"{text[: most - len(digest)]}{digest}"
    return text


def _shown(value: str | None) -> str:
    return "none" if value is None else repr(value[:100])
