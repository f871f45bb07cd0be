"""The results of the kernels' sweep by name, and the comparisons that tests make with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

Arrays = dict[str, Any]

# SHA-256 of sweep.golden's products
GOLDEN = {
    "Q4_K": "33d9d47543a27869553c5d1e8a7fb904dc5c0613e6bcefebbb38b5ee14d2555c",
    "Q5_K": "fb84856fd3f02f10755e4c14c941f4a3090be12b59632df1c0d59df6f24beda2",
    "Q6_K": "06709346750b3290473246f93926a05ed8e06707bc2b6ca73c8f114ed2e45340",
    "IQ4_XS": "6fd6d32c6ca35ee20508da305e8bd40651e2cd0add337223bbaf34a3e7e9d943",
    "NVFP4": "14c14ecc60763847582da3fedfed94ac2eb8206872c049faeb3db21b2a7334e4",
    "Q2_0": "e3045de9cce26a98ab56da70ea7b5cfd1139c669b2bf4b755a0400943c86cd7a",
}
MAX_NMSE = 5e-4  # max_nmse_err of MUL_MAT in ggml's tests/test-backend-ops.cpp
SMALL = 15  # columns up to which all types keep their bits, not only those of "exact"
ANY = ("attention", "recurrence")  # which keep them in any batch


class Sweep(Protocol):
    """Runs the sweep with a value of MTP_GGUF_KERNELS, each once."""

    def __call__(self, lanes: str) -> Arrays:
        """What it computed, by name; empty leaves the variable unset, "0" is for none."""


class MakeSweep(Protocol):
    """Makes a Sweep on libraries without patches, with our kernels plugged in."""

    def __call__(self, libraries: Path) -> Sweep:
        """Sweep on the libraries of this folder."""


def cases(found: Arrays, kind: str) -> Iterator[tuple[str, int, str]]:
    """Name, number of columns and key of every result of a kind."""
    for key in found:
        first, *rest = key.split("/")
        if first == kind and kind != "weights":
            name, _, batch = rest
            yield name, int(batch), key


def differing(found: Arrays, kind: str) -> list[str]:
    """Return the results with columns that differ from those computed alone."""
    wrong = []
    for name, batch, key in cases(found, kind):
        alone = found[f"{kind}/{name}/1/1"][: len(found[key])]
        exact = batch <= SMALL or kind in ANY or name.split()[0] in found["exact"]
        if exact and found[key].tobytes() != alone.tobytes():
            wrong.append(key)
    return wrong


def check_strided_rows(found: Arrays) -> None:
    """Products with every other row of a matrix are those of the whole one."""
    keys = [key for _, _, key in cases(found, "apart")]
    assert len(keys) > 40
    for key in keys:
        whole = found[key.replace("apart/", "product/").rsplit("/", 2)[0] + "/1/1"]
        n, half = found[key].shape
        assert found[key].tobytes() == whole[:n, : 2 * half : 2].tobytes(), key
