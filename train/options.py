"""The numbers that `train-head` can be given, each with its default and limits. Quick to import."""

from dataclasses import dataclass
from typing import Generic, TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Limits(Generic[Number]):
    """The default of an option, and its least and greatest value."""

    default: Number
    least: Number
    most: Number | None = None


TOKENS = Limits(200_000, 256)
LENGTH = Limits(512, 32, 8192)
STEPS = Limits(4, 1, 8)
EPOCHS = Limits(8.0, 0.01)
RANK = Limits(0, 0)
SEED = Limits(1, 0, (1 << 31) - 1)
GPU_LAYERS = Limits(0, -1)
LEAST_MINUTES = 0.01
LEAST_RATE = 0.0
