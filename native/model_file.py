"""What a file must be before llama.cpp is given it as a model."""

from pathlib import Path

from mtp_gguf.gguf_tools.errors import MtpGgufError
from mtp_gguf.gguf_tools.model import open_model

from .errors import ModelRefusedError


def check_trunk(model: Path) -> None:
    """ModelRefusedError for a head alone, which llama.cpp loads as a model and crashes on."""
    try:
        with open_model(model) as opened:
            alone = opened.head.is_alone and opened.head.report.ready
    except (MtpGgufError, OSError):
        return  # llama.cpp says what it cannot read
    if alone:
        raise ModelRefusedError(
            f"{model}: expected a model, found a head alone; load the model that it belongs to, "
            "with this file as its head"
        )
