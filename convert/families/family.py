"""The registry of model families."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.errors import CheckpointError

from ..checkpoints.config import ConfigReader
from . import glm4_moe, glm5_next, mimo_v2, nemotron_h, qwen3_5, qwen3_next, qwen4_exp, step35
from .parts import wants
from .target_model import Family, HeadChoice

_FAMILIES: tuple[Family, ...] = (
    qwen3_5,
    qwen3_next,
    qwen4_exp,
    glm4_moe,
    glm5_next,
    mimo_v2,
    nemotron_h,
    step35,
)
_HEADS_ONLY = (glm4_moe,)  # of which no other part is converted


def wanted(
    config: dict[str, Any], where: Path, parts: Collection[HeadChoice]
) -> Callable[[str], bool]:
    """Whether a conversion of any of these parts of the model reads a source tensor.

    where: the config's file. CheckpointError as find_family.
    """
    if find_family(config, where) in _HEADS_ONLY:
        parts = {HeadChoice.BLOCK}.intersection(parts)
    return lambda name: any(wants(name, part, config) for part in parts)


def find_family(config: dict[str, Any], where: Path) -> Family:
    """The family that supports the config's architecture; CheckpointError if there is none.

    where: the config's file, for the message.
    """
    architecture = ConfigReader(str(where), config).architecture
    for family in _FAMILIES:
        if architecture in family.ARCHITECTURES:
            return family
    known = ", ".join(name for family in _FAMILIES for name in family.ARCHITECTURES)
    raise CheckpointError(
        f"{where}: architectures: expected one of {known}, found {architecture!r}"
    )
