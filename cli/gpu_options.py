"""The options that split a model over several GPUs."""

import math
from enum import Enum
from typing import Annotated, Any, TypeAlias

import typer


class SplitMode(str, Enum):
    """How llama.cpp splits a model, in the order of its numbers."""

    NONE = "none"
    LAYER = "layer"
    ROW = "row"
    TENSOR = "tensor"


def tensor_split(text: str | None) -> list[float]:
    """Return the shares of the GPUs; typer.BadParameter if the text is something else."""
    try:
        shares = [] if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        shares = [-1]
    if not all(math.isfinite(share) and share >= 0 for share in shares) or (
        shares and not any(shares)
    ):
        raise typer.BadParameter(
            f"expected numbers such as 3,1, of which one is not 0, found {text!r}",
            param_hint="--tensor-split",
        )
    return shares


Split: TypeAlias = Annotated[
    SplitMode | None,
    typer.Option(
        "-sm",
        "--split-mode",
        help="Split the model over several GPUs this way; none uses --main-gpu (default: layer).",
    ),
]
TensorSplit: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "-ts",
        "--tensor-split",
        metavar="N,N,…",
        help="Give each GPU this share of the model (default: by their free memory).",
    ),
]
MainGpu: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "-mg",
        "--main-gpu",
        min=0,
        help="Use the GPU of this number, from 0 (for --split-mode none).",
    ),
]


def split_options(
    mode: SplitMode | None, shares: str | None, main_gpu: int | None
) -> dict[str, Any]:
    """Return the arguments of MTPLlama for those of the three that were given."""
    given = {
        "split_mode": None if mode is None else list(SplitMode).index(mode),
        "tensor_split": tensor_split(shares) or None,
        "main_gpu": main_gpu,
    }
    return {name: value for name, value in given.items() if value is not None}
