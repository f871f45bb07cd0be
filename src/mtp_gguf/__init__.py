"""Convert, inspect and run GGUF models with their Multi-Token Prediction head.

The packages beneath it, such as `mtp_gguf.native`, are imported by their names.
"""

from typing import Any

__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415  (slow to import)

        return version("mtp-gguf")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
