"""Opening and closing sessions repeatedly does not leak memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from mtp_gguf.native.errors import NativeError
from mtp_gguf.native.head import Head
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Session
from support.gguf_files import Rewrite
from support.models import Dial
from support.native_trunk import Trunk

STATUS = Path("/proc/self/statm")
SLACK = 3 << 20  # the allocator's; a session and head of the tiny model hold 1 MiB each


def resident() -> int:
    gc.collect()
    return int(STATUS.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not STATUS.exists(), reason="no /proc here")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer keeps what is freed")
@pytest.mark.parametrize("times", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_sessions_leave_nothing_behind(dial: Dial, rewrite: Rewrite, times: int) -> None:
    path = dial("tiny")
    broken = rewrite(path, tensors={"blk.4.attn_q.weight": None})
    trunk = Trunk(path, 3)
    n_ctx = llama_cpp.llama_n_ctx_seq(trunk.context)

    def once() -> None:
        with (
            Head(path, n_ctx=n_ctx, n_threads=1) as head,
            Session(trunk.context, head, max_depth=3) as session,
        ):
            session.decode([1, 2, 3])
            session.step(4)
            session.remove(0)
        with pytest.raises(NativeError):
            Head(broken)

    for _ in range(15):
        once()
    before = resident()
    for _ in range(times):
        once()
    assert resident() - before < SLACK
    trunk.close()
