"""The hidden states that a session hands out: those that the head is fed with."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from mtp_gguf.native.errors import NativeError
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Session
from support.generation import random_tokens
from support.models import Models
from support.native_trunk import Trunk, opened_session

TOKENS = random_tokens(90, 5, 900)
# The states have a standard deviation of 1. Measured: 2e-3 (the trunk's F16 KV cache); the state of
# a wrong position, or before the final norm, shows as 0.5 or more.
TOLERANCE = 0.02


@pytest.mark.parametrize("spec", ["dense-tied", "moe-fused"])
def test_states_equal_the_reference(models: Models, spec: str) -> None:
    want = models.reference(spec).trunk(TOKENS)[1]
    path = models.gguf(spec)
    with closing(Trunk(path, 0)) as trunk, Session(trunk.context, None, max_depth=0) as session:
        session.want_hidden()
        session.decode(TOKENS[:40])
        first = session.hidden(40)
        session.decode(TOKENS[40:41])
        one = session.hidden(1)
        session.decode(TOKENS[41:81])
        last = session.hidden(3)
    assert np.abs(first - want[:40]).max() < TOLERANCE
    assert np.abs(one - want[40]).max() < TOLERANCE
    assert np.abs(last - want[78:81]).max() < TOLERANCE


def test_states_that_are_not_there(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_session(models.gguf(), "snapshot", 2) as (session, _):
        session.decode(TOKENS[:4])
        with pytest.raises(NativeError, match=r"expected 1 to 0, .* found 1"):
            session.hidden(1)
        session.want_hidden()
        session.decode(TOKENS[4:74])  # two batches: 64 tokens and 6
        with pytest.raises(NativeError, match=r"expected 1 to 6, .* found 7"):
            session.hidden(7)
        assert session.hidden(6).shape == (6, 256)
        token = session.argmax()
        session.step(token)
        with pytest.raises(NativeError, match=r"expected 1 to 0"):
            session.hidden(1)
    monkeypatch.setattr(llama_cpp, "llama_get_model", None)  # would read the freed context
    with pytest.raises(NativeError, match="the session is closed"):
        session.hidden(1)
