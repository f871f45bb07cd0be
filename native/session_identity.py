"""What a saved session has to have in common with the model that continues it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def identity_of(llm: MTPLlama) -> dict[str, Any]:
    """Return what a session of this model is saved with, in values that JSON holds.

    The model's files are identified by their size and samples of their bytes, not by their names.
    """
    params = llm.context_params
    head = None
    if llm.head is not None:
        head = _file(Path(str(llm._mtp_options["mtp_head"] or llm.model_path)))
    return {
        "architecture": llm.metadata.get("general.architecture", ""),
        "name": llm.metadata.get("general.name", ""),
        "model": _file(Path(llm.model_path)),
        "head": head,
        "adapter": _file(Path(llm.lora_path)) if llm.lora_path else None,
        "adapter_scale": float(llm.lora_scale) if llm.lora_path else None,
        "cache_type_k": _type_name(params.type_k),
        "cache_type_v": _type_name(params.type_v),
        # None if there are none, as in files of before they were recorded.
        "kv_overrides": dict(sorted((llm.kv_overrides or {}).items())) or None,
        # llama.cpp keeps floats of 32 bits; their shortest decimal form is exact.
        **{name: convert(getattr(params, name)) for name, convert in _CONTEXT.items()},
    }


def check_identity(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """RequestError, with the field that differs, if the session in a file is of another model.

    A session saved without a head, or continued without one, fits: the head starts anew.
    """
    for name, expected in here.items():
        found = saved.get(name)
        if name == "head" and (found is None or expected is None):
            continue
        if type(found) is not type(expected) or found != expected:
            raise RequestError(
                f"{path}: {name}: expected {_shown(expected)} as in the loaded model, found "
                f"{_shown(found)}; load the model and settings of the session, or name another file"
            )


def _file(path: Path) -> dict[str, Any]:
    found = identify(path)
    return {"bytes": found.size, "fingerprint": found.fingerprint}


def _type_name(number: int) -> str:
    return BY_ID[number].name if number in BY_ID else str(number)


def _shown(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"bytes", "fingerprint"}:
        return f"{str(value['bytes'])[:20]} bytes ({str(value['fingerprint'])[:12]})"
    return "none" if value is None else repr(value)[:100]
