"""Which contexts roll back by replay (patches/0015: a log of tokens), and which by snapshots."""

import os
from typing import Any, Literal

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


def keeps_snapshots(context: Any) -> bool:
    """Whether a context keeps the snapshots that it was made with, or needs none.

    llama.cpp keeps none of the recurrent states of most architectures.
    """
    model = llama_cpp.llama_get_model(context)
    recurrent = llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
    return not recurrent or llama_cpp.llama_n_rs_seq(context) > 0


def looks_up_by_default(
    architecture: str | None,
    depth: int | Literal["auto"],
    rollback: Rollback,
    n_gpu_layers: int,
) -> bool:
    """Whether a session also drafts from the text unless told otherwise (docs/decisions.md)."""
    replay = rollback is Rollback.SNAPSHOT and replays(architecture, n_gpu_layers)
    return depth == AUTO and replay
