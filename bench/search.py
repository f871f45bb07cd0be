"""The search of `tune`: which settings to try and which to keep. Knows neither model nor clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mtp_gguf.gguf_tools.profile import AUTO, Candidate, DraftSettings

from .analysis import LEAST_GAIN

# Returns tokens per second for each of several settings, measured interleaved.
Measure = Callable[[Sequence[DraftSettings]], Sequence[float]]

PLAIN = DraftSettings(depth=0)

# A setting is changed only for at least this gain; most smaller differences are noise.
LEAST_CHANGE = 0.01


@dataclass(frozen=True)
class Space:
    """The choices for each setting. The search starts from the first of each.

    sizes: rows of the draft vocabulary, as in DraftSettings. rollbacks: two-phase is not among
    them, since it is never the fastest. draft_threads: 0 for as many as the trunk.
    """

    depths: Sequence[int]
    sizes: Sequence[int] = (0,)
    rollbacks: Sequence[str] = ("snapshot",)
    draft_threads: Sequence[int] = (0,)


@dataclass(frozen=True)
class SearchResult:
    """The fastest settings, or PLAIN if none is faster by LEAST_GAIN. tried: fastest first."""

    settings: DraftSettings
    tok_s: float
    plain_tok_s: float
    tried: tuple[Candidate, ...]

    @property
    def gain(self) -> float:
        """Speed of the best drafting settings over that of no drafting."""
        return max(c.tok_s for c in self.tried if c.settings.depth != 0) / self.plain_tok_s


class Search:
    """A coordinate search: depth, then size, threads and rollback, then depth again.

    One setting is changed at a time, starting from the best so far. The candidates of a comparison
    are measured interleaved, always together with no drafting, and ranked by their speed over that
    of no drafting. Size and rollback can move the best depth, so its neighbours and "auto" are
    compared at the end.
    """

    def __init__(
        self, space: Space, measure: Measure, has_time: Callable[[str], bool] = lambda _: True
    ) -> None:
        """has_time: called with the field of Space before each comparison that may be skipped."""
        self._space = space
        self._measure = measure
        self._has_time = has_time
        self._times: dict[DraftSettings, float] = {}  # speed over that of no drafting
        self._plain = 0.0  # tokens per second of no drafting in the last comparison

    def run(self) -> SearchResult:
        """Carry out the whole search."""
        space = self._space
        start = DraftSettings(
            space.depths[0], space.sizes[0], space.rollbacks[0], space.draft_threads[0]
        )
        best = self._compare([replace(start, depth=d) for d in space.depths if d], None)
        if len(space.sizes) > 1 and self._has_time("sizes"):
            best = self._compare([replace(best, fastmtp_size=size) for size in space.sizes], best)
        if len(space.draft_threads) > 1 and self._has_time("draft_threads"):
            best = self._compare(
                [replace(best, draft_threads=n) for n in space.draft_threads], best
            )
        if len(space.rollbacks) > 1 and self._has_time("rollbacks"):
            best = self._compare([replace(best, rollback=mode) for mode in space.rollbacks], best)
        deepest = max(space.depths)
        near = {int(best.depth) + step for step in (-1, 0, 1)}
        again = [replace(best, depth=d) for d in sorted(near) if 1 <= d <= deepest]
        self._compare([*again, replace(best, depth=AUTO)], best)
        result = self.result()
        assert result is not None
        return result

    def _compare(
        self, settings: Sequence[DraftSettings], known: DraftSettings | None
    ) -> DraftSettings:
        """The fastest of the settings; `known` unless another is faster by LEAST_CHANGE."""
        batch = [PLAIN, *settings]
        speeds = self._measure(batch)
        self._plain = speeds[0]
        times = {s: speed / speeds[0] for s, speed in zip(batch, speeds, strict=True)}
        self._times |= times
        best = max(settings, key=lambda s: times[s])
        if known and times[best] < times[known] * (1 + LEAST_CHANGE):
            return known
        return best

    def result(self) -> SearchResult | None:
        """The result so far; None before the first comparison is complete."""
        if not self._times:
            return None
        times, plain = self._times, self._plain
        tried = sorted((Candidate(s, t * plain) for s, t in times.items()), key=lambda c: -c.tok_s)
        best = next(c for c in tried if c.settings.depth != 0)
        won = best.tok_s >= plain * (1 + LEAST_GAIN)
        chosen = best if won else Candidate(PLAIN, plain)
        return SearchResult(chosen.settings, chosen.tok_s, plain, tuple(tried))
