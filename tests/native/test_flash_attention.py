"""Flash attention is on where the loaded libraries compute it fast, unless the caller chooses."""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest

from support.llama_libraries import FAST, STOCK, answer
from support.models import Models

Q8_0 = 8  # ggml's number
# Prints whether MTPLlama has it on with a model and these options.
PROGRAM = """
import json, sys
from mtp_gguf.native import MTPLlama
from mtp_gguf.native.runtime import llama_cpp
with MTPLlama(sys.argv[1], depth=0, n_ctx=256, profile=False, **json.loads(sys.argv[2])) as llm:
    kind = llm.context_params.flash_attn_type
print(json.dumps(kind == llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED))
"""


@pytest.mark.sample(2)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels for x86-64 alone")
@pytest.mark.parametrize(
    ("lanes", "options", "on"),
    [
        ("", {}, True),
        ("", {"flash_attn": False}, False),
        ("", {"type_k": Q8_0, "type_v": Q8_0}, True),
        ("0", {}, False),
        ("0", {"flash_attn": True}, True),
    ],
)
def test_on_the_patched_libraries(
    models: Models, lanes: str, options: dict[str, Any], on: bool
) -> None:
    chosen = {"MTP_GGUF_KERNELS": lanes} if lanes else {}
    words = (models.gguf("dense-tied"), json.dumps(options))
    assert answer(FAST, PROGRAM, *words, **chosen) is on


@pytest.mark.parametrize(("kernels", "on"), [("0", False), ("", platform.machine() == "x86_64")])
def test_on_the_stock_libraries(models: Models, kernels: str, on: bool) -> None:
    """With our kernels plugged in or not."""
    words = (models.gguf("dense-tied"), "{}")
    assert answer(STOCK, PROGRAM, *words, MTP_GGUF_KERNELS=kernels) is on
