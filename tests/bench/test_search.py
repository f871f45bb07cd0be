"""The search of `tune` on invented speeds: it finds the fastest settings, or no drafting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mtp_gguf.bench.other_programs import OtherPrograms
from mtp_gguf.bench.search import PLAIN, Search, SearchResult, Space
from mtp_gguf.bench.tune import warnings_of
from mtp_gguf.gguf_tools.profile import DraftSettings

SPACE = Space(
    depths=(1, 2, 3, 4, 5),
    sizes=(0, 16384, 8192, -1),
    rollbacks=("snapshot", "checkpoint", "host"),
    draft_threads=(0, 1),
)
PLAIN_TOK_S = 50.0


def run(speed: Callable[[DraftSettings], float], space: Space = SPACE) -> tuple[SearchResult, int]:
    """The result if `speed` is the truth, and the number of measurements."""
    measured = 0

    def measure(settings: Sequence[DraftSettings]) -> list[float]:
        nonlocal measured
        measured += len(settings)
        assert settings[0] == PLAIN, "no drafting is part of every comparison"
        return [PLAIN_TOK_S if s == PLAIN else speed(s) for s in settings]

    return Search(space, measure).run(), measured


def truth(best: DraftSettings, top: float) -> Callable[[DraftSettings], float]:
    """Speeds that fall off with every step away from `best`."""

    def speed(s: DraftSettings) -> float:
        # "auto" is a little behind the best fixed depth, as it has to look around.
        away = 0.3 if s.depth == "auto" else abs(int(s.depth) - int(best.depth))
        away += s.fastmtp_size != best.fastmtp_size
        away += s.rollback != best.rollback
        away += s.draft_threads != best.draft_threads
        return top * 0.95**away

    return speed


@pytest.mark.parametrize(
    "best",
    [
        DraftSettings(1),
        DraftSettings(5, -1, "host", 1),
        DraftSettings(3, 8192, "checkpoint", 0),
        DraftSettings(2, 16384, "snapshot", 1),
    ],
)
def test_finds_the_best(best: DraftSettings) -> None:
    result, measured = run(truth(best, 70.0))
    assert result.settings == best
    assert result.tok_s == 70.0
    assert result.plain_tok_s == PLAIN_TOK_S
    assert result.gain == pytest.approx(1.4)
    assert [c.tok_s for c in result.tried] == sorted((c.tok_s for c in result.tried), reverse=True)
    assert measured < 30  # of 5 x 4 x 3 x 2 settings


@pytest.mark.parametrize(("top", "drafts"), [(51.4, False), (51.6, True), (40.0, False)])
def test_no_drafting_unless_it_gains_three_percent(top: float, drafts: bool) -> None:
    result, _ = run(truth(DraftSettings(2), top))
    assert result.settings == (DraftSettings(2) if drafts else PLAIN)
    assert result.tok_s == (top if drafts else PLAIN_TOK_S)
    assert result.gain == pytest.approx(top / PLAIN_TOK_S)


@pytest.mark.parametrize(("top", "possible"), [(249.0, True), (276.0, False)])
def test_a_speed_that_cannot_be_is_not_trusted(top: float, possible: bool) -> None:
    """Depth 4 yields five tokens a cycle at most."""
    result, _ = run(truth(DraftSettings(4), top), Space((4,)))
    words = "depth 4 was measured at 5.52 times the speed of no drafting, and at most 5 times is"
    warnings = warnings_of(result, OtherPrograms(threads=1))
    assert any(words in warning for warning in warnings) != possible


def test_auto_where_it_is_best() -> None:
    result, _ = run(lambda s: 60.0 if s.depth == "auto" else 55.0)
    assert result.settings.depth == "auto"


def test_a_size_can_move_the_depth() -> None:
    """With cheap drafts one more pays: the neighbours are tried again at the end."""

    def speed(s: DraftSettings) -> float:
        best = 3 if s.fastmtp_size == 8192 else 2
        away = 3 if s.depth == "auto" else abs(int(s.depth) - best)
        return (70.0 if s.fastmtp_size == 8192 else 60.0) * 0.95**away

    result, _ = run(speed)
    assert (result.settings.depth, result.settings.fastmtp_size) == (3, 8192)


def test_what_has_one_choice_is_not_searched() -> None:
    _, measured = run(lambda s: 60.0, Space((1, 2)))
    assert measured == 1 + 2 + 1 + 2 + 1


def test_a_machine_that_slows_down_does_not_change_the_choice() -> None:
    """Each speed counts beside no drafting in the same comparison, whatever the minute was like."""
    truth_of, factor = truth(DraftSettings(3, 8192), 70.0), 2.0

    def measure(settings: Sequence[DraftSettings]) -> list[float]:
        nonlocal factor
        factor *= 0.7
        return [factor * (PLAIN_TOK_S if s == PLAIN else truth_of(s)) for s in settings]

    result = Search(SPACE, measure).run()
    assert result.settings == DraftSettings(3, 8192)
    assert result.gain == pytest.approx(1.4)
    # All speeds are said as of the last comparison.
    assert result.tok_s == pytest.approx(70.0 * factor)
    assert result.plain_tok_s == pytest.approx(PLAIN_TOK_S * factor)


@pytest.mark.parametrize(("gain", "changed"), [(1.005, False), (1.02, True)])
def test_a_setting_changes_for_one_percent(gain: float, changed: bool) -> None:
    def speed(s: DraftSettings) -> float:
        away = 2 if s.depth == "auto" else abs(int(s.depth) - 2)
        return 70.0 * 0.95**away * (gain if s.rollback == "host" else 1)

    space = Space((1, 2, 3), rollbacks=("snapshot", "host"))
    again: list[DraftSettings] = []

    def measure(settings: Sequence[DraftSettings]) -> list[float]:
        again[:] = settings
        return [PLAIN_TOK_S if s == PLAIN else speed(s) for s in settings]

    Search(space, measure).run()
    assert {s.rollback for s in again if s != PLAIN} == {"host" if changed else "snapshot"}


def test_variants_without_time_are_skipped() -> None:
    asked: list[str] = []

    def has_time(name: str) -> bool:
        asked.append(name)
        return name == "rollbacks"

    tried: list[DraftSettings] = []

    def measure(settings: Sequence[DraftSettings]) -> list[float]:
        tried.extend(settings)
        return [PLAIN_TOK_S if s == PLAIN else 60.0 for s in settings]

    Search(SPACE, measure, has_time).run()
    assert asked == ["sizes", "draft_threads", "rollbacks"]
    assert {s.fastmtp_size for s in tried} == {s.draft_threads for s in tried} == {0}
    assert {s.rollback for s in tried} == {"snapshot", "checkpoint", "host"}


def test_result_before_the_end() -> None:
    """What an interrupted search has: nothing, then the depths."""
    search = Search(SPACE, lambda settings: [50.0, *(60.0 for _ in settings[1:])])
    assert search.result() is None
    answers = iter([lambda s: 60.0 + (s.depth == 3)])

    def measure(settings: Sequence[DraftSettings]) -> list[float]:
        speed = next(answers, None)
        if speed is None:
            raise KeyboardInterrupt
        return [PLAIN_TOK_S if s == PLAIN else speed(s) for s in settings]

    search = Search(SPACE, measure)
    with pytest.raises(KeyboardInterrupt):
        search.run()
    result = search.result()
    assert result is not None
    assert result.settings == DraftSettings(3)
