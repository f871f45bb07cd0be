"""Embeddings of a type that a device cannot read rows of, which some GPUs cannot of NVFP4."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import places, preloading
from support.commands import run_python
from support.models import Models

# What MTPLlama and Head say, and whether MTPLlama began to load the trunk.
PROGRAM = """
import sys
from functools import wraps
import numpy as np
from mtp_gguf.native import Head, MTPLlama
from mtp_gguf.native.errors import NativeError
from mtp_gguf.native.head import check_head
from mtp_gguf.native.runtime import llama_cpp

path, device, size = sys.argv[1], sys.argv[2], int(sys.argv[3])

def tell(name, call):
    try:
        print(f"{name}: {call()}")
    except NativeError as error:
        print(f"{name}: error: {error}")

def draft():
    with Head(path, device=device, fastmtp_size=size) as head:
        return head.draft([5, 6], np.ones((2, head.n_embd)), 0, 3).tokens

def load():
    MTPLlama(path, depth=2, n_gpu_layers=99, mtp_device=device, fastmtp_size=size).close()
    return "done"

tell("check", lambda: check_head(path, trunk=None, device=device, fastmtp_size=size))
tell("draft", draft)
if device != "CPU" and size < 0:  # a trunk that is loaded would need a device that can
    whole = llama_cpp.Llama.__init__
    @wraps(whole)
    def tells(*args, **options):
        print("loading the trunk")
        whole(*args, **options)
    llama_cpp.Llama.__init__ = tells
    tell("load", load)
"""


@pytest.fixture(scope="module")
def without_gather(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preloading.build("without_gather", tmp_path_factory.mktemp("library"))


def said(path: Path, size: int, **environment: str) -> dict[str, str]:
    """What the program prints, by the beginning of the line."""
    device = places.current().head
    text = run_python(PROGRAM, path, device, size, env={**os.environ, **environment})
    parts = [line.partition(": ") for line in text.splitlines()]
    return {name: said for name, _, said in parts}


@places.everywhere
def test_what_cannot_be_gathered_is_said_before_the_trunk_is_loaded(
    models: Models, without_gather: Path
) -> None:
    path = models.gguf("dense-untied", "Q8_0", "F16", layout="ids")
    device = places.current().head
    found = said(path, -1, LD_PRELOAD=str(without_gather))
    text = rf"error: token_embd.weight: expected a type whose rows {device} can read, found q8_0; "
    assert all(line.startswith(text) for line in found.values())
    assert set(found) == {"check", "draft"} | ({"load"} if device != "CPU" else set())


@places.everywhere
def test_rows_of_a_draft_vocabulary_are_converted_for_such_a_device(
    models: Models, without_gather: Path
) -> None:
    path = models.gguf("dense-untied", "Q8_0", "F16", layout="ids")
    found = said(path, 0, LD_PRELOAD=str(without_gather))
    assert found == said(path, 0)
    assert found["check"] == "None"
