"""Which contexts roll back by replay (patches/0106: a log of tokens), and which by snapshots."""

import ctypes
import os
from pathlib import Path
from typing import Any, Literal

from mtp_gguf.gguf_tools.heads.nextn import REPLAYED
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.profile import AUTO

from ..runtime import llama_cpp
from ..session import Rollback
from .loaded import device_name

_OPERATION = "ggml_gated_delta_net_replay"
_SWITCH = "LLAMA_RS_REPLAY"  # "0" turns replay off, "cpu" on other devices


def replays(architecture: str | None, n_gpu_layers: int) -> bool:
    """Whether the loaded llama.cpp rolls back all layers of an architecture's models by replay.

    n_gpu_layers: on the first GPU; layers of a GPU that cannot replay keep snapshots.
    """
    library = llama_cpp.llama_cpp._lib
    switch = os.environ.get(_SWITCH)
    if architecture not in REPLAYED or switch == "0" or not hasattr(library, _OPERATION):
        return False
    return not n_gpu_layers or (switch != "cpu" and device_replays(device_name(n_gpu_layers)))


def device_replays(name: str) -> bool:
    """Whether the loaded llama.cpp rolls back by replay on the device of ggml with this name."""
    library = llama_cpp.llama_cpp._lib
    if not hasattr(library, "llama_dev_can_replay"):
        return False
    find, can_replay = library.ggml_backend_dev_by_name, library.llama_dev_can_replay
    find.argtypes, find.restype = [ctypes.c_char_p], ctypes.c_void_p
    can_replay.argtypes, can_replay.restype = [ctypes.c_void_p], ctypes.c_bool
    device = find(name.encode())
    return bool(device and can_replay(device))


def keeps_snapshots(context: Any) -> bool:
    """Whether a context keeps the snapshots that it was made with, or needs none.

    llama.cpp keeps none of the recurrent states of most architectures.
    """
    model = llama_cpp.llama_get_model(context)
    recurrent = llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
    return not recurrent or llama_cpp.llama_n_rs_seq(context) > 0


def looks_up_by_default(
    architecture: str | None, depth: int | Literal["auto"], rollback: Rollback, n_gpu_layers: int
) -> bool:
    """Whether a session also drafts from the text unless told otherwise (docs/decisions.md)."""
    replay = rollback is Rollback.SNAPSHOT and replays(architecture, n_gpu_layers)
    return depth == AUTO and replay


def looks_up_without_head(model: Path, rollback: Rollback, n_gpu_layers: int) -> bool:
    """Whether a session of a model without a head drafts from the text unless told otherwise.

    It does where rejected drafts leave no copies of a state: a cache of attention gets shorter.
    """
    with open_model(model) as opened:
        architecture, attends_only = opened.architecture, opened.attends_only
    return attends_only or looks_up_by_default(architecture, AUTO, rollback, n_gpu_layers)
