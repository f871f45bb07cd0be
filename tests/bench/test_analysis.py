"""The bottleneck analysis, and coverage, on figures with an obvious answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from mtp_gguf.bench.analysis import analyze, contradictions
from mtp_gguf.bench.coverage import coverage
from mtp_gguf.bench.result import Analysis, TextResult
from mtp_gguf.bench.stats import Stats, summarize


def text(depth: int | str, tok_s: float, draft: float, verify: float, tokens: float) -> TextResult:
    return TextResult(
        kind="all",
        context=0,
        fastmtp_size=0,
        rows=32768,
        depth=depth,
        tokens=100,
        tok_s=Stats(tok_s, tok_s, tok_s, 3),
        tokens_per_cycle=tokens,
        acceptance=(0.8, 0.6, 0.5)[: depth if isinstance(depth, int) else 1],
        draft_ms=draft,
        verify_ms=verify,
        rollback_ms=0.0,
        rest_ms=0.0,
        limit_tok_s=tokens / verify * 1e3,
    )


AUTO = "depth auto, the default,"
PLAIN = text(0, 50.0, 0, 20, 1)


def analyzed(*texts: TextResult, **how: bool) -> Analysis:
    found = analyze([*texts], **how)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("drafting", "words"),
    [
        (text(2, 45.0, 4, 50, 2.4), "verification: a batch of 3 tokens costs 2.5"),
        (text(2, 46.0, 30, 22, 2.4), "drafting: it takes 58% of each cycle"),
        (text(2, 48.0, 4, 24, 1.3), "acceptance: 80% of the first drafts"),
    ],
)
def test_names_the_bottleneck(drafting: TextResult, words: str) -> None:
    analysis = analyzed(PLAIN, drafting)
    assert analysis.best == 0
    assert analysis.best_drafting == 2
    assert analysis.sentence.startswith("drafting loses here: depth 2 runs at 0.9")
    assert f"the bottleneck is {words}" in analysis.sentence
    assert analysis.bottleneck == words.partition(":")[0]


def test_speedup_without_each_cost() -> None:
    """A cycle of 30 ms: 4 of drafts, 25 of verification, 1 of the rest; 2.4 tokens of 3."""
    best = replace(text(2, 80.0, 4, 25, 2.4), rest_ms=0.6, rollback_ms=0.4)
    analysis = analyzed(PLAIN, best)
    assert analysis.speedups == {
        "verification": pytest.approx(30 / (30 - 25 + 20)),
        "drafting": pytest.approx(30 / 26),
        "acceptance": pytest.approx(3 / 2.4),
    }


def test_faster_kernels_are_suggested_on_stock_ones() -> None:
    slow = text(2, 45.0, 4, 50, 2.4)
    for stock_kernels in (False, True):
        analysis = analyzed(PLAIN, slow, stock_kernels=stock_kernels)
        assert ("patched libraries" in analysis.sentence) is stock_kernels


def test_limit_and_share() -> None:
    slow, fast = text(1, 60.0, 2, 27, 1.8), text(2, 80.0, 4, 24, 2.4)
    analysis = analyzed(PLAIN, slow, fast, text("auto", 99.0, 1, 1, 1))
    assert analysis.best == analysis.best_drafting == 2
    assert analysis.gain == pytest.approx(1.6)
    assert analysis.limit_tok_s == pytest.approx(100.0)
    assert analysis.share_reached == pytest.approx(0.8)
    gain = "depth 2 is 1.60 times as fast as no drafting (depth auto, the default: 1.98 times); "
    assert analysis.sentence.startswith(gain)


def test_a_gain_within_the_noise_is_none() -> None:
    analysis = analyzed(PLAIN, text(1, 51.0, 2, 30, 1.8))
    assert analysis.best == 0
    assert analysis.sentence.startswith("drafting gains less than 3% here; ")


@pytest.mark.parametrize(
    ("fixed", "auto", "said"),
    [
        *(
            (fixed, 90.0, f"{AUTO} is 1.80 times as fast as no drafting (")
            for fixed in (51.0, 45.0)
        ),
        (51.0, 50.5, "drafting gains less than 3% here (depth auto, the default: 1.01 times); "),
        (45.0, 50.5, "drafting gains less than 3% here (depth auto, the default: 1.01 times); "),
        (45.0, 49.0, "drafting loses here: depth 1 runs at 0.90 times no drafting (depth auto, "),
    ],
)
def test_fixed_depths_and_auto_do_not_contradict_each_other(
    fixed: float, auto: float, said: str
) -> None:
    analysis = analyzed(PLAIN, text(1, fixed, 2, 30, 1.8), text("auto", auto, 2, 30, 1.8))
    assert analysis.sentence.startswith(said)


def test_a_batch_that_was_faster_than_a_token_makes_nothing_slower() -> None:
    """Other programs had the processors while single tokens were measured."""
    quick = text(3, 200.0, 1, 8, 3.2)
    analysis = analyzed(PLAIN, quick)
    assert analysis.speedups["verification"] == 1
    [found] = contradictions([PLAIN, quick])
    assert found == "a batch of 4 tokens took 0.40 times as long as one token, and cannot take less"


@pytest.mark.parametrize(
    ("depth", "tok_s", "words"),
    [
        (4, 276.0, "depth 4 was measured at 5.52 times the speed of no drafting, and at most 5 "),
        (4, 249.0, ""),
        ("auto", 800.0, "depth auto was measured at 16.00 times the speed of no drafting, and at "),
        ("auto+lookup", 700.0, ""),
    ],
)
def test_a_depth_is_at_most_as_fast_as_if_all_drafts_were_free(
    depth: int | str, tok_s: float, words: str
) -> None:
    found = contradictions([PLAIN, text(depth, tok_s, 0, 20, 5)])
    assert [text[: len(words)] for text in found] == ([words] if words else [])
    elsewhere = replace(text(depth, tok_s, 0, 20, 5), context=4096)
    assert contradictions([PLAIN, elsewhere]) == []


def test_without_a_comparison_there_is_no_analysis() -> None:
    assert analyze([PLAIN]) is None
    assert analyze([text(2, 45.0, 4, 50, 2.4)]) is None


def test_stats() -> None:
    assert summarize([3.0]) == Stats(3.0, 3.0, 3.0, 1)
    assert summarize([5.0, 1.0, 3.0]) == Stats(3.0, 1.0, 5.0, 3)
    assert summarize([9.0, 1.0, 2.0, 3.0, 4.0, 0.0, 5.0, 6.0]) == Stats(3.5, 2.0, 5.0, 8)


def test_coverage_counts_each_generated_token_once() -> None:
    generated = Counter({5: 4, 7: 3, 9: 2, 1: 1})
    assert coverage([7, 8, 5, 2, 9], generated) == {1: 0.3, 2: 0.3, 5: 0.9}


def test_coverage_where_nothing_was_generated() -> None:
    assert coverage([7], Counter()) == {1: 0.0}
