"""The interface between a model family and the converter."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.format import Value, ValueType

from ..checkpoints.checkpoint import Checkpoint
from ..plans.recipe import Target

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS in llama-hparams.h
SIGMOID = 2  # llama_expert_gating_func_type


class HeadChoice(Enum):
    """The part of the model to convert: trunk and MTP head, only the trunk, or only the head.

    ALONE includes embedding and output, so that a runtime can load the file. BLOCK is only the MTP
    block, to be added to a model that has its own embedding and output. VISION is the vision tower,
    which goes into a file of its own (`plan_mmproj`) and has no TargetModel.
    """

    WITH_TRUNK = "with the trunk"
    NONE = "none"
    ALONE = "alone"
    BLOCK = "block"
    VISION = "vision tower"


@dataclass(frozen=True, eq=False)
class TargetModel:
    """The contents of the GGUF, before tensor types are chosen.

    hparams: the architecture's metadata, without the tokenizer and general.*.
    targets: every tensor. skipped: unused source tensors with the reason.
    n_trunk: number of trunk layers; the MTP block is block `n_trunk`.
    output: the target whose rows are the output vocabulary (token_embd.weight if tied); None if
    only the MTP block is converted. computed: F32 tensors that no source has, by name.
    splits: names of pre-tokenizers by the regular expressions that only this family has.
    tokens: the text of special tokens by role; one that the tokenizer has takes precedence over its
    settings.
    """

    architecture: str
    hparams: dict[str, Value]
    targets: tuple[Target, ...]
    skipped: dict[str, str]
    n_trunk: int
    n_mtp: int
    n_vocab: int
    output: Target | None
    computed: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)


_TYPES = {bool: ValueType.BOOL, int: ValueType.U32, float: ValueType.F32, str: ValueType.STRING}


def typed(architecture: str, keys: Mapping[str, Any]) -> dict[str, Value]:
    """The metadata of an architecture, with types as llama.cpp's converter gives them.

    Whole numbers are U32, and I32 in an array. Keys without a value are left out.
    """
    found = {}
    for key, value in keys.items():
        if isinstance(value, tuple):
            kind = ValueType.I32 if type(value[0]) is int else _TYPES[type(value[0])]
            found[f"{architecture}.{key}"] = Value(kind, value)
        elif value is not None:
            whole = value if isinstance(value, Value) else Value(_TYPES[type(value)], value)
            found[f"{architecture}.{key}"] = whole
    return found


class Family(Protocol):
    """A model family, implemented by a module of this package with these members."""

    ARCHITECTURES: tuple[str, ...]

    def target_model(self, checkpoint: Checkpoint, head: HeadChoice) -> TargetModel:
        """Name and shape of every target; CheckpointError if the checkpoint does not fit."""
