"""Rollback by replay (patches/0015): a log of tokens instead of a state for each token."""

import os
from typing import Literal

from mtp_gguf.gguf_tools.nextn import REPLAYED
from mtp_gguf.gguf_tools.profile import AUTO

from .runtime import llama_cpp
from .session import Rollback

_OPERATION = "ggml_gated_delta_net_replay"
_SWITCH = "LLAMA_RS_REPLAY"  # "0" turns replay off


def replays(architecture: str | None, n_gpu_layers: int) -> bool:
    """Whether the loaded llama.cpp rolls back models of an architecture by replay.

    n_gpu_layers: replay requires 0, because no GPU backend has the operation.
    """
    if architecture not in REPLAYED:
        return False
    library = llama_cpp.llama_cpp._lib
    return n_gpu_layers == 0 and os.environ.get(_SWITCH) != "0" and hasattr(library, _OPERATION)


def looks_up_by_default(
    architecture: str | None,
    depth: int | Literal["auto"],
    rollback: Rollback,
    n_gpu_layers: int,
) -> bool:
    """Whether a session also drafts from the text unless told otherwise (docs/decisions.md)."""
    replay = rollback is Rollback.SNAPSHOT and replays(architecture, n_gpu_layers)
    return depth == AUTO and replay
