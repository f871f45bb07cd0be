"""Greedy text with drafts is the text without, over every two settings together.

    pytest -m slow tests/native/test_sweep.py

runs twenty prompts of 8 to 3,840 tokens, 256 tokens each, for every row of an all-pairs table. In
exact mode the tokens, and in every second row the logits of all positions, are the same bits as at
depth 0. In the default mode tokens are the same until the trunk's logits of a position, both times
after the very same tokens, put two candidates that are nearly tied in another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.convert.families.target_model import HeadChoice
from support.all_pairs import all_pairs
from support.checkpoints import SPECS, Spec
from support.models import Dial, Models
from support.near_ties import AMPLIFIED, ROUNDING, Text, Work, compare, generate

# Trained; random with as many V heads as K heads and not, dense and MoE; and two that predict
# their own random text most of the time.
SPECS_SWEPT: dict[str, str | Spec] = {
    "demo": "demo",
    "dense-even": "dense-tied",
    "dense-3v": "dense-3v",
    "moe-even": replace(SPECS["moe-fused"], name="moe-even", v_heads=2, linear_dim=128),
    "moe": "moe-mixed",
}
DIALS = {"dial-3v": "tiny-3v", "dial-moe": "tiny-moe"}
SETTINGS: dict[str, Sequence[Any]] = {
    "depth": range(1, 9),
    "model": [*SPECS_SWEPT, *DIALS],
    "head": ["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q6_K"],
    "base": ["Q4_K_M", "Q8_0", "F16", "BF16"],
    "layout": [None, "ids", "table", "sidecar"],
    "rollback": ["snapshot", "checkpoint", "two-phase", "host"],
}
ROWS = all_pairs(SETTINGS)

AMPLIFIES = "Q4_K_M"  # its rows may move by AMPLIFIED

SHORT = Work((9, 40), 24, 256)
# The longest fills the context, its last token sampled and not decoded.
LONG = Work((*range(8, 64, 4), 300, 511, 700, 1500, 2300, 3840), 256, 4096)


@lru_cache(maxsize=1)
def plain(path: Path, work: Work, rollback: str | None, exact: bool, logits: bool) -> list[Text]:
    """What there is without drafts. The way of rolling back decides about exact's kernels."""
    options = {"rollback": rollback} if rollback else {}
    return generate(path, work, depth=0, logits=logits, exact=exact, **options)[0]


class Files:
    """The GGUF of a row: the base alone, and the file to take the head from."""

    def __init__(self, models: Any, dial: Any) -> None:
        self.models, self.dial = models, dial

    def spec(self, name: str) -> str | Spec | Path:
        return self.dial.checkpoint(DIALS[name]) if name in DIALS else SPECS_SWEPT[name]

    def base(self, row: dict[str, Any]) -> Path:
        return self.models.gguf(self.spec(row["model"]), row["base"], "F16")

    def head(self, row: dict[str, Any]) -> Path:
        alone = row["layout"] == "sidecar"
        choice = HeadChoice.ALONE if alone else HeadChoice.WITH_TRUNK
        spec = self.spec(row["model"])
        return self.models.gguf(spec, row["base"], row["head"], row["layout"], choice)


@pytest.fixture(scope="module")
def files(models: Models, dial: Dial) -> Files:
    return Files(models, dial)


def check_exact(files: Files, row: dict[str, Any], work: Work, logits: bool) -> None:
    two_phase = "two-phase" if row["rollback"] == "two-phase" else None
    wanted = plain(files.base(row), work, two_phase, True, logits)
    options = {"rollback": row["rollback"], "mtp_head": str(files.head(row)), "exact": True}
    texts, accepted = generate(files.base(row), work, depth=row["depth"], logits=logits, **options)
    for want, got in zip(wanted, texts, strict=True):
        assert got.tokens == want.tokens
        if want.logits is not None:
            assert got.logits is not None
            assert np.array_equal(got.logits, want.logits)
    if row["model"] in DIALS:
        assert accepted[0] > 0


def check_default(files: Files, row: dict[str, Any], work: Work) -> tuple[float, list[float]]:
    """What `near_ties.compare` returns for a row."""
    wanted = plain(files.base(row), work, None, False, True)
    options = {"rollback": row["rollback"], "mtp_head": str(files.head(row))}
    texts, _ = generate(files.base(row), work, depth=row["depth"], logits=True, **options)
    return compare(wanted, texts, AMPLIFIED if row["base"] == AMPLIFIES else ROUNDING)


def name_of(row: dict[str, Any]) -> str:
    return "-".join(str(value) for value in row.values())


# Rows that share what they are compared with stand together.
SWEEP = sorted(ROWS, key=lambda row: (row["model"], row["base"], row["rollback"] == "two-phase"))
MODELS = itertools.cycle(SETTINGS["model"])
EVERYDAY = [
    next(r for r in ROWS if (r["depth"], r["model"]) == pair)
    for pair in zip(SETTINGS["depth"], MODELS, strict=False)
]


def test_every_two_values_meet() -> None:
    for a, b in itertools.combinations(SETTINGS, 2):
        met = {(row[a], row[b]) for row in ROWS}
        assert met == set(itertools.product(SETTINGS[a], SETTINGS[b]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("row", EVERYDAY, ids=name_of)
def test_exact_in_small(files: Files, row: dict[str, Any]) -> None:
    check_exact(files, row, SHORT, logits=True)


@pytest.mark.parametrize("row", EVERYDAY[::3], ids=name_of)
def test_default_in_small(files: Files, row: dict[str, Any]) -> None:
    check_default(files, row, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize(("i", "row"), list(enumerate(SWEEP)), ids=map(name_of, SWEEP))
def test_exact(files: Files, i: int, row: dict[str, Any]) -> None:
    check_exact(files, row, LONG, logits=i % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("row", SWEEP, ids=name_of)
def test_default(files: Files, row: dict[str, Any]) -> None:
    farthest, leads = check_default(files, row, LONG)
    print(f"{name_of(row)}: logits move up to {farthest:.3f}, texts part at {leads}")
