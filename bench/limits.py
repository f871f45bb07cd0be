"""How close a model comes to what this machine reads and multiplies at most."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from mtp_gguf.gguf_tools.heads.head import block_of
from mtp_gguf.gguf_tools.memory import state_bytes
from mtp_gguf.native.runtime import plugged_kernels

from .result import Limits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mtp_gguf.gguf_tools.model import Model

    from .result import CycleCosts, PrefillCosts

_EACH_SECONDS = 0.25
LIMITS_SECONDS = 2 * _EACH_SECONDS  # for both limits, each time
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Work:
    """What a token needs of the trunk.

    nbytes: of the memory for a single token: the weights, with those of its logits, and the
    recurrent states twice, which are read and written. products: for a token of a prompt, without
    its logits: llama.cpp computes those of the last one only.
    """

    nbytes: int
    products: int


def work_of(model: Model) -> Work:
    """Sum up the trunk's weights; of experts, those that a token is routed to.

    RequestError if the file does not tell which layers are the trunk's. The cache of attention
    and activations are not counted.
    """
    # Other models have no head, and their states are not known.
    layers = model.head.trunk_layers if model.head.is_known else inf
    experts = model.first.integer(f"{model.architecture}.expert_count") or 1
    used = model.first.integer(f"{model.architecture}.expert_used_count") or 1
    output = _OUTPUT if _OUTPUT in model.tensors else _EMBEDDING
    nbytes, products = 2 * state_bytes(model) if model.head.is_known else 0, 0
    for tensor in model.tensors.values():
        block = block_of(tensor.name)
        if (block is not None and block >= layers) or tensor.name == _EMBEDDING != output:
            continue
        share = used / experts if len(tensor.shape) > 2 and tensor.shape[2] == experts else 1.0
        nbytes += int(tensor.nbytes * share)
        if len(tensor.shape) > 1 and tensor.name != output:
            products += int(prod(tensor.shape) * share)
    return Work(nbytes, products)


def measure_limits(path: Path, threads: int) -> Limits | None:
    """Measure what `threads` read of the file at `path` and multiply, in half a second.

    The file should be in memory. None if our kernels are not plugged in.
    """
    read = plugged_kernels.read_limit(np.memmap(path, mode="r"), threads, _EACH_SECONDS)
    products = plugged_kernels.product_limit(threads, _EACH_SECONDS)
    if not read or not products:
        return None
    return Limits(read, products)


def reached(
    measured: Sequence[Limits], work: Work, cycles: CycleCosts, prefill: PrefillCosts | None
) -> Limits:
    """Return the limits with the shares of them that the model reaches.

    measured: between the rounds of `cycles`. What memory and processors leave to this program
    changes from second to second, so medians are compared with medians.
    """
    read = median(limits.read for limits in measured)
    products = median(limits.products for limits in measured)
    token_s = cycles.verify[0].median / 1e3
    of_prompt = None
    if prefill is not None:
        of_prompt = work.products * prefill.tokens / (prefill.plain.median / 1e3) / products
    return Limits(read, products, work.nbytes / token_s / read, of_prompt)
