"""llama-server and our own session on the same texts at the same depth, interleaved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtp_gguf.gguf_tools.machine.process_memory import free_memory

from .result import ServerResult
from .stats import rotated, summarize

if TYPE_CHECKING:
    from mtp_gguf.server.find import LlamaServer

    from .interleaved import InterleavedRuns
    from .server import BenchServer, ServerRun

_WARM_UP_TOKENS = 8
_MEMORY_FACTOR = 1.25  # memory of a server over the size of its file: contexts and logits


def fits_in_memory(file_bytes: int) -> bool:
    """Whether the free memory holds a server too."""
    return free_memory() > file_bytes * _MEMORY_FACTOR


def interleave(
    name: str,
    server: LlamaServer,
    running: BenchServer,
    ours: InterleavedRuns | None,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int,
    tokens: int,
    rounds: int,
) -> ServerResult:
    """Compare a running server with our session; while one generates, the other is idle.

    Both generate all texts in every round, and each round starts with the other one. A first
    completion of the server is not counted.

    Args:
        running: the server, ready, at that depth.
        ours: one variant at that depth, or None if the memory does not hold both.

    """
    running.complete(prompts[0], _WARM_UP_TOKENS)
    texts: list[list[ServerRun]] = []
    for i in range(rounds):
        for side in rotated(("server", "ours"), i):
            if side == "server":
                texts.append([running.complete(prompt, tokens) for prompt in prompts])
            elif ours:
                ours.round()
    speeds = [sum(r.tokens for r in t) / max(1e-9, sum(r.seconds for r in t)) for t in texts]
    own = ours.speeds(depth) if ours else []
    drafted = sum(r.drafted for t in texts for r in t)
    accepted = sum(r.accepted for t in texts for r in t)
    return ServerResult(
        name,
        server.version,
        depth,
        summarize(speeds),
        accepted / drafted if drafted else None,
        summarize(own) if own else None,
        summarize([o / s for o, s in zip(own, speeds, strict=True) if s]) if own else None,
        kernels=server.kernels,
    )
