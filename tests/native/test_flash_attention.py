"""Flash attention is on where the loaded libraries compute it fast, unless the caller chooses."""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest

from support.llama_libraries import FAST, STOCK, run_on
from support.models import Models

Q8_0 = 8  # ggml's number


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
    said = run_on(
        FAST,
        "flash_attention",
        models.gguf("dense-tied"),
        json.dumps(options),
        timeout=60,
        **({"MTP_GGUF_KERNELS": lanes} if lanes else {}),
    )
    assert json.loads(said) == on


@pytest.mark.parametrize(("kernels", "on"), [("0", False), ("", platform.machine() == "x86_64")])
def test_on_the_stock_libraries(models: Models, kernels: str, on: bool) -> None:
    """With our kernels plugged in or not."""
    words = (models.gguf("dense-tied"), "{}")
    said = run_on(STOCK, "flash_attention", *words, timeout=60, MTP_GGUF_KERNELS=kernels)
    assert json.loads(said) is on
