"""Sampling settings with llama.cpp's names and defaults, and those that a model file recommends."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# The keys in a file, as llama.cpp reads them.
_RECOMMENDED = {
    "temp": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repeat_penalty": "general.sampling.penalty_repeat",
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; `asdict` gives the arguments of MTPLlama.generate."""

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @classmethod
    def chosen(cls, metadata: Mapping[str, str], **given: Any) -> "Sampling":
        """Return the given settings; for those that are None the model file's, else the defaults.

        metadata: of the file, as llama_cpp.Llama has it. Values that are no numbers are ignored,
        as llama.cpp does.
        """
        settings: dict[str, Any] = {}
        for name, key in _RECOMMENDED.items():
            with suppress(KeyError, ValueError, OverflowError):
                number = float(metadata[key])
                if math.isfinite(number):
                    settings[name] = int(number) if name == "top_k" else number
        return cls(**settings | {name: value for name, value in given.items() if value is not None})
