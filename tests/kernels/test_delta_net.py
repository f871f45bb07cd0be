"""The gated delta net: a token's result is independent of the rest of the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtp_gguf.native.runtime import native_library
from support import llama_libraries


def test_batches_have_the_bits_of_single_tokens_and_those_are_near_float64(
    libraries: Path,
) -> None:
    words = (libraries, native_library("mtp_kernels"))
    output = llama_libraries.run_on(libraries, "kernels.delta_net", *words, timeout=300)
    results: dict[str, Any] = json.loads(output)
    assert results["compared"] > 500
    assert results["other_bits"] == []
    assert results["inexact"] == []
