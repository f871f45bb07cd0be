"""Notes of a plan for the user: fallbacks, patterns without a match, skipped tensors."""

from collections.abc import Iterator, Mapping, Sequence

from mtp_gguf.gguf_tools.files.format import TensorSpec
from mtp_gguf.gguf_tools.files.tensor_types import NVFP4
from mtp_gguf.gguf_tools.imatrix import Imatrix

from .precision import Override, block_length
from .recipe import Target


def notes(
    skipped: Mapping[str, str],
    tensors: Sequence[tuple[TensorSpec, Target | None]],
    quant: str,
    asked: Sequence[Override],
    overrides: Sequence[Override],
    imatrix: Imatrix | None,
) -> Iterator[str]:
    """Notes on a plan, one sentence each.

    skipped: source tensors with the reason. tensors: as they will be written. asked: the user's
    overrides. overrides: all overrides, in the order in which they are tried.
    """
    for reason in sorted(set(skipped.values())):
        count = sum(r == reason for r in skipped.values())
        yield f"{count} source tensors skipped: {reason}"
    if kept := sum(target is not None and target.fixed is NVFP4 for _, target in tensors):
        yield f"{kept} tensors stay in NVFP4, as the checkpoint has them"
    for block in (256, 128, 64, 32):
        narrow = [
            spec
            for spec, target in tensors
            if target is not None
            and target.fixed is None
            and block_length(spec.name, quant, overrides) == block
            and spec.shape[0] % block
        ]
        if narrow:
            taken = ", ".join(sorted({spec.type.name for spec in narrow}))
            yield (
                f"{len(narrow)} tensors have rows that are not a multiple of {block} and fall back "
                f"to {taken} (first: {narrow[0].name}, rows of {narrow[0].shape[0]})"
            )
    for override in asked:
        if not any(override.matches(spec.name) for spec, _ in tensors):
            yield f"--tensor-type {override.pattern}={override.kind.name}: matches no tensor"
    if imatrix is None:
        return
    missing = [
        spec.name
        for spec, _ in tensors
        if spec.type.is_quantized and spec.name not in imatrix.weights
    ]
    if missing:
        yield (
            f"the imatrix has nothing for {len(missing)} quantized tensors (first: "
            f"{missing[0]}); they are quantized without it"
        )
