"""The search of `tune`: which settings to try, and which to keep. Knows no model and no clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mtp_gguf.gguf_tools.profile import AUTO, Candidate, DraftSettings

from .verdict import LEAST_GAIN

# Gives the tokens per second of each of several settings, measured in turn.
Measure = Callable[[Sequence[DraftSettings]], Sequence[float]]

PLAIN = DraftSettings(depth=0)

# A setting is changed for this much and no less: most of smaller differences are noise.
LEAST_CHANGE = 0.01


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


class Search:
    """Depths first, no drafting among them; then size, threads, rollback; then depths again.

    One setting is changed at a time, from the best so far, and settings that are compared are
    measured together, no drafting always with them: what counts is each one's speed over that of no
    drafting in the same minutes. A change of size or rollback moves the best depth, hence its
    neighbours and "auto" at the end.
    """

    def __init__(
        self, space: Space, measure: Measure, go_on: Callable[[str], bool] = lambda _: True
    ) -> None:
        """go_on: asked before what can be left out, by its name in Space."""
        self._space = space
        self._measure = measure
        self._go_on = go_on
        self._times: dict[DraftSettings, float] = {}  # no drafting, in the last comparison
        self._plain = 0.0

    def run(self) -> Found:
        """The whole search."""
        space = self._space
        start = DraftSettings(
            space.depths[0], space.sizes[0], space.rollbacks[0], space.draft_threads[0]
        )
        best = self._compare([replace(start, depth=d) for d in space.depths if d], None)
        if len(space.sizes) > 1 and self._go_on("sizes"):
            best = self._compare([replace(best, fastmtp_size=size) for size in space.sizes], best)
        if len(space.draft_threads) > 1 and self._go_on("draft_threads"):
            best = self._compare(
                [replace(best, draft_threads=n) for n in space.draft_threads], best
            )
        if len(space.rollbacks) > 1 and self._go_on("rollbacks"):
            best = self._compare([replace(best, rollback=mode) for mode in space.rollbacks], best)
        deepest = max(space.depths)
        near = {int(best.depth) + step for step in (-1, 0, 1)}
        again = [replace(best, depth=d) for d in sorted(near) if 1 <= d <= deepest]
        self._compare([*again, replace(best, depth=AUTO)], best)
        found = self.found()
        assert found is not None
        return found

    def _compare(
        self, settings: Sequence[DraftSettings], known: DraftSettings | None
    ) -> DraftSettings:
        """The fastest; `known` unless another is faster by LEAST_CHANGE."""
        batch = [PLAIN, *settings]
        speeds = self._measure(batch)
        self._plain = speeds[0]
        times = {s: speed / speeds[0] for s, speed in zip(batch, speeds, strict=True)}
        self._times |= times
        best = max(settings, key=lambda s: times[s])
        if known and times[best] < times[known] * (1 + LEAST_CHANGE):
            return known
        return best

    def found(self) -> Found | None:
        """The answer as far as the search has come; None before the first comparison."""
        if not self._times:
            return None
        times, plain = self._times, self._plain
        tried = sorted((Candidate(s, t * plain) for s, t in times.items()), key=lambda c: -c.tok_s)
        best = next(c for c in tried if c.settings.depth != 0)
        won = best.tok_s >= plain * (1 + LEAST_GAIN)
        chosen = best if won else Candidate(PLAIN, plain)
        return Found(chosen.settings, chosen.tok_s, plain, tuple(tried))
