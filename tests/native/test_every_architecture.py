"""Each architecture that our runtime drafts with: drafts, text, acceptance, states, draft lists.

The files are synthetic (`upstream.nextn_models`): with random weights, or with weights that fix the
text and the acceptance rate (benchmarks/dial_model.py). Lists of all: python -m pytest -m slow
THIS_FILE
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.gguf_tools.heads.nextn import BLOCKS, OUR_ARCHITECTURES
from mtp_gguf.native import Checkpoint, CheckpointKind, MTPLlama, NativeError, Session
from mtp_gguf.native.head import Draft, Head, SequenceTask
from mtp_gguf.native.sessions.session_file import read_header
from support import places
from support.commands import succeed
from support.generation import load, random_tokens, take
from support.models import Dial
from support.native_trunk import MODES, opened_session
from support.upstream.llama_mtp import LlamaMtp
from support.upstream.nextn_models import LAYERS, TOKENS, write_models

every = pytest.mark.parametrize("name", OUR_ARCHITECTURES)

PROMPT = random_tokens(20, 2, TOKENS)
LENGTH = 60
HIT = 0.7
# Of logits with a standard deviation of 1; see TOLERANCE in gguf_tools/test_glm.py.
TOLERANCE = 0.01
# Step 3.5 with a cache of its sliding windows.
WINDOW = {"n_ctx": 1024, "n_batch": 64, "depth": 3, "swa_full": False}


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("random"), OUR_ARCHITECTURES)


def modes(name: str) -> list[str]:
    """The rollbacks of a CPU; llama.cpp keeps no snapshots of Qwen3-Next's states."""
    return [mode for mode in MODES if (name, mode) != ("qwen3next", "snapshot")]


@every
@pytest.mark.parametrize("length", [2, len(PROMPT)])
def test_drafts_equal_llama_cpps(name: str, length: int, random: dict[str, Path]) -> None:
    """After a short text, each drafted token matters to the next one."""
    tokens = PROMPT[:length]
    with LlamaMtp(random[name]) as upstream, Head(random[name], n_threads=1) as head:
        hidden = upstream.trunk(tokens[:-1])[1]
        rows = np.concatenate([np.zeros((1, hidden.shape[1])), hidden]).astype(np.float32)
        depth = LAYERS.get(name, 4)
        draft = head.draft(tokens, rows, 0, depth, logits=True)
        want = upstream.draft(tokens, hidden, depth, follow=draft.tokens)[1]
    assert draft.logits is not None
    assert np.abs(draft.logits - want).max() < TOLERANCE


@every
def test_the_text_is_the_same(name: str, random: dict[str, Path]) -> None:
    texts = []
    for depth in (0, 3):
        with load(random[name], depth=depth) as llm:
            texts.append(take(llm, LENGTH, PROMPT))
            assert (sum(llm.mtp_stats.drafted) > 0) == (depth > 0)
    assert texts[0] == texts[1]


@pytest.mark.sample(5)
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


def generate(llm: MTPLlama, prompt: list[int], **sampling: float) -> tuple[Any, ...]:
    """The tokens that follow a prompt, how they were drafted, and how many tokens were read."""
    llm.session.reset_stats()
    tokens = take(llm, 24, prompt, **sampling)
    did = llm.mtp_stats
    return tokens, did.drafted, did.accepted, did.cycles, did.prefilled


@pytest.mark.parametrize(
    ("name", "swa_full"), [*((name, True) for name in OUR_ARCHITECTURES), ("step35", False)]
)
@pytest.mark.parametrize("sampling", [{"temp": 0.0}, {"temp": 6.0, "top_k": 8, "min_p": 0.0}])
@pytest.mark.parametrize("kind", ["random", "dial"])
def test_session_files(
    name: str,
    kind: str,
    swa_full: bool,
    sampling: dict[str, float],
    random: dict[str, Path],
    dial: Dial,
    tmp_path: Path,
) -> None:
    """A loaded session generates, drafts and accepts what one does that was not interrupted.

    Without swa_full, Step 3.5 has a cache of its sliding windows.
    """
    path = random[name] if kind == "random" else dial.gguf(name, HIT)
    options = {"depth": 3, "seed": 5, "swa_full": swa_full}
    with load(path, **options) as llm:
        tokens = generate(llm, PROMPT, **sampling)[0]
        follow = [*PROMPT, *tokens, 5, 6, 7]
        read = len(follow) - llm.n_tokens
        llm.save_session(tmp_path / "a.session")
        want = generate(llm, follow, **sampling)
    with load(path, **options) as llm:
        llm.load_session(tmp_path / "a.session")
        assert generate(llm, follow, **sampling) == want
    assert want[-1] == read < 8
    if kind == "dial" and sampling["temp"] == 0:
        assert sum(want[2]) > 0


def test_a_folder_of_sessions_of_a_window(random: dict[str, Path], tmp_path: Path) -> None:
    """Layers with a window go on from the end of a session only, so a prompt's end gets its own."""
    prompt, other = (random_tokens(500, seed, TOKENS) for seed in (4, 5))
    follow = [*prompt, 1, 2, 3]
    with load(random["step35"], **WINDOW) as llm:
        want = take(llm, 24, follow)
    with load(random["step35"], session_dir=tmp_path, **WINDOW) as llm:
        take(llm, 24, prompt)
        take(llm, 24, other)
        lengths = sorted(read_header(file).n_tokens for file in tmp_path.glob("*.session"))
        assert lengths[0] == 500 - 64
        assert lengths[1] > 500
        found = generate(llm, follow)
    assert (found[0], found[-1]) == (want, 64 + 3)


