"""The search of `tune`: which settings to try, and which to keep. Knows no model and no clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mtp_gguf.gguf_tools.profile import AUTO, Candidate, DraftSettings

from .verdict import LEAST_GAIN

# Gives the tokens per second of each of several settings, measured in turn.
Measure = Callable[[Sequence[DraftSettings]], Sequence[float]]

PLAIN = DraftSettings(depth=0)


@dataclass(frozen=True)
class Space:
    """What can be chosen. The first of each is what the search starts from.

    sizes: rows of the draft vocabulary, as in DraftSettings. rollbacks: without two-phase, which
    never wins. draft_threads: 0: as many as the trunk.
    """

    depths: Sequence[int]
    sizes: Sequence[int] = (0,)
    rollbacks: Sequence[str] = ("snapshot",)
    draft_threads: Sequence[int] = (0,)


@dataclass(frozen=True)
class Found:
    """settings: of the winner, PLAIN where nothing beats that by LEAST_GAIN. tried: by speed."""

    settings: DraftSettings
    tok_s: float
    plain_tok_s: float
    tried: tuple[Candidate, ...]

    @property
    def gain(self) -> float:
        """Of the best drafting settings over no drafting, 1.0 for none."""
        return max(c.tok_s for c in self.tried if c.settings.depth != 0) / self.plain_tok_s


def search(space: Space, measure: Measure) -> Found:
    """Depths first, no drafting among them; then size, rollback, threads; then depths again.

    One setting is changed at a time, from the best so far, and settings that are compared are
    measured together, no drafting always with them. A change of size or rollback moves the best
    depth, hence its neighbours and "auto" at the end.
    """
    results: dict[DraftSettings, list[float]] = {}

    def compare(settings: Sequence[DraftSettings]) -> DraftSettings:
        batch = [PLAIN, *(s for s in settings if s != PLAIN)]
        speeds = measure(batch)
        for setting, speed in zip(batch, speeds, strict=True):
            results.setdefault(setting, []).append(speed)
        drafting = [(speed, s) for s, speed in zip(batch, speeds, strict=True) if s != PLAIN]
        return max(drafting, key=lambda item: item[0])[1]

    start = DraftSettings(
        space.depths[0], space.sizes[0], space.rollbacks[0], space.draft_threads[0]
    )
    best = compare([replace(start, depth=d) for d in space.depths if d])
    if len(space.sizes) > 1:
        best = compare([replace(best, fastmtp_size=size) for size in space.sizes])
    if len(space.rollbacks) > 1:
        best = compare([replace(best, rollback=mode) for mode in space.rollbacks])
    if len(space.draft_threads) > 1:
        best = compare([replace(best, draft_threads=n) for n in space.draft_threads])
    deepest = max(space.depths)
    near = {int(best.depth) + step for step in (-1, 0, 1)}
    again = [replace(best, depth=d) for d in sorted(near) if 1 <= d <= deepest]
    compare([*again, replace(best, depth=AUTO)])
    return _decide(results)


def _decide(results: dict[DraftSettings, list[float]]) -> Found:
    """The fastest by the last comparison that each took part in."""
    last = {settings: speeds[-1] for settings, speeds in results.items()}
    tried = sorted((Candidate(s, v) for s, v in last.items()), key=lambda c: -c.tok_s)
    plain = last[PLAIN]
    best = next(c for c in tried if c.settings.depth != 0)
    won = best.tok_s >= plain * (1 + LEAST_GAIN)
    chosen = best if won else Candidate(PLAIN, plain)
    return Found(chosen.settings, chosen.tok_s, plain, tuple(tried))
