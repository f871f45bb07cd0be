"""The interface between a model family and the converter, and the registry of families."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.format import Value

from .checkpoint import Checkpoint
from .config import ConfigReader
from .recipe import Target


class HeadChoice(Enum):
    """The part of the model to convert: trunk and MTP head, only the trunk, or only the head.

    ALONE includes embedding and output, so that a runtime can load the file. BLOCK is only the MTP
    block, to be added to a model that has its own embedding and output.
    """

    WITH_TRUNK = "with the trunk"
    NONE = "none"
    ALONE = "alone"
    BLOCK = "block"


@dataclass(frozen=True, eq=False)
class Blueprint:
    """The contents of the GGUF, before tensor types are chosen.

    hparams: the architecture's metadata, without the tokenizer and general.*.
    targets: every tensor. skipped: unused source tensors with the reason.
    n_trunk: number of trunk layers; the MTP block is block `n_trunk`.
    output: the target whose rows are the output vocabulary (token_embd.weight if tied); None if
    only the MTP block is converted.
    """

    architecture: str
    hparams: dict[str, Value]
    targets: tuple[Target, ...]
    skipped: dict[str, str]
    n_trunk: int
    n_mtp: int
    n_vocab: int
    output: Target | None


class Family(Protocol):
    """A model family, implemented by a module of this package with these members."""

    ARCHITECTURES: tuple[str, ...]

    def wants(self, name: str, head: HeadChoice) -> bool:
        """Whether a conversion of this part of the model reads the source tensor `name`."""

    def blueprint(self, checkpoint: Checkpoint, head: HeadChoice) -> Blueprint:
        """Name and shape of every target; CheckpointError if the checkpoint does not fit."""


def find_family(config: dict[str, Any], where: Path) -> Family:
    """The family that supports the config's architecture; CheckpointError if there is none.

    where: the config's file, for the message.
    """
    from . import qwen3_5  # noqa: PLC0415  (families import this module)

    families: tuple[Family, ...] = (qwen3_5,)
    architecture = ConfigReader(str(where), config).architecture
    for family in families:
        if architecture in family.ARCHITECTURES:
            return family
    known = ", ".join(name for family in families for name in family.ARCHITECTURES)
    raise CheckpointError(
        f"{where}: architectures: expected one of {known}, found {architecture!r}"
    )
