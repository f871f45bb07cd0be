"""What holds drafting back, on numbers whose answer is plain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtp_gguf.bench.result import TextResult
from mtp_gguf.bench.spread import Spread, spread
from mtp_gguf.bench.verdict import judge


def text(depth: int | str, tok_s: float, draft: float, verify: float, tokens: float) -> TextResult:
    return TextResult(
        kind="all",
        context=0,
        fastmtp_size=0,
        rows=32768,
        depth=depth,
        tokens=100,
        tok_s=Spread(tok_s, tok_s, tok_s, 3),
        tokens_per_cycle=tokens,
        acceptance=(0.8, 0.6, 0.5)[: depth if isinstance(depth, int) else 1],
        draft_ms=draft,
        verify_ms=verify,
        rollback_ms=0.0,
        rest_ms=0.0,
        limit_tok_s=tokens / verify * 1e3,
    )


PLAIN = text(0, 50.0, 0, 20, 1)


@pytest.mark.parametrize(
    ("drafting", "words"),
    [
        (text(2, 45.0, 4, 50, 2.4), "verification holds it back: a batch of 3 tokens costs 2.5"),
        (text(2, 46.0, 30, 22, 2.4), "drafting holds it back: it takes 58% of each cycle"),
        (text(2, 48.0, 4, 24, 1.3), "acceptance holds it back: 80% of the first drafts"),
    ],
)
def test_names_what_holds_it_back(drafting: TextResult, words: str) -> None:
    verdict = judge([PLAIN, drafting])
    assert verdict is not None
    assert verdict.best == 0
    assert verdict.best_drafting == 2
    assert verdict.sentence.startswith("drafting loses here: depth 2 runs at 0.9")
    assert words in verdict.sentence
    worst = max(verdict.without, key=lambda name: verdict.without[name])
    assert worst == words.partition(" ")[0]


def test_what_each_price_costs() -> None:
    """A cycle of 30 ms: 4 of drafts, 25 of verification, 1 of the rest; 2.4 tokens of 3."""
    best = replace(text(2, 80.0, 4, 25, 2.4), rest_ms=0.6, rollback_ms=0.4)
    verdict = judge([PLAIN, best])
    assert verdict is not None
    assert verdict.without == {
        "verification": pytest.approx(30 / (30 - 25 + 20)),
        "drafting": pytest.approx(30 / 26),
        "acceptance": pytest.approx(3 / 2.4),
    }


def test_faster_kernels_are_named_where_there_are_some() -> None:
    slow = text(2, 45.0, 4, 50, 2.4)
    for slow_kernels in (False, True):
        verdict = judge([PLAIN, slow], slow_kernels=slow_kernels)
        assert verdict is not None
        assert ("`mtp-gguf build-server`" in verdict.sentence) is slow_kernels


def test_limit_and_share() -> None:
    slow, fast = text(1, 60.0, 2, 27, 1.8), text(2, 80.0, 4, 24, 2.4)
    verdict = judge([PLAIN, slow, fast, text("auto", 99.0, 1, 1, 1)])
    assert verdict is not None
    assert verdict.best == verdict.best_drafting == 2
    assert verdict.gain == pytest.approx(1.6)
    assert verdict.limit_tok_s == pytest.approx(100.0)
    assert verdict.share_reached == pytest.approx(0.8)
    assert verdict.sentence.startswith("depth 2 is 1.60 times as fast as no drafting; ")


def test_a_gain_within_the_noise_is_none() -> None:
    verdict = judge([PLAIN, text(1, 51.0, 2, 30, 1.8)])
    assert verdict is not None
    assert verdict.best == 0
    assert verdict.sentence.startswith("drafting gains less than 3% here; ")


def test_without_a_comparison_there_is_no_verdict() -> None:
    assert judge([PLAIN]) is None
    assert judge([text(2, 45.0, 4, 50, 2.4)]) is None


def test_spread() -> None:
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert spread([5.0, 1.0, 3.0]) == Spread(3.0, 1.0, 5.0, 3)
    assert spread([9.0, 1.0, 2.0, 3.0, 4.0, 0.0, 5.0, 6.0]) == Spread(3.5, 2.0, 5.0, 8)
