"""The products of `ggml_calls.Ggml`, computed by ggml for ARM on a CPU emulated by qemu."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..llama_libraries import CHOICE
from .emulated_build import SYSTEM
from .ggml_calls import Bytes, Floats

_ENCODE, _PRODUCT, _SEPARATE_ROWS, _EXPERTS, _KERNELS = range(5)  # as in emulated_driver.cpp


def _row_size(type_: int, n: int) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(type_)]
    return n // block * size


class EmulatedGgml:
    """The program of `emulated_driver.cpp`, as a context.

    cpu: a name that qemu knows. lanes: what MTP_GGUF_KERNELS is there, empty for unset.
    """

    def __init__(self, driver: Path, cpu: str, lanes: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != CHOICE}
        environment["QEMU_LD_PREFIX"] = SYSTEM
        self._process = subprocess.Popen(
            ["qemu-aarch64", "-cpu", cpu, driver],
            env=environment | ({CHOICE: lanes} if lanes else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> EmulatedGgml:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.communicate(timeout=60)
        assert error is not None or self._process.returncode == 0

    def _ask(self, size: int, numbers: tuple[int, ...], *inputs: npt.NDArray[Any]) -> bytes:
        assert self._process.stdin
        assert self._process.stdout
        request = [struct.pack("<8i", *numbers), *(x.tobytes() for x in inputs)]
        self._process.stdin.write(b"".join(request))
        self._process.stdin.flush()
        answer = self._process.stdout.read(size)
        assert len(answer) == size, "the emulated program ended"
        return answer

    def _floats(self, shape: tuple[int, ...], *request: Any) -> Floats:
        answer = self._ask(4 * int(np.prod(shape)), *request)
        return np.frombuffer(answer, np.float32).reshape(shape)

    def lanes(self) -> str:
        """The name of our kernels, empty where none are plugged in."""
        return self._ask(16, (_KERNELS, *[0] * 7)).rstrip(b"\0").decode()

    def encode(self, type_: int, values: Floats) -> Bytes:
        """As Ggml.encode, of rows [rows, n]."""
        rows, n = values.shape
        request = (_ENCODE, type_, n, rows, 1, 1, 1, 1)
        return np.frombuffer(self._ask(rows * _row_size(type_, n), request, values), np.uint8)

    def product(self, type_: int, weights: Bytes, rows: int, x: Floats, threads: int) -> Floats:
        """As Ggml.product."""
        columns, n = x.shape
        request = (_PRODUCT, type_, n, rows, 1, columns, 1, threads)
        return self._floats((columns, rows), request, weights, x)

    def strided_product(
        self, type_: int, weights: Bytes, rows: int, x: Floats, threads: int
    ) -> Floats:
        """As Ggml.strided_product."""
        columns, n = x.shape
        request = (_SEPARATE_ROWS, type_, n, rows, 1, columns, 1, threads)
        twice = weights[: 2 * rows * _row_size(type_, n)]
        return self._floats((columns, rows), request, twice, x)

    def expert_product(
        self,
        type_: int,
        weights: Bytes,
        rows: int,
        x: Floats,
        ids: npt.NDArray[np.int32],
        threads: int,
    ) -> Floats:
        """As Ggml.expert_product."""
        (tokens, n), used = x.shape, ids.shape[1]
        experts = weights.size // (rows * _row_size(type_, n))
        request = (_EXPERTS, type_, n, rows, experts, tokens, used, threads)
        return self._floats((tokens, used, rows), request, weights, x, ids)
