"""What a bench is asked to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_gguf.gguf_tools.profile import AUTO_MAX_DEPTH

from .prompts import SETS

if TYPE_CHECKING:
    from mtp_gguf.server.find import LlamaServer

COST_DEPTH = 8  # batches of 1 to 9 tokens, chains of 1 to 8 drafts


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    budget: seconds; None: everything in full. kinds: built-in prompt sets. own: prompts of the
    user's, as one more set of that name. depths: numbers and "auto". sizes: rows of the draft
    vocabulary beside the default, 0 all, -1 the whole vocabulary. contexts: tokens before the
    prompts. prompts: of each kind, tokens: of each answer, rounds: of everything, None: what the
    budget allows.
    …_asked: named by the user, and so not left out for want of time.
    """

    budget: float | None = None
    kinds: Sequence[str] = tuple(SETS)
    own: dict[str, str] = field(default_factory=dict)
    depths: Sequence[int | str] = (0, 1, 2, 3, 4, 6, "auto")
    depths_asked: bool = False
    sizes: Sequence[int] = ()
    sizes_asked: bool = False
    contexts: Sequence[int] = (0,)
    prompts: int | None = None
    tokens: int | None = None
    rounds: int | None = None
    threads: int = 2
    gpu_layers: int = 0
    head: Path | None = None
    servers: Sequence[LlamaServer] = ()
    servers_asked: bool = False
    server_depths: Sequence[int] = (0, 1, 2, 3)

    @property
    def max_depth(self) -> int:
        """The deepest that texts are drafted at."""
        return max(AUTO_MAX_DEPTH, *(d for d in self.depths if isinstance(d, int)))
