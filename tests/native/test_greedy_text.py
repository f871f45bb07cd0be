"""On the patched libraries greedy text is the same at every depth, with default settings.

tests/kernels shows it of each kernel; here a session drafts, and nothing is made exact: no
`exact=True`, no other cache, no fewer rows. Where the texts agree the logits of all rows do, too,
bit for bit, so that no near tie hides what another model would show.

    pytest -m slow tests/native/test_greedy_text.py

fills contexts of 4,096 with every kind of model and type that the kernels are for.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from support.all_pairs import all_pairs
from support.greedy_texts import Work, Written
from support.llama_libraries import FAST, has_kernels, run_on
from support.models import Dial, Models

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels for x86-64 alone"),
    pytest.mark.skipif(not has_kernels(), reason="this CPU has no AVX2"),
]

MODELS = {
    "demo": "demo",
    "dense-3v": "dense-3v",
    "dense-even": "dense-tied",
    "moe": "moe-mixed",
}
# Their head is often right.
DIALS = {"dial-3v": "tiny-3v", "dial-moe": "tiny-moe", "dial-next": "tiny-next"}

SETTINGS: dict[str, list[Any]] = {
    "model": [*MODELS, *DIALS],
    "quant": ["Q4_K_M", "Q8_0", "F16", "BF16", "Q5_K_M", "IQ4_XS"],
    "flash_attn": [True, False],  # the default, and products with cached keys
}
ROWS = sorted(all_pairs(SETTINGS), key=lambda row: str(row["model"]))

DEPTHS = (*range(9), "auto")
# Texts that cross the steps of 256 and 512 in which a cache is read, and one to the context's end.
FULL = Work(DEPTHS, prompts=(9, 490, 3840), tokens=256)
FULL_LOGITS = replace(FULL, depths=(0, 1, 3, 8), logits=True)
TWO_THREADS = replace(FULL_LOGITS, depths=(0, 2, 5), threads=2)  # wait for each other: slower

SMALL = Work((0, 1, 3, 8, "auto"), prompts=(9, 240, 490), tokens=48, n_ctx=768)
SMALL_LOGITS = replace(SMALL, depths=(0, 2, 7), logits=True)


def file_of(row: dict[str, Any], models: Any, dial: Any) -> Path:
    name, quant = row["model"], row["quant"]
    path: Path
    if name in DIALS:
        path = dial(DIALS[name], quant=quant)
    else:
        path = models.gguf(MODELS[name], quant, "F16")
    return path


def write(model: Path, work: Work, **environment: str) -> list[Written]:
    """What the process of greedy_texts.py has written, by depth."""
    said = run_on(FAST, "greedy_texts", model, json.dumps(asdict(work)), timeout=900, **environment)
    return [Written(**depth) for depth in json.loads(said)]


def check(model: Path, row: dict[str, Any], *works: Work) -> None:
    for work in works:
        given = replace(work, options={"flash_attn": row["flash_attn"]})
        plain, *drafted = write(model, given)
        assert [len(text) for text in plain.texts] == [work.tokens] * len(work.prompts)
        for depth, found in zip(work.depths[1:], drafted, strict=True):
            assert found.texts == plain.texts, depth
            assert found.logits == plain.logits, depth
            if row["model"] in ("demo", *DIALS) and depth != "auto":
                assert found.tokens_per_cycle > 1.3


def name_of(row: dict[str, Any]) -> str:
    return "-".join(str(value) for value in row.values())


EVERYDAY = [
    {"model": "demo", "quant": "Q4_K_M", "flash_attn": False},
    {"model": "dial-moe", "quant": "F16", "flash_attn": False},
    {"model": "dial-3v", "quant": "Q8_0", "flash_attn": True},
    {"model": "dial-next", "quant": "Q4_K_M", "flash_attn": True},
    {"model": "dense-even", "quant": "BF16", "flash_attn": False},
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("row", EVERYDAY, ids=name_of)
def test_every_depth_writes_the_same(models: Models, dial: Dial, row: dict[str, Any]) -> None:
    check(file_of(row, models, dial), row, SMALL, SMALL_LOGITS)


def test_two_threads_write_the_same(models: Models, dial: Dial) -> None:
    """Few tokens: threads wait for each other, long where other programs run."""
    row = EVERYDAY[0]
    work = replace(TWO_THREADS, depths=(0, 3), prompts=(40,), tokens=8)
    check(file_of(row, models, dial), row, work)


def test_a_busy_machine_writes_the_same(models: Models, dial: Dial) -> None:
    """Threads sleep at nearly every barrier. One that waits in vain ends in a timeout."""
    path = file_of(EVERYDAY[0], models, dial)
    work = Work((0, 3), prompts=(40,), tokens=8, threads=2, n_ctx=768, logits=True)
    assert write(path, replace(work, busy=(os.cpu_count() or 1) + 10)) == write(path, work)


def test_the_digests_see_rounding(models: Models) -> None:
    """Without the kernels rows of several tokens are rounded in another way than a row alone."""
    path = models.gguf("demo", "F16", "F16")
    plain, drafted, _ = write(path, SMALL_LOGITS, MTP_GGUF_KERNELS="0")
    assert plain.logits != drafted.logits


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_depth_writes_the_same_to_4096(
    models: Models, dial: Dial, row: dict[str, Any]
) -> None:
    check(file_of(row, models, dial), row, FULL, FULL_LOGITS)


@pytest.mark.slow
@pytest.mark.parametrize("quant", SETTINGS["quant"])
def test_two_threads_write_the_same_to_4096(models: Models, dial: Dial, quant: str) -> None:
    row = {"model": "demo", "quant": quant, "flash_attn": quant in ("Q4_K_M", "F16")}
    check(file_of(row, models, dial), row, TWO_THREADS)
