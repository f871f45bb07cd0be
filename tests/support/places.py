"""Where tests run models: on the CPU, or on a GPU that ggml finds.

A test of tests/native that is marked `everywhere` runs in both places; its sessions and heads are
made by `native_trunk.opened_session` and with the device `places.current().head`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest

HOW_TO = (
    "ggml finds no GPU: `.ci/gpu BACKEND FOLDER` installs this checkout with a GPU backend, then "
    "run `FOLDER/bin/python -m pytest -m gpu`; CONTRIBUTING.md says how to do it without a GPU"
)
ALL = 999  # more layers than any model of the tests has


@dataclass(frozen=True)
class Place:
    """Where a model runs: how many layers of the trunk on the GPU, and the head's device.

    embedding: whether an embedding that is not the output, too, is on the head's device.
    """

    gpu_layers: int
    head: str
    embedding: bool = False


CPU = Place(0, "CPU")
_current = [CPU]


@cache
def find_gpu() -> str | None:
    """Ggml's name of the first GPU; None if there is none."""
    from mtp_gguf.native.libraries.loaded import device_name  # noqa: PLC0415 - loads llama.cpp

    name = device_name(ALL)
    return None if name == "CPU" else name


def require_gpu() -> str:
    """Ggml's name of the GPU; skips the test if there is none."""
    found = find_gpu()
    if found is None:
        pytest.skip(HOW_TO)
    return found


def affordable(count: int) -> int:
    """How much of a sweep to run: all of it on a GPU, a quarter where a program plays the GPU."""
    from mtp_gguf.native.libraries.devices import devices  # noqa: PLC0415 - loads llama.cpp

    found = [device.description for device in devices() if device.name == find_gpu()]
    return count // 4 if any(d.startswith(("llvmpipe", "SwiftShader")) for d in found) else count


def place(name: str) -> Place:
    """The place with this name.

    gpu: trunk and head; whole: the trunk's embedding, too; half: half of the layers, with the head
    on the GPU or (half-cpu) the CPU; trunk: all layers, with the head on the CPU.
    """
    if name == "cpu":
        return CPU
    gpu = require_gpu()
    return {
        "gpu": Place(ALL, gpu),
        "whole": Place(ALL, gpu, embedding=True),
        "trunk": Place(ALL, "CPU"),
        "half": Place(2, gpu),
        "half-cpu": Place(2, "CPU"),
    }[name]


def current() -> Place:
    """Where the running test puts its models."""
    return _current[-1]


@contextmanager
def use(chosen: Place) -> Iterator[Place]:
    """Put the models of this block there."""
    _current.append(chosen)
    try:
        yield chosen
    finally:
        _current.pop()


def _names(*names: str) -> pytest.MarkDecorator:
    marked = [n if n == "cpu" else pytest.param(n, marks=pytest.mark.gpu) for n in names]
    return pytest.mark.parametrize("place", marked, indirect=True)


everywhere = _names("cpu", "gpu")
there = _names("gpu")
in_all_places = _names("cpu", "gpu", "trunk", "half", "half-cpu")
