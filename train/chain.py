"""The head of a model in PyTorch: one block for all drafts, or a chain with one for each.

In a chain, block s drafts in step s (Step 3.5). It computes rows of its own for the trunk's states,
and for the drafts before its own from the states of the blocks that made them, before their last
norm; so its cache is its own, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mtp_gguf.gguf_tools.model import Model

from .block import Cache, MtpBlock, Weights, read_tensor, rows_of
from .config import BlockConfig

_DIVISORS = "rope_freqs.weight"


class MtpChain(nn.Module):
    """Blocks of which each makes one draft; the interface of `MtpBlock`."""

    def __init__(self, blocks: Sequence[MtpBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def weights(self) -> Weights:
        """The current values of all weights: the block's number, a dot, and the suffix."""
        found = ((i, block.weights()) for i, block in enumerate(self._blocks()))
        return {f"{i}.{suffix}": array for i, own in found for suffix, array in own.items()}

    def _blocks(self) -> Iterator[MtpBlock]:
        for block in self.blocks:
            assert isinstance(block, MtpBlock)
            yield block

    def steps(
        self,
        hidden: Tensor,
        embeddings: Sequence[Tensor],
        count: int,
        *,
        first: int = 0,
        every: int = 1,
    ) -> Iterator[Tensor]:
        """Yield the states as `MtpBlock.steps`; embeddings: of each block."""
        length = hidden.shape[1]
        rows = [rows_of(i, length, first, every) for i in range(min(count, length - 1))]
        places = [torch.arange(length)[own] for own in rows]
        passed = [hidden]  # by the trunk, and by each step
        for step, block in zip(range(len(rows)), self._blocks(), strict=False):
            use, cache = block.current(), Cache()
            for i in range(step + 1):
                state = passed[i][:, first::every] if i == 1 else passed[i]
                fed = embeddings[step][:, i + 1 :][:, rows[i]]
                x = block.project(use, state[:, : len(places[i])], fed)
                if i < step:
                    block.write(use, x, i, places[i], cache)
            before, state = block.finish(use, x, step, places[step], cache)
            passed.append(before)
            yield state


def make_head(
    configs: Sequence[BlockConfig],
    weights: Weights,
    rank: int = 0,
    divisors: NDArray[np.float32] | None = None,
) -> MtpBlock | MtpChain:
    """The head with these weights; see `MtpBlock`.

    divisors: of frequencies, for the blocks whose rope says so (`read_divisors`).
    """
    if not configs[0].form.chained:
        return MtpBlock(configs[0], weights, rank)
    blocks = []
    for i, config in enumerate(configs):
        own = {key[len(f"{i}.") :]: w for key, w in weights.items() if key.startswith(f"{i}.")}
        by = None
        if divisors is not None and config.rope.divided:
            by = divisors[: config.rope.count // 2]
        blocks.append(MtpBlock(config, own, rank, by))
    return MtpChain(blocks)


def read_divisors(model: Model) -> NDArray[np.float32] | None:
    """What divides the frequencies of rotations; None if nothing does."""
    return read_tensor(model, _DIVISORS) if _DIVISORS in model.tensors else None
