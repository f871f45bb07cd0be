"""What a benchmark is asked to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_gguf.gguf_tools.profile import AUTO_MAX_DEPTH

from .prompts import SETS
from .result import NAMED

if TYPE_CHECKING:
    from mtp_gguf.server.find import LlamaServer

COST_DEPTH = 8  # costs are measured for batches of 1 to 9 tokens and chains of 1 to 8 drafts

SERVER_DEPTHS = (0, 1, 2, 3)


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    budget: seconds, None for unlimited. kinds: built-in prompt sets. own: the user's prompts, each
    a set of its own by name. depths: numbers and names of result.NAMED. sizes: rows of the draft
    vocabulary to compare with the file's own, -1 for the whole vocabulary. contexts: tokens before
    the prompts.
    prompts of each kind, tokens of each answer and rounds: None for as many as the budget allows.
    Fields that end in `_asked`: whether the user named them; such parts are never skipped.
    drafts: whether the model has a head, without which depths are 0 and LOOKUP.
    """

    budget: float | None = None
    kinds: Sequence[str] = tuple(SETS)
    own: dict[str, str] = field(default_factory=dict)
    depths: Sequence[int | str] = (0, 1, 2, 3, 4, 6, *NAMED)
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
    server_depths: Sequence[int] = SERVER_DEPTHS
    drafts: bool = True

    @property
    def cost_depth(self) -> int:
        """The longest chain of drafts whose cost is measured."""
        return COST_DEPTH if self.drafts else 0

    @property
    def max_depth(self) -> int:
        """The largest depth at which texts are drafted."""
        return max(AUTO_MAX_DEPTH, *(d for d in self.depths if isinstance(d, int)))