@every
def test_memory(name: str, random: dict[str, Path]) -> None:
    """What doctor says of the cache; the blocks have embeddings and outputs of their own."""
    said = json.loads(succeed("doctor", random[name], "--json", "--context", "700"))["memory"]
    with Head(random[name], n_ctx=768) as head:
        assert head.cache_bytes == said["cache"]
        assert head.weight_bytes + head.mapped_bytes == pytest.approx(said["head"], rel=0.01)


# Several layers may have several outputs: their lists are ids.
LISTS = [
    (name, layout)
    for name, layout in itertools.product(OUR_ARCHITECTURES, ("ids", "table", "sidecar"))
    if layout == "ids" or BLOCKS[name].single
]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*case, marks=pytest.mark.slow) if case[0].startswith("qwen35") else case
        for case in LISTS
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
    with load(model, depth=1, mtp_head=mtp_head) as llm:
        text = take(llm, LENGTH, PROMPT)
        accepted = sum(llm.mtp_stats.accepted)
    assert text[1:] == [following[token] for token in text[:-1]]
    pairs = list(itertools.pairwise(text))
    right = {b for a, b in pairs if not missed[a] and b in draftable}
    assert 0 < accepted <= sum(b in right for _, b in pairs)


@pytest.mark.parametrize(("name", "layout"), LISTS)
def test_a_list_has_the_rows_of_the_blocks_own_output(
    name: str, layout: str, random: dict[str, Path], tmp_path: Path
) -> None:
    """These blocks have an output that is not the model's; of several, each has its own."""
    states = np.random.default_rng(1).standard_normal((len(PROMPT), 64), np.float32)
    depth = LAYERS.get(name, 3)

    def draft(path: Path) -> tuple[Draft, list[int]]:
        with Head(path, n_threads=1) as head:
            return head.draft(PROMPT, states, 1, depth, logits=True), head.draft_ids().tolist()

    whole, _ = draft(random[name])
    (tmp_path / "ids.json").write_text(json.dumps([*{*whole.tokens, *range(1, TOKENS, 2)}]))
    options = ("--ids", tmp_path / "ids.json", "--layout", layout, "-o", tmp_path / "x.gguf")
    succeed("fastmtp", "add", random[name], *options)
    listed, ids = draft(tmp_path / "x.gguf")
    assert listed.tokens == whole.tokens
    assert listed.logits is not None
    assert whole.logits is not None
    assert np.abs(listed.logits - whole.logits[:, ids]).max() < 1e-5


# ------------------------------------------------------------------------- three chained layers


def test_the_depth_is_limited_to_the_layers(random: dict[str, Path]) -> None:
    path = random["step35"]
    with Head(path, n_threads=1) as head:
        assert head.max_depth == 3
        states = np.zeros((1, head.n_embd))
        with pytest.raises(NativeError, match=r"depth .*: expected 1 to 3, found 4"):
            head.draft([1], states, 1, 4)
    with opened_session(path, "checkpoint", 5) as (session, _):
        session.decode(PROMPT)
        assert len(session.begin(session.argmax(), 5)) == 3
        session.end(0)
    with (
        pytest.warns(UserWarning, match="expected at most 3, the number of the head's layers"),
        load(path, depth=5) as llm,
    ):
        assert (llm.depth, llm.max_depth) == (3, 3)
    with load(path, max_depth=8) as llm:
        assert (llm.depth, llm.max_depth) == ("auto", 3)


@places.everywhere
def test_each_layer_has_rows_of_its_own(random: dict[str, Path], place: places.Place) -> None:
    """Drafts at any depth, rollbacks, a shared graph and copied rows leave those of all right."""
    atol = 1e-5 if place == places.CPU else 1e-3
    with Head(random["step35"], device=place.head, n_threads=1, n_seq_max=4) as head:
        tokens = [*PROMPT, *PROMPT[::-1]]
        states = np.random.default_rng(1).standard_normal((len(tokens), head.n_embd), np.float32)
        want = {}
        for n in (24, 40):
            want[n] = head.draft(tokens[:n], states[:n], 1, 3)
            head.rollback(0)
        end = 0
        for i, (n, depth) in enumerate([(5, 1), (20, 3), (22, 2), (24, 3), (40, 3)]):
            found = head.draft(tokens[end:n], states[end:n], 1 + end, depth, 1)
            if n in want:
                assert found.tokens == want[n].tokens
                assert np.allclose(found.probabilities, want[n].probabilities, atol=atol)
            end = n - i % 2
            head.rollback(1 + end, 1)
        head.rollback(25, 1)
        head.set_rows(head.rows(1), 25, 2)
        tasks = [
            SequenceTask(tokens[24:], states[24:], 25, 3, 2),
            SequenceTask(tokens[24:], states[24:], 25, 2, 1),
            SequenceTask(tokens, states, 1, 1, 3),
        ]
        for task, found in zip(tasks, head.draft_batch(tasks), strict=True):
            assert found.tokens == want[40].tokens[: task.depth]
            assert np.allclose(found.probabilities, want[40].probabilities[: task.depth], atol=atol)


def test_a_window_cannot_be_rolled_back_far(random: dict[str, Path]) -> None:
    """Layers with a window forget rows; what was forgotten is evaluated again."""
    prompt = random_tokens(500, 4, TOKENS)
    with load(random["step35"], **WINDOW) as llm:
        take(llm, 8, prompt)
        with pytest.raises(NativeError, match="the cache of a window can roll back only"):
            llm.session.remove(100)
        with llm.session.save(CheckpointKind.HOST) as saved:
            llm.session.decode(prompt)
            with pytest.raises(NativeError, match="the cache of a window has forgotten"):
                llm.session.restore(saved)
        again = take(llm, 8, prompt[:101])
        llm.reset()
        assert take(llm, 8, prompt[:101]) == again
