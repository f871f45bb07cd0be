"""The patched libraries predict a text as well as the stock ones do.

The demo model reads what it was not trained on, one token at a time, four and a window at a time;
the kernels for few tokens are in the first two. Differences are of each token's loss, in nats.

    pytest -m slow -s tests/native/test_perplexity.py

prints the table of docs/verification.md.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import numpy as np
import pytest

from support.held_out_loss import Floats
from support.llama_libraries import FAST, STOCK, run_on, skip_where_stock_crashes
from support.models import Models

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels for x86-64 alone")

# A mean difference of no more standard errors, and tokens that move by no more than so many times
# what they move by in stock libraries, where those read one token and where a window at a time.
MAX_ERRORS = 4.0
MAX_MOVE = 2.0

Losses = dict[int, Floats]  # [windows, tokens] by the size of batch


def losses(
    libraries: str, model: Path, folder: Path, windows: int, length: int, kernels: str = "0"
) -> Losses:
    """What the process of held_out_loss.py has found; kernels: those that are plugged in."""
    out = folder / "losses.npz"
    work = {"windows": windows, "length": length, "batches": [1, 4, length]}
    words = (model, out, json.dumps(work))
    run_on(libraries, "held_out_loss", *words, timeout=900, MTP_GGUF_KERNELS=kernels)
    with np.load(out) as found:
        return {int(size): found[size] for size in found}


def rms(differences: Floats) -> float:
    return float(np.sqrt(np.square(differences).mean()))


def mean_and_error(differences: Floats) -> tuple[float, float]:
    """The mean and its standard error: tokens of a window depend on each other, windows do not."""
    of_windows = differences.mean(axis=1)
    return float(of_windows.mean()), float(of_windows.std(ddof=1) / np.sqrt(len(of_windows)))


def as_good(stock: Losses, other: Losses) -> bool:
    """Whether these losses differ from those of the stock libraries by rounding alone."""
    noise = rms(stock[max(stock)] - stock[1])
    assert noise > 0
    for size, wanted in stock.items():
        mean, error = mean_and_error(other[size] - wanted)
        moved = rms(other[size] - wanted)
        print(
            f"batches of {size}: {wanted.mean():.5f} and {other[size].mean():.5f},"
            f" {mean:+.5f} ± {error:.5f}; a token moves by {moved:.4f} ({noise:.4f})"
        )
        if abs(mean) > MAX_ERRORS * error or moved > MAX_MOVE * noise:
            return False
    return True


@pytest.mark.slow
def test_the_bounds_tell_fewer_bits_from_rounding(models: Models, tmp_path: Path) -> None:
    """On the same libraries: the bounds are near enough to see four bits in place of five."""
    skip_where_stock_crashes(models.gguf("demo", "Q4_K_M", "F16"))
    five, four = (
        losses(STOCK, models.gguf("demo", quant, "F16"), tmp_path, 6, 256)
        for quant in ("Q5_K_M", "Q4_K_M")
    )
    assert not as_good(five, four)


@pytest.mark.parametrize(
    ("quant", "windows", "length"),
    [
        pytest.param("Q4_K_M", 6, 256, marks=pytest.mark.thorough),
        *(
            pytest.param(quant, 40, 512, marks=pytest.mark.slow)
            for quant in ("Q4_K_M", "Q8_0", "F16", "BF16")
        ),
    ],
)
def test_the_loss_is_that_of_the_stock_libraries(
    models: Models, tmp_path: Path, quant: str, windows: int, length: int
) -> None:
    path = models.gguf("demo", quant, "F16")
    skip_where_stock_crashes(path)
    stock = losses(STOCK, path, tmp_path, windows, length)
    patched = losses(FAST, path, tmp_path, windows, length, kernels="")
    plugged = losses(STOCK, path, tmp_path, windows, length, kernels="")
    for name, found in {"patched": patched, "plugged in": plugged}.items():
        print(f"\n{quant}, {stock[1].size} tokens, stock and {name}:")
        assert as_good(stock, found)
        assert np.array_equal(found[1], found[4])
