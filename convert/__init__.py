"""Hugging Face safetensors to one GGUF: checkpoint, family, precision, plan, pipeline.

The package is also the function that converts: `mtp_gguf.convert(MODEL, OUTPUT)` calls
`mtp_gguf.convert.api.convert`.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from .api import convert  # noqa: PLC0415  (NumPy and gguf are slow)

        return convert(*args, **options)


sys.modules[__name__].__class__ = _Callable
