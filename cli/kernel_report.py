"""Which code quantizes each type of a conversion: for `--verbose`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtp_gguf.convert.plan import Plan


def kernels(plans: Sequence["Plan"]) -> dict[str, str]:
    """By type (and "with importance", where weights are used): the instruction set, or ggml.

    Where a kernel was tried and gave other bytes than ggml, the reason follows. Types are tried
    here if they were not before, which takes some hundredths of a second each.
    """
    from mtp_gguf.native import quantizer  # noqa: PLC0415  (loads the libraries)

    found = {}
    for plan in plans:
        weights = plan.imatrix.weights if plan.imatrix else {}
        for tensor in plan.tensors:
            kind = tensor.spec.type
            weighted = kind.is_quantized and tensor.spec.name in weights
            if tensor.target is None or kind.name == "F32":
                continue
            label = f"{kind.name} with importance" if weighted else kind.name
            if label not in found:
                found[label] = quantizer.kernel(kind, weighted)
    return dict(sorted(found.items()))


def kernel_text(found: dict[str, str]) -> str:
    """A line for each type."""
    from mtp_gguf.native import quantizer  # noqa: PLC0415

    lines = [f"instruction sets of the quantizer here: {', '.join(quantizer.targets())}"]
    return "\n".join([*lines, *(f"quantizer of {label}: {name}" for label, name in found.items())])
