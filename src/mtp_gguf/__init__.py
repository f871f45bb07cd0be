"""Convert, inspect and run GGUF models with their Multi-Token Prediction head.

`convert`, `graft` and `train_head` do what the commands do; docs/python.md describes them.
The packages beneath this one, such as `mtp_gguf.native`, are imported by their names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .convert.api import convert as convert
    from .convert.heads.graft import graft as graft
    from .train.api import train_head as train_head

__version__: str

_FUNCTIONS = {"graft": ".convert.heads.graft", "train_head": ".train.api"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415  (slow to import)

        return version("mtp-gguf")
    if name == "convert":
        return import_module(".convert", __name__)  # a package that can be called
    if name in _FUNCTIONS:
        return getattr(import_module(_FUNCTIONS[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
