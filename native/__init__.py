"""The Python classes over the native library, imported lazily because llama.cpp is slow to load."""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Checkpoint": "checkpoint",
    "CheckpointKind": "checkpoint",
    "Draft": "head",
    "Head": "head",
    "MTPLlama": "llama.mtp_llama",
    "MtpStats": "session",
    "PromptReuse": "sessions.prompt_reuse",
    "Rollback": "session",
    "Session": "session",
    "ContextFullError": "errors",
    "DeviceFailedError": "errors",
    "HeadMissingError": "errors",
    "LibraryMismatchError": "errors",
    "MessagesError": "errors",
    "ModelRefusedError": "errors",
    "NativeError": "errors",
    "schema_grammar": "schemas.json_schema",
}

__all__ = sorted(_PUBLIC)  # noqa: PLE0605  (a list, though computed)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
