"""States that stay in the memory instead of being copied, in unpatched libraries."""

from __future__ import annotations

import json
import sys

import pytest

from mtp_gguf.native.runtime import native_library
from support import llama_libraries
from support.llama_libraries import STOCK, stock_libraries

REPEATS = 6  # of each case
COPIED = {"kept", "read", "written"}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such library")


@pytest.fixture(scope="module")
def found(has_kernels: bool) -> dict[str, tuple[int, bool]]:
    if not has_kernels:
        pytest.skip("this CPU has no AVX2, or no dot products")
    words = (stock_libraries(), native_library("mtp_kernels"))
    printed = llama_libraries.run_on(STOCK, "kernels.states", *words, timeout=300)
    cases, left_to_ggml = json.loads(printed.splitlines()[-1])
    assert left_to_ggml == []
    return {name: (left, same) for name, (left, same) in cases.items()}


def test_all_bits_are_those_of_copied_states(found: dict[str, tuple[int, bool]]) -> None:
    assert {name for name, (_, same) in found.items() if not same} == set()


def test_states_are_copied_only_where_something_else_needs_them(
    found: dict[str, tuple[int, bool]],
) -> None:
    del found["threads"]
    expected = {name: 0 if name in COPIED else REPEATS for name in found}
    assert {name: left for name, (left, _) in found.items()} == expected
