"""The convolution in front of a gated delta net: its inputs joined, its windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from support.kernels.results import Sweep

ERROR = 4 * 2.0**-23  # of a sum of four products, relative to their size


@pytest.mark.thorough
def test_arrays_are_joined_along_any_axis(sweep: Sweep) -> None:
    found = sweep("")
    cases = [key.removeprefix("join/") for key in found if key.startswith("join/")]
    assert len(cases) == 48
    for case in cases:
        for way in found[f"join/{case}"]:
            np.testing.assert_array_equal(way, found[f"joined/{case}"], err_msg=case)


def test_a_token_is_convolved_alike_alone_and_in_any_batch(sweep: Sweep) -> None:
    found = sweep("")
    cases = [key for key in found if key.startswith("convolution/")]
    assert len(cases) == 2 * 3 * 17
    for case in cases:
        _, name, _, batch = case.split("/")
        alone = found[f"convolution/{name}/1/1"]
        tokens = int(batch) if int(batch) > 1 else alone.shape[1]
        np.testing.assert_array_equal(found[case], alone[:, :tokens], err_msg=case)


def test_convolutions_are_those_of_numpy(sweep: Sweep) -> None:
    found = sweep("")
    for name in (f"{taps} {channels}" for taps in (3, 4) for channels in (1, 50, 1003)):
        expected = found[f"convolved/{name}"]
        size = np.abs(expected).max()
        assert np.abs(found[f"convolution/{name}/1/1"] - expected).max() <= ERROR * size, name
