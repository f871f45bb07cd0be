"""The share of a text's tokens that a draft vocabulary contains."""

from __future__ import annotations

from collections import Counter

from mtp_gguf.bench.coverage import coverage


def test_each_generated_token_counts_once() -> None:
    generated = Counter({5: 4, 7: 3, 9: 2, 1: 1})
    assert coverage([7, 8, 5, 2, 9], generated) == {1: 0.3, 2: 0.3, 5: 0.9}


def test_nothing_was_generated() -> None:
    assert coverage([7], Counter()) == {1: 0.0}
