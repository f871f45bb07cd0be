"""The gated delta net (patches/0020): a token's result is independent of the rest of the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support import llama_libraries


def test_batches_have_the_bits_of_single_tokens_and_those_are_near_float64(
    libraries: Path,
) -> None:
    output = llama_libraries.run_on(libraries, "kernels.delta_net", libraries, timeout=300)
    results: dict[str, Any] = json.loads(output)
    assert results["compared"] > 500
    assert results["other_bits"] == []
    assert results["inexact"] == []
