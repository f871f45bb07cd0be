"""Each architecture that our runtime drafts with: drafts, text, acceptance, states, draft lists.

The files are synthetic (`upstream.nextn_models`): with random weights, or with weights that fix the
text and the acceptance rate (benchmarks/dial_model.py). Lists of all four: python -m pytest -m slow
THIS_FILE
"""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from mtp_gguf.gguf_tools.nextn import OUR_ARCHITECTURES
from mtp_gguf.native import Checkpoint, CheckpointKind, MTPLlama, Session
from mtp_gguf.native.head import Head
from support.commands import succeed
from support.models import Dial
from support.native_trunk import opened_session
from support.upstream.llama_mtp import LlamaMtp
from support.upstream.nextn_models import TOKENS, write_models

every = pytest.mark.parametrize("name", OUR_ARCHITECTURES)

PROMPT = [int(t) for t in np.random.PCG64(2).random_raw(20) % np.uint64(TOKENS)]
LENGTH = 60
HIT = 0.7
# Of logits with a standard deviation of 1; see TOLERANCE in surgery/test_glm.py.
TOLERANCE = 0.01
MODES = ["snapshot", "checkpoint", "two-phase", "host"]


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("random"), OUR_ARCHITECTURES)


def modes(name: str) -> list[str]:
    """The rollbacks of a CPU; llama.cpp keeps no snapshots of Qwen3-Next's states."""
    return [mode for mode in MODES if (name, mode) != ("qwen3next", "snapshot")]


@every
def test_drafts_equal_llama_cpps(name: str, random: dict[str, Path]) -> None:
    with LlamaMtp(random[name]) as upstream, Head(random[name], n_threads=1) as head:
        hidden = upstream.trunk(PROMPT[:-1])[1]
        rows = np.concatenate([np.zeros((1, hidden.shape[1])), hidden]).astype(np.float32)
        draft = head.draft(PROMPT, rows, 0, 4, logits=True)
        want = upstream.draft(PROMPT, hidden, 4, follow=draft.tokens)[1]
    assert draft.logits is not None
    assert np.abs(draft.logits - want).max() < TOLERANCE


@every
def test_the_text_is_the_same(name: str, random: dict[str, Path]) -> None:
    texts = []
    for depth in (0, 3):
        with closing(MTPLlama(str(random[name]), depth=depth, n_ctx=256, n_threads=1)) as llm:
            texts.append(list(islice(llm.generate(PROMPT, temp=0.0), LENGTH)))
            assert (sum(llm.mtp_stats.drafted) > 0) == (depth > 0)
    assert texts[0] == texts[1]


@every
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_acceptance_is_the_heads(name: str, depth: int, dial: Dial) -> None:
    """The text is known, and after which tokens the head is right."""
    path = dial.gguf(name, HIT)
    following, missed = dial.gguf_marks(HIT)
    for mode in modes(name):
        with opened_session(path, mode, depth) as (session, _):
            session.decode(PROMPT)
            token = session.argmax()
            for _ in range(LENGTH // 2):
                accepted, last = 0, token
                while accepted < depth and not missed[last]:
                    accepted, last = accepted + 1, following[last]
                new = session.step(token, depth)
                assert len(new) == accepted + 1
                for found in new:
                    assert found == following[token]
                    token = found


def go_on(session: Session, token: int, n: int, seq: int = 0) -> list[list[int]]:
    """The tokens of each of n cycles."""
    cycles: list[list[int]] = []
    for _ in range(n):
        cycles.append(session.step(token, 3, seq))
        token = cycles[-1][-1]
    return cycles


@every
@pytest.mark.parametrize("streams", [1, 2])
def test_whole_states(name: str, streams: int, dial: Dial) -> None:
    """Their layout depends on the model's positions and on what has a recurrent state."""
    path = dial.gguf(name, HIT)
    with opened_session(path, "checkpoint", 3, n_seq_max=streams) as (session, trunk):
        session.decode(PROMPT)
        token = go_on(session, session.argmax(), 3)[-1][-1]
        with session.save(CheckpointKind.WHOLE) as saved:
            data = saved.to_bytes()
        if streams > 1:
            session.copy(0, 1)
            with session.save(CheckpointKind.WHOLE, 1) as saved:
                data = saved.to_bytes()
        want = go_on(session, token, 8)
        session.decode([want[-1][-1]])
        logits = trunk.logits()
        if streams > 1:
            assert go_on(session, token, 8, 1) == want
            session.decode([want[-1][-1]], 1)
            assert np.array_equal(trunk.logits(), logits)
    with (
        opened_session(path, "checkpoint", 3, n_seq_max=3 - streams) as (session, trunk),
        Checkpoint.from_bytes(data) as saved,
    ):
        for _ in range(2):
            session.restore(saved)
            assert go_on(session, token, 8) == want
            session.decode([want[-1][-1]])
            assert np.array_equal(trunk.logits(), logits)


@pytest.mark.parametrize("layout", ["ids", "table", "sidecar"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name.startswith("qwen35") else name
        for name in OUR_ARCHITECTURES
    ],
)
def test_draft_vocabularies(name: str, layout: str, dial: Dial, tmp_path: Path) -> None:
    """A list of half of the tokens: those are drafted as ever, others never."""
    following, missed = dial.gguf_marks(HIT)
    ids = tmp_path / "ids.json"
    wrong = following[next(iter(following))]  # what the head drafts where it is wrong
    listed = sorted({wrong, *(t for i, t in enumerate(following.values()) if i % 2)})
    ids.write_text(json.dumps(listed[::-1]))
    path = dial.gguf(name, HIT)
    out = tmp_path / "listed.gguf"
    succeed("fastmtp", "add", path, "--ids", ids, "--layout", layout, "-o", out)
    model, mtp_head = (path, str(out)) if layout == "sidecar" else (out, None)
    with Head(out, n_threads=1) as head:
        assert head.layout == layout
        draftable = {*head.draft_ids().tolist()}
    assert {*listed} <= draftable < {*range(TOKENS)}
    options = {"depth": 1, "mtp_head": mtp_head, "n_ctx": 256, "n_threads": 1}
    with closing(MTPLlama(str(model), **options)) as llm:
        text = list(islice(llm.generate(PROMPT, temp=0.0), LENGTH))
        accepted = sum(llm.mtp_stats.accepted)
    assert text[1:] == [following[token] for token in text[:-1]]
    pairs = list(itertools.pairwise(text))
    right = {b for a, b in pairs if not missed[a] and b in draftable}
    assert 0 < accepted <= sum(b in right for _, b in pairs)
