"""The table of ggml tensor types: id, name, block length and block size.

Reader, writer, converter and listing all use it. Ids and layouts are ggml's (`enum ggml_type` in
ggml.h, block structs in ggml-common.h); a test compares every row with the linked libggml.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorType:
    """A ggml tensor type: `block_length` consecutive elements take `block_bytes` bytes."""

    id: int
    name: str
    block_length: int
    block_bytes: int

    def __reduce__(self) -> "tuple[Callable[[str], TensorType], tuple[str]]":
        """Pickled by name, because types are compared by identity."""
        return _by_name, (self.name,)

    @property
    def is_quantized(self) -> bool:
        """Whether elements are stored in blocks, so that rows must be a multiple of the block."""
        return self.block_length > 1

    def row_bytes(self, row_length: int) -> int:
        """Bytes of a row of `row_length` elements, a multiple of the block length."""
        return row_length // self.block_length * self.block_bytes


_TABLE = (
    TensorType(0, "F32", 1, 4),
    TensorType(1, "F16", 1, 2),
    TensorType(2, "Q4_0", 32, 18),
    TensorType(3, "Q4_1", 32, 20),
    TensorType(6, "Q5_0", 32, 22),
    TensorType(7, "Q5_1", 32, 24),
    TensorType(8, "Q8_0", 32, 34),
    TensorType(9, "Q8_1", 32, 36),
    TensorType(10, "Q2_K", 256, 84),
    TensorType(11, "Q3_K", 256, 110),
    TensorType(12, "Q4_K", 256, 144),
    TensorType(13, "Q5_K", 256, 176),
    TensorType(14, "Q6_K", 256, 210),
    TensorType(15, "Q8_K", 256, 292),
    TensorType(16, "IQ2_XXS", 256, 66),
    TensorType(17, "IQ2_XS", 256, 74),
    TensorType(18, "IQ3_XXS", 256, 98),
    TensorType(19, "IQ1_S", 256, 50),
    TensorType(20, "IQ4_NL", 32, 18),
    TensorType(21, "IQ3_S", 256, 110),
    TensorType(22, "IQ2_S", 256, 82),
    TensorType(23, "IQ4_XS", 256, 136),
    TensorType(24, "I8", 1, 1),
    TensorType(25, "I16", 1, 2),
    TensorType(26, "I32", 1, 4),
    TensorType(27, "I64", 1, 8),
    TensorType(28, "F64", 1, 8),
    TensorType(29, "IQ1_M", 256, 56),
    TensorType(30, "BF16", 1, 2),
    TensorType(34, "TQ1_0", 256, 54),
    TensorType(35, "TQ2_0", 256, 66),
    TensorType(39, "MXFP4", 32, 17),
    TensorType(40, "NVFP4", 64, 36),
    TensorType(41, "Q1_0", 128, 18),
    TensorType(42, "Q2_0", 64, 18),
)

BY_ID = {t.id: t for t in _TABLE}
BY_NAME = {t.name: t for t in _TABLE}


def _by_name(name: str) -> TensorType:
    return BY_NAME[name]


F32 = BY_NAME["F32"]
F16 = BY_NAME["F16"]
BF16 = BY_NAME["BF16"]
I64 = BY_NAME["I64"]
NVFP4 = BY_NAME["NVFP4"]
Q8_0 = BY_NAME["Q8_0"]
