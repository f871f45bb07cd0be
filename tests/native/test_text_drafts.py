"""The choice between drafts from the text and those of a head, on costs from a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtp_gguf.native.depth import DepthChooser, Outcome
from mtp_gguf.native.errors import NativeError
from support.text_drafts import TextDrafts

# Milliseconds of batches of 1 to 16 tokens: one thread, a model of the 0.8B shape.
VERIFY = [22.0, 26.0, 30.5, 35.0, 38.5, 46.0, 53.0, 66.0, 70.0, 76.0, 84.0, 90.0, 96.0, 101.0]
VERIFY += [112.0, 175.0]
PERIOD = 100


@pytest.fixture
def text() -> Iterator[TextDrafts]:
    chooser = DepthChooser(4)
    drafts = TextDrafts(chooser)
    yield drafts
    drafts.close()


def copy(
    text: TextDrafts, cycles: int, milliseconds: Callable[[int, int], float]
) -> list[tuple[int, float]]:
    """Generate a text that repeats itself: the tokens and the time of each cycle.

    milliseconds: by the size of the batch, and how many of that size there were before.
    """
    words = [i % PERIOD for i in range(2 * PERIOD)]
    text.set(words, generated=False)
    seen: Counter[int] = Counter()
    done = []
    for _ in range(cycles):
        drafts = text.plan()
        size = 1 + len(drafts)
        ms = milliseconds(size, seen[size])
        seen[size] += 1
        if drafts:
            text.report(len(drafts), len(drafts), ms)
        else:
            text.chooser.report(Outcome([], 0, 0, None, 0.0, ms))
        words += [i % PERIOD for i, _ in zip(count(len(words)), range(size), strict=False)]
        text.set(words, generated=True)
        done.append((size, ms))
    return done


def speed(done: list[tuple[int, float]]) -> float:
    tokens, times = zip(*done, strict=True)
    return float(sum(tokens) / sum(times))


BEST = max(size / ms for size, ms in enumerate(VERIFY, 1))


@pytest.mark.parametrize("first", [1.0, 1.4])
def test_a_copy_is_drafted_at_nearly_the_best_size(text: TextDrafts, first: float) -> None:
    """Although the first time of each batch size is longer by this factor."""
    done = copy(text, 100, lambda size, seen: VERIFY[size - 1] * (1.0 if seen else first))
    late = [(size, VERIFY[size - 1]) for size, _ in done[50:]]
    assert speed(late) > 0.95 * BEST


@pytest.mark.parametrize("times", [1, 2])
def test_slow_moments_do_not_end_drafts(text: TextDrafts, times: int) -> None:
    """The first batches of drafts of each size are 20 times as slow as they should be."""

    def milliseconds(size: int, seen: int) -> float:
        return VERIFY[size - 1] * (20.0 if size > 1 and seen < times else 1.0)

    text.chooser.set_costs(VERIFY[:1], [])
    assert speed(copy(text, 300, milliseconds)[-50:]) > 0.9 * BEST


def test_trials_cost_little_where_drafts_do_not_pay(text: TextDrafts) -> None:
    """Although all are right: a batch takes 1.2 times as long as its tokens alone."""
    text.chooser.set_costs([10.0], [])
    done = copy(text, 2000, lambda size, _: 10.0 * size * (1.2 if size > 1 else 1.0))
    assert speed(done) > 0.98 / 10.0


def test_an_edited_copy_goes_on_behind_each_replaced_token(text: TextDrafts) -> None:
    """The token before is new, so no match leads there."""
    source = list(range(100))
    edited = [1000 + i if i % 12 == 0 else i for i in source]
    text.set(source, generated=False)
    for end in range(1, 90):
        text.set([*source, *edited[:end]], generated=True)
        if end in (61, 73, 85):  # after a replaced token
            drafts = text.plan(n=4, depth=0)
            assert drafts
            assert drafts == edited[end : end + len(drafts)]
    text.set([*source, *edited[:85]], generated=True)
    text.set(source[:10], generated=True)  # the place is forgotten with its text
    assert text.plan(n=4, depth=0) == []


def test_a_novel_text_is_left_to_the_head(text: TextDrafts) -> None:
    """A place is not followed for long if nothing is right there."""
    source = list(range(100))
    words = [*source, *range(30)]
    text.set(words, generated=False)
    for i in range(40):
        words.append(2000 + i)
        text.set(words, generated=True)
    assert text.plan(n=4, depth=0) == []


@settings(
    max_examples=200,
    deadline=None,
    # Each example sets the text of the fixture anew.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 1.0), st.lists(st.integers(0, 3), max_size=30), st.booleans()),
        max_size=20,
    )
)
def test_drafts_are_tokens_of_the_text_whatever_it_was_before(
    text: TextDrafts, edits: list[tuple[float, list[int], bool]]
) -> None:
    """Cut to a share, then continued, read or generated; a remembered place may be cut off."""
    words: list[int] = []
    for share, more, generated in edits:
        words = words[: int(len(words) * share)] + more
        text.set(words, generated=generated)
        assert set(text.plan(depth=0)) <= set(words)


def test_the_text_may_change_in_any_way(text: TextDrafts) -> None:
    """Drafts are those of the text that was set last."""
    text.set([1, 2, 3, 4, 5, 6, 7, 8], generated=False)
    assert text.plan() == []
    text.set([1, 2, 3, 4, 9, 9, 1, 2, 3], generated=True)
    assert text.plan(n=2) in ([], [4], [4, 9])
    assert text.plan(n=2, depth=0) in ([4], [4, 9])
    text.set([], generated=False)
    assert text.plan() == []


def test_arguments_are_checked(text: TextDrafts) -> None:
    for tokens in ([-1], [2, -7]):
        text.set([1, 2, 3, 1, 2, 3], generated=True)
        assert text.plan(depth=0)
        with pytest.raises(NativeError, match="tokens: expected 0 to"):
            text.set(tokens, generated=False)
        assert text.plan(depth=0) == []  # not drafts of the text before
    with pytest.raises(NativeError, match="n: expected 0 to 16, found 17"):
        text.plan(n=17)
    with pytest.raises(NativeError, match="head_depth: expected -1 to 4, found 5"):
        text.plan(depth=5)
    with pytest.raises(NativeError, match="n_accepted: expected 0 to 2, found 3"):
        text.report(2, 3, 1.0)
