"""Rollback by replay (patches/0015): a log of tokens instead of a state for each token."""

import os

from mtp_gguf.gguf_tools.nextn import REPLAYED

from .runtime import llama_cpp

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
