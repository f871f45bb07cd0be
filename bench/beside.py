"""llama-server beside our own session: the same texts at the same depth, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtp_gguf.gguf_tools.system import free_memory

from .result import ServerResult
from .spread import spread
from .turns import rotated

if TYPE_CHECKING:
    from mtp_gguf.server.find import LlamaServer

    from .server import BenchServer, ServerRun
    from .turns import Turns

_WARM_UP_TOKENS = 8
_BESIDE_THE_FILE = 1.25  # memory of a server over the size of its file: contexts, logits


def has_room(file_bytes: int) -> bool:
    """Whether a server fits into memory beside what is loaded; so where the system does not say."""
    free = free_memory()
    return free is None or free > file_bytes * _BESIDE_THE_FILE


def in_turn(
    name: str,
    server: LlamaServer,
    up: BenchServer,
    ours: Turns | None,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int,
    tokens: int,
    rounds: int,
) -> ServerResult:
    """Each writes all texts in every round, another one first each time, the other idle meanwhile.

    up: the server, ready, at that depth. ours: a single contender at that depth; None where there
    is no room for it. What a server writes first is not counted.
    """
    up.complete(prompts[0], _WARM_UP_TOKENS)
    texts: list[list[ServerRun]] = []
    for i in range(rounds):
        for turn in rotated(("server", "ours"), i):
            if turn == "server":
                texts.append([up.complete(prompt, tokens) for prompt in prompts])
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
        spread(speeds),
        accepted / drafted if drafted else None,
        spread(own) if own else None,
        spread([o / s for o, s in zip(own, speeds, strict=True) if s]) if own else None,
    )
