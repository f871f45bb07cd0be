"""What a call needs of the model after another call: it is right, or is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.native import MTPLlama, NativeError
from support.generation import load, take
from support.models import Dial

FIRST = [(7 * n) % 50 + 3 for n in range(20)]
OTHER = [(5 * n) % 40 + 4 for n in range(30)]
MORE = [11, 12, 13]

Call = Callable[[MTPLlama, Path], Any]


def evaluated(llm: MTPLlama) -> list[int]:
    return [int(token) for token in llm.input_ids[: llm.n_tokens]]


def send_tokens(llm: MTPLlama, folder: Path) -> None:
    tokens = llm.generate(OTHER, temp=0.0)
    next(tokens)
    tokens.send(MORE)
    for _ in range(4):
        next(tokens)
    tokens.close()


def stream_a_part(llm: MTPLlama, _: Path) -> None:
    chunks: Any = llm.create_completion(OTHER, max_tokens=8, temperature=0.0, stream=True)
    next(chunks)
    chunks.close()


def load_too_much(llm: MTPLlama, folder: Path) -> None:
    state = state_of(llm, folder)
    state.n_tokens = llm.n_ctx() + 1
    with pytest.raises(NativeError):
        llm.load_state(state)


def load_forged(llm: MTPLlama, folder: Path) -> None:
    """Its memory has fewer tokens than it says."""
    state = state_of(llm, folder)
    state.n_tokens += 5
    state.scores = np.zeros((state.n_tokens, llm.n_vocab()), np.float32)
    with pytest.raises(NativeError, match="expected a state of 35 tokens, found one of 30"):
        llm.load_state(state)


def load_broken(llm: MTPLlama, folder: Path) -> None:
    state = state_of(llm, folder)
    state.llama_state = bytes(len(state.llama_state))
    with pytest.raises(RuntimeError):
        llm.load_state(state)


def state_of(llm: MTPLlama, _: Path) -> Any:
    """The state after OTHER; the model is left with FIRST."""
    llm.reset()
    llm.eval(OTHER)
    state = llm.save_state()
    llm.reset()
    llm.eval(FIRST)
    return state


def load_session(llm: MTPLlama, folder: Path) -> None:
    llm.reset()
    llm.eval(OTHER)
    llm.save_session(folder / "a.session")
    llm.eval(MORE)
    llm.load_session(folder / "a.session")


def shorten(llm: MTPLlama, _: Path) -> None:
    llm.n_tokens -= 2


def complete_recorded(llm: MTPLlama, _: Path) -> None:
    llm.create_completion(OTHER, max_tokens=4, temperature=0.0, echo=True, logprobs=2)


# Each leaves the model with other tokens than FIRST, or with other logits than those of its tokens.
CHANGES: dict[str, Call] = {
    "eval": lambda llm, _: llm.eval(MORE),
    "reset": lambda llm, _: llm.reset(),
    "load_state": lambda llm, folder: llm.load_state(state_of(llm, folder)),
    "load_state, too much": load_too_much,
    "load_state, broken": load_broken,
    "load_state, forged": load_forged,
    "load_session": load_session,
    "generate, in part": lambda llm, _: take(llm, 4, OTHER),
    "generate, with tokens sent": send_tokens,
    "create_completion": lambda llm, _: llm.create_completion(OTHER, max_tokens=4, temperature=0.0),
    "create_completion, a stream in part": stream_a_part,
    "create_completion, with logprobs": complete_recorded,
    "n_tokens": shorten,
    "save_state": lambda llm, _: llm.save_state(),
    "save_session": lambda llm, folder: llm.save_session(folder / "b.session"),
}


def through_state(llm: MTPLlama, _: Path) -> list[int]:
    state = llm.save_state()
    llm.reset()
    llm.load_state(state)
    return take(llm, 6, [*evaluated(llm), *MORE])


def through_session(llm: MTPLlama, folder: Path) -> list[int]:
    llm.save_session(folder / "c.session")
    llm.reset()
    llm.load_session(folder / "c.session")
    return take(llm, 6, [*evaluated(llm), *MORE])


def eval_and_sample(llm: MTPLlama, _: Path) -> int:
    llm.eval(MORE)
    return int(llm.sample(temp=0.0))


def logprobs(llm: MTPLlama, _: Path) -> Any:
    answer: Any = llm.create_completion(
        [*evaluated(llm), *MORE], max_tokens=3, temperature=0.0, logprobs=1, echo=True
    )
    return np.array(answer["choices"][0]["logprobs"]["token_logprobs"][1:])


# What each of these returns follows from the evaluated tokens alone.
NEEDS: dict[str, Call] = {
    "sample": lambda llm, _: llm.sample(temp=0.0),
    "eval_logits": lambda llm, _: np.array(llm.eval_logits),
    "eval, then sample": eval_and_sample,
    "generate, the same tokens": lambda llm, _: take(llm, 6, evaluated(llm)),
    "generate, more tokens": lambda llm, _: take(llm, 6, [*evaluated(llm), *MORE]),
    "generate, reset=False": lambda llm, _: take(llm, 6, MORE, reset=False),
    "create_completion": lambda llm, _: llm.create_completion(
        [*evaluated(llm), *MORE], max_tokens=5, temperature=0.0
    )["choices"][0]["text"],
    "create_completion, with logprobs": logprobs,
    "save_state": through_state,
    "save_session": through_session,
}
KEEP_LOGITS = {"eval", "load_state, too much", "save_state", "save_session"}
WITHOUT_TOKENS = {"generate, the same tokens", "save_session"}
PUBLIC = {
    *("create_chat_completion", "create_chat_completion_openai_v1", "create_completion"),
    *("create_embedding", "embed", "eval", "generate", "load_session", "load_state", "reset"),
    *("sample", "save_session", "save_state"),
}
# Those that go through one of the others.
BY_ANOTHER = {"create_chat_completion", "create_chat_completion_openai_v1", "create_embedding"}


@pytest.fixture(scope="module", params=[False, True], ids=["last", "logits_all"])
def pair(request: pytest.FixtureRequest, dial: Dial) -> Iterator[tuple[MTPLlama, MTPLlama]]:
    """A model to call, and one that evaluates afresh what the first one should have."""
    options = {"depth": 2, "logits_all": request.param}
    with load(dial("tiny"), **options) as one, load(dial("tiny"), **options) as other:
        yield one, other


@pytest.mark.parametrize("change", CHANGES)
def test_every_pair(pair: tuple[MTPLlama, MTPLlama], tmp_path: Path, change: str) -> None:
    llm, fresh = pair
    all_logits = bool(llm._logits_all)
    if change == "load_session" and all_logits:
        with pytest.raises(NativeError, match="load_session: expected logits_all=False"):
            load_session(llm, tmp_path)
        return
    for need, call in NEEDS.items():
        if need == "save_session" and all_logits:
            continue
        llm.reset()
        llm.eval(FIRST)
        CHANGES[change](llm, tmp_path)
        tokens = evaluated(llm)
        logits = {"sample"} if all_logits else {"sample", "eval_logits"}
        refused = change not in KEEP_LOGITS and need in logits
        if refused or (not tokens and need in WITHOUT_TOKENS):
            with pytest.raises(NativeError, match=r": expected .*, found "):
                call(llm, tmp_path)
            continue
        found = call(llm, tmp_path)
        fresh.reset()
        if tokens:
            fresh.eval(tokens)
        expected = call(fresh, tmp_path)
        if isinstance(found, np.ndarray):
            np.testing.assert_allclose(found, expected, atol=1e-3, err_msg=need)
        else:
            assert found == expected, need


def test_every_method_is_in_the_table() -> None:
    """A method of another llama_cpp that evaluates something belongs there, too."""
    words = ("eval", "sample", "generate", "state", "session", "reset", "create", "embed")
    found = {
        name
        for name in dir(MTPLlama)
        if not name.startswith("_")
        and any(word in name for word in words)
        and callable(getattr(MTPLlama, name))
    }
    assert found == PUBLIC
    listed = {name.split(",")[0] for name in (*CHANGES, *NEEDS)}
    assert PUBLIC - BY_ANOTHER - listed == {"embed"}  # of models without a session


def test_embed_leaves_nothing(dial: Dial) -> None:
    with load(dial("tiny"), embedding=True, depth=0, n_ctx=64) as llm:
        llm.eval(FIRST)
        llm.embed("a")
        with pytest.raises(NativeError, match="sample: expected the logits of the last token"):
            llm.sample(temp=0.0)
        llm.eval(FIRST)
        with suppress(ValueError):
            llm.embed(["a", "b" * 4000], truncate=False)
        assert llm.n_tokens in (0, len(FIRST))


def test_states_without_logits_have_none(dial: Dial) -> None:
    """A model with logits_all=True takes no state whose logits nobody has computed."""
    path = dial("tiny")
    with load(path, depth=2) as llm:
        llm.eval(FIRST)
        state = llm.save_state()
    with load(path, depth=2, logits_all=True) as llm:
        with pytest.raises(NativeError, match="load_state: expected the state of a model with"):
            llm.load_state(state)
        llm.eval(FIRST)
        llm.load_state(llm.save_state())
