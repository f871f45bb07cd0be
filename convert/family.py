"""What a model family tells the converter, and where to find the family of a checkpoint."""

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
    """Which part of the model is wanted: trunk and MTP head, the trunk, or the head alone.

    The head alone comes with embedding and output, as a file that a runtime loads. The block is
    what of it a model with these of its own needs.
    """

    WITH_TRUNK = "with the trunk"
    NONE = "none"
    ALONE = "alone"
    BLOCK = "block"


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A model as it will stand in the GGUF, before types are chosen.

    hparams: the architecture's metadata, without the tokenizer and general.*.
    targets: every tensor; sources that are used by none stand in `skipped` with the reason.
    n_trunk: number of trunk layers; the MTP block is block `n_trunk`.
    output: the target whose rows are the output vocabulary (token_embd.weight when tied); None
    where only the MTP block is wanted.
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
    """A model family: one module of this package that has these two names."""

    ARCHITECTURES: tuple[str, ...]

    def wants(self, name: str, head: HeadChoice) -> bool:
        """Whether a conversion of this part of the model reads the source tensor `name`."""

    def blueprint(self, checkpoint: Checkpoint, head: HeadChoice) -> Blueprint:
        """Name and shape every target; CheckpointError when the checkpoint does not fit."""


def find_family(config: dict[str, Any], where: Path) -> Family:
    """The family whose ARCHITECTURES hold the config's; CheckpointError when none does.

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
