"""llama_cpp's caches of states, in memory and on the disk: conversations go on as uninterrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

from mtp_gguf.native import MTPLlama
from mtp_gguf.native.errors import ContextFullError
from support.generation import SMALL, random_tokens
from support.models import Dial, Models
from support.session_files import write_twin
from support.tiny_llama import write_tiny_llama

GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.5, "top_k": 8, "top_p": 1.0, "min_p": 0.0, "seed": 7}


A, B = random_tokens(300, 1, 120), random_tokens(300, 2, 120)


def load(path: Path, cache: Any = None, **options: Any) -> closing[MTPLlama]:
    llm = MTPLlama(str(path), **{**SMALL, "depth": 3, "n_ctx": 1024, "seed": 5, **options})
    llm.set_cache(cache)
    return closing(llm)


@contextmanager
def on_disk(folder: Path) -> Iterator[LlamaDiskCache]:
    cache = LlamaDiskCache(str(folder))
    with closing(cache.cache):
        yield cache


@contextmanager
def in_memory(_: Path) -> Iterator[LlamaRAMCache]:
    yield LlamaRAMCache()


caches = pytest.mark.parametrize("kind", [in_memory, on_disk])


def complete(
    llm: MTPLlama, prompt: list[int], sampling: dict[str, Any] = GREEDY
) -> tuple[list[int], Any, int]:
    """What follows a prompt, how it was drafted, and how many tokens were read for it."""
    llm.session.reset_stats()
    llm.create_completion(prompt, max_tokens=12, **sampling)
    did = llm.mtp_stats
    tokens = llm.input_ids[len(prompt) : llm.n_tokens].tolist()
    return tokens, (did.drafted, did.accepted, did.cycles), did.prefilled


@pytest.mark.sample(5)
@caches
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("model", ["dial", "random"])
def test_conversations_alternate(
    model: str,
    lookup: bool,
    sampling: dict[str, Any],
    kind: Callable[..., Any],
    dial: Dial,
    models: Models,
    tmp_path: Path,
) -> None:
    path = dial("tiny") if model == "dial" else models.gguf()
    with load(path, lookup=lookup) as llm:
        first = [*A, *complete(llm, A, sampling)[0], 5, 6]
        want = complete(llm, first, sampling)
    assert want[2] == 2
    with kind(tmp_path) as cache, load(path, cache, lookup=lookup) as llm:
        complete(llm, A, sampling)
        complete(llm, B, sampling)
        assert complete(llm, first, sampling) == want


@caches
def test_a_changed_answer_goes_on_from_the_prompt(
    kind: Callable[..., Any], dial: Dial, tmp_path: Path
) -> None:
    """As after a template that drops thoughts; of what the cache holds, all bytes count."""
    path = dial("tiny")
    first = [*A, 5, 6]  # without the answer
    with load(path) as llm:
        want = complete(llm, first)
    with kind(tmp_path) as cache, load(path, cache) as llm:
        complete(llm, A)
        state = llm.save_state()
        assert list(state.mtp_earlier) == [len(A) - 64]
        beside = len(state.mtp_head) + sum(map(len, state.mtp_earlier.values()))
        complete(llm, B)
        tokens, _, read = complete(llm, first)
        assert (tokens, read) == (want[0], 64 + 2)
        if kind is in_memory:
            assert cache.cache_size > 2 * (state.llama_state_size + beside)


@caches
def test_other_models_and_settings_are_not_offered(
    kind: Callable[..., Any], dial: Dial, tmp_path: Path
) -> None:
    """They read the prompt, and the state stays for the model that it is of."""
    path = dial("tiny")
    twin = write_twin(path, tmp_path / "twin.gguf")
    with load(path) as llm:
        first = [*A, *complete(llm, A)[0], 5, 6]
    others: list[tuple[Path, dict[str, Any]]] = [
        (twin, {}),
        (dial("tiny", quant="Q8_0"), {}),
        (path, {"type_k": 8, "type_v": 8}),
        (path, {"depth": 0}),
    ]
    with kind(tmp_path / "cache") as cache:
        with load(path, cache) as llm:
            complete(llm, A)
        for model, options in others:
            with load(model, **options) as llm:
                want = complete(llm, first)
            with load(model, cache, **options) as llm:
                assert complete(llm, first) == want
        with load(path, cache) as llm:
            assert complete(llm, first)[2] == 2


@caches
def test_contexts_of_other_sizes(kind: Callable[..., Any], dial: Dial, tmp_path: Path) -> None:
    path = dial("tiny")
    with load(path) as llm:
        first = [*A, *complete(llm, A)[0], 5, 6]
        want = complete(llm, first)
        state = llm.save_state()
        long = complete(llm, [*first, *random_tokens(500, 3, 120)])
    for n_ctx in (512, 2048):
        with kind(tmp_path / str(n_ctx)) as cache:
            with load(path, cache, n_ctx=n_ctx) as llm:
                complete(llm, A)
            with load(path, cache) as llm:
                assert complete(llm, first) == want
                assert complete(llm, [*first, *random_tokens(500, 3, 120)])[0] == long[0]
            with load(path, cache, n_ctx=512) as llm:
                # The longer state has no room here; LlamaDiskCache takes out what it returns.
                assert complete(llm, A)[2] == (64 if kind is in_memory else len(A))
    with load(path, n_ctx=256) as llm:
        complete(llm, A[:100])
        with pytest.raises(ContextFullError, match=r"load_state: n_ctx: expected at least the 3"):
            llm.load_state(state)
        assert llm.session.length() == llm.n_tokens > 100


def test_a_state_of_no_use_is_not_loaded(dial: Dial, tmp_path: Path) -> None:
    """A recurrent model cannot go back in it, but to the checkpoint of its own prompt."""
    path, long = dial("tiny"), random_tokens(400, 6, 120)
    changed = [*long[:395], 9, 8, 7]
    with on_disk(tmp_path) as cache, load(path, cache) as llm:
        complete(llm, long)
        after = [*llm.input_ids[: llm.n_tokens].tolist(), 4]
        complete(llm, long[:380])
        assert complete(llm, changed)[2] == len(changed) - (400 - 64)
        assert complete(llm, after)[2] == 1  # LlamaDiskCache takes out what it returns


def test_pictures_are_not_cached(dial: Dial) -> None:
    """Their ids are those of one process, where another one has another picture."""
    cache = LlamaRAMCache()
    with load(dial("tiny"), cache) as llm:
        complete(llm, A)
        assert len(cache.cache_state) == 1
        assert llm.cache is not None
        llm.cache[[3, -1, 4]] = llm.save_state()
        assert len(cache.cache_state) == 1
        assert [3, -1, 4] not in llm.cache
        assert A in llm.cache
        assert llm.cache.cache_size == cache.cache_size > 0
        llm.set_cache(None)
        assert llm.cache is None


def test_other_models_use_any_shared_beginning(dial: Dial, tmp_path: Path) -> None:
    prompt = [t % 100 for t in A]
    for path, usable in ((write_tiny_llama(tmp_path / "a.gguf"), True), (dial("tiny"), False)):
        with load(path, LlamaRAMCache(), depth=0) as llm:
            assert llm.cache is not None
            llm.eval(prompt)
            llm.cache[prompt] = llm.save_state()
            assert llm.cache[[*prompt, 1]].n_tokens == 300
            if usable:
                assert llm.cache[[*prompt[:200], 1]].n_tokens == 300
            else:
                with pytest.raises(KeyError, match="expected a state from which"):
                    llm.cache[[*prompt[:200], 1]]
