"""The weighted sum of the outputs of a token's experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from support.kernels.results import Sweep


def test_a_weighted_sum_has_the_bits_of_its_products_and_sums_in_order(sweep: Sweep) -> None:
    found = sweep("")
    cases = [key for key in found if key.startswith("weighted sum/")]
    assert len(cases) == 6 * 3 * 3 * 3
    for case in cases:
        expected = found["sum of experts/" + case.split("/")[1]]
        np.testing.assert_array_equal(found[case], expected, err_msg=case)
