"""A checkpoint as one side of a comparison, with its tensors as the converter would write them."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.format import Scalar, ValueType

from ..families.family import find_family
from ..families.target_model import HeadChoice, TargetModel
from ..families.vision import Tower, vision_tower
from .checkpoint import Checkpoint
from .source_rows import SourceRows
from .weights import PLAIN_DTYPES

_NAMES = {dtype: name for name, dtype in PLAIN_DTYPES.items()}


class CheckpointSide:
    """The GGUF tensors of `checkpoint`, after all transforms and before any rounding.

    head: the part of the model that the other side has.
    """

    exact = True

    def __init__(self, checkpoint: Checkpoint, head: HeadChoice) -> None:
        self.name = str(checkpoint.folder)
        made: TargetModel | Tower
        if head is HeadChoice.VISION:
            made = vision_tower(checkpoint)
        else:
            family = find_family(checkpoint.config, checkpoint.folder / "config.json")
            made = family.target_model(checkpoint, head)
        self._rows = SourceRows(checkpoint)
        for target in made.targets:
            self._rows.check(target)
        self._targets = {target.name: target for target in made.targets}
        self._tensors = {
            name: (target.shape, _NAMES[self._rows.dtype(target)])
            for name, target in self._targets.items()
        }
        self.metadata: dict[str, Scalar | tuple[Scalar, ...]] = {
            "general.architecture": made.architecture
        }
        for key, value in made.hparams.items():
            held = value.data if isinstance(value.data, Scalar) else tuple(value.data)
            if value.type is ValueType.F32:  # as they are read back from a GGUF
                numbers = np.array(held, np.float32).tolist()
                held = tuple(numbers) if isinstance(held, tuple) else numbers
            self.metadata[key] = held

    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each tensor; the type is that in which the converter computes it."""
        return self._tensors

    def raw(self, name: str, start: int, stop: int) -> None:
        """None: the source's bytes cannot be compared before the transforms."""

    def values(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """The values of these rows."""
        return self._rows.read(self._targets[name], start, stop).astype(np.float32)
