"""Rollback by replay (patches/0015): a log of tokens where llama.cpp keeps a state for each."""

import os

from .runtime import llama_cpp

_OPERATION = "ggml_gated_delta_net_replay"
_SWITCH = "LLAMA_RS_REPLAY"  # "0" keeps states


def replays(n_gpu_layers: int) -> bool:
    """Whether contexts of the loaded llama.cpp roll back by replay, models of our family given.

    n_gpu_layers: False where it is not 0, as no GPU backend has the operation.
    """
    library = llama_cpp.llama_cpp._lib
    return n_gpu_layers == 0 and os.environ.get(_SWITCH) != "0" and hasattr(library, _OPERATION)
