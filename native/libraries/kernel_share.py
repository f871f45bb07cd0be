"""The share of a model's weights that our kernels compute on this CPU."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mtp_gguf.gguf_tools.files.format import TensorInfo

from ..runtime import plugged_kernels


@dataclass(frozen=True)
class KernelShare:
    """Weight matrices with and without kernels of ours.

    instructions: what the kernels use, such as "AVX2"; None: they are not plugged in, for `reason`.
    nbytes: the bytes of all matrices. left: by type, largest first, the bytes that llama.cpp's own
    code computes.
    """

    instructions: str | None
    reason: str
    nbytes: int
    left: dict[str, int]

    @property
    def share(self) -> float:
        """Share of the bytes that our kernels compute; 1 for a file without matrices."""
        return 1 - sum(self.left.values()) / self.nbytes if self.nbytes else 1.0

    @property
    def text(self) -> str:
        """Which part of the weights has kernels, and which types have none."""
        if not self.instructions:
            return f"llama.cpp's own ({self.reason})"
        if not self.left:
            return f"{self.instructions} for all weights"
        rest = ", ".join(f"{name} {n / self.nbytes:.1%}" for name, n in self.left.items())
        return (
            f"{self.instructions} for {self.share:.1%} of the weights' bytes, llama.cpp's own for "
            f"the rest ({rest})"
        )


def kernel_share(tensors: Iterable[TensorInfo]) -> KernelShare:
    """Return what our kernels compute of the products with these weights on this CPU."""
    nbytes: Counter[str] = Counter()
    for matrix in weight_matrices(list(tensors)):
        nbytes[matrix.type.name] += matrix.nbytes
    types = plugged_kernels.types()
    left = {name: n for name, n in nbytes.most_common() if name not in types}
    return KernelShare(plugged_kernels.instructions, plugged_kernels.reason, nbytes.total(), left)


def weight_matrices(tensors: list[TensorInfo]) -> list[TensorInfo]:
    """Return the matrices, with experts, that are multiplied with activations."""
    tied = all(t.name != "output.weight" for t in tensors)
    return [
        t
        for t in tensors
        if len(t.shape) > 1  # a matrix, not a vector
        and t.name.endswith(".weight")
        and not t.name.endswith("ssm_conv1d.weight")
        and (tied or t.name != "token_embd.weight")
    ]
