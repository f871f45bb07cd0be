"""Head-only files beside a model, by the name that publishers give them."""

from pathlib import Path

from .errors import FormatError, RequestError
from .model import Model, open_model
from .nextn import ARCHITECTURES

PREFIX = "mtp-"


def heads_beside(model: Model) -> list[Path]:
    """The head-only files in the folder of a local model that fit it."""
    folder = model.paths[0].parent
    return [path for path in sorted(folder.glob(f"{PREFIX}*.gguf")) if is_head_of(path, model)]


def is_head_of(path: Path, model: Model) -> bool:
    """Whether a file contains only a complete head, and one that fits the model."""
    if model.architecture not in ARCHITECTURES:
        return False
    try:
        with open_model(path) as head:
            if not (head.report.ready and head.head.is_alone):
                return False
            head.head.check_fit(model.head)
    except (FormatError, RequestError):
        return False
    return True
