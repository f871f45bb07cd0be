"""What a file must be before llama.cpp is given it as a model."""

from pathlib import Path

from mtp_gguf.gguf_tools.errors import MtpGgufError
from mtp_gguf.gguf_tools.head import TRUNK_TENSOR
from mtp_gguf.gguf_tools.listing import list_tensors

from .errors import ModelRefusedError


def check_trunk(model: Path) -> None:
    """ModelRefusedError for a head alone, which llama.cpp loads as a model and crashes on."""
    try:
        listing = list_tensors(model)
    except (MtpGgufError, OSError):
        return  # llama.cpp says what it cannot read
    head = listing.head is not None and listing.head.ready
    if head and all(tensor.name != TRUNK_TENSOR for tensor in listing.tensors):
        raise ModelRefusedError(
            f"{model}: expected a model, found a head alone; load the model that it belongs to, "
            "with this file as its head"
        )
