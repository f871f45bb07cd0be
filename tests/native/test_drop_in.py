"""MTPLlama in code written for llama_cpp.Llama: streams, threads, unusual models."""

from __future__ import annotations

import itertools
import json
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from llama_cpp.llama_cache import LlamaRAMCache

from mtp_gguf.gguf_tools.profile import AUTO_MAX_DEPTH
from mtp_gguf.native import MTPLlama, NativeError
from mtp_gguf.native.errors import HeadMissingError
from mtp_gguf.native.libraries.replay import replays
from mtp_gguf.native.runtime import llama_cpp
from support import generation
from support.carried_models import write_model
from support.generation import SMALL, take
from support.llama_libraries import STOCK, python_on
from support.models import Dial, Models

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = [3, 1, 4, 1, 5]
OTHER = [9, 2, 6]
MESSAGES: Any = [{"role": "user", "content": "aha"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
load = partial(generation.load, n_ctx=128)
plain = partial(generation.plain, n_ctx=128)


@contextmanager
def noted(note: str, path: Path, **options: Any) -> Iterator[MTPLlama]:
    """A model that is loaded with one warning."""
    with pytest.warns(UserWarning, match=note) as notes:
        loaded = load(path, **options)
    assert len(notes) == 1
    with loaded as llm:
        yield llm


def text(llm: llama_cpp.Llama, prompt: Any = PROMPT, **options: Any) -> str:
    answer: Any = llm.create_completion(prompt, **{**GREEDY, **options})
    return str(answer["choices"][0]["text"])


def read(stream: Iterator[Any]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in stream)


# ----------------------------------------------------------------------------- streams


WAYS = [
    f"{how}/{chain}"
    for how in ("exit", "main", "collect", "model first", "stream first")
    for chain in ("rejection", "equality", "processor")
]


@pytest.mark.thorough
def test_unfinished_streams_end_quietly(models: Models) -> None:
    """Each way of leaving a stream, in a subprocess whose freed memory is overwritten."""
    path = models.gguf("demo", "Q4_K_M", "F16")
    said = python_on(
        STOCK, "-m", "support.unfinished_streams", path, *WAYS, timeout=120, MALLOC_PERTURB_="165"
    )
    assert json.loads(said) == {}


CHAINS = [{}, {"temperature": 0.8, "seed": 1}, {"logit_bias": {65: 0.0}}]


@pytest.mark.parametrize("chain", CHAINS, ids=["greedy", "sampled", "processor"])
def test_a_stream_ends_when_another_call_begins(dial: Dial, chain: dict[str, Any]) -> None:
    """The error names the cause instead of mixing the texts; the other text is unaffected."""
    with load(dial("tiny"), depth=3) as llm:
        want = text(llm, OTHER)
        calls: tuple[Callable[[], bool], ...] = (
            lambda: text(llm, OTHER) == want,
            lambda: read(llm.create_completion(OTHER, stream=True, **GREEDY)) == want,
            lambda: llm.reset() is None,
            lambda: llm.eval(OTHER) is None,
            lambda: llm.save_state() is not None,
        )
        for call in calls:
            llm.reset()
            stream = llm.create_completion(PROMPT, stream=True, **{**GREEDY, **chain})
            next(stream)
            tokens = llm.generate(PROMPT, temp=0.0)
            next(tokens)
            for ended in (stream, tokens):
                if ended is tokens:
                    assert call()
                with pytest.raises(NativeError, match="this stream has ended because the model"):
                    next(ended)
                with pytest.raises(StopIteration):
                    next(ended)
        llm.reset()
        assert text(llm, OTHER) == want


def test_a_finished_stream_does_not_affect_later_calls(dial: Dial) -> None:
    with load(dial("tiny")) as llm:
        stream = llm.create_completion(PROMPT, stream=True, **GREEDY)
        next(stream)
        second = llm.create_completion(OTHER, stream=True, **GREEDY)
        begun = next(second)["choices"][0]["text"]
        stream.close()
        assert begun + read(second) == text(llm, OTHER)


def test_closed_means_closed(dial: Dial) -> None:
    path = dial("tiny")
    code = f"""
import json
from mtp_gguf.gguf_tools.profile import AUTO_MAX_DEPTH
from mtp_gguf.native import MTPLlama, NativeError
with MTPLlama({str(path)!r}, n_ctx=64, n_threads=1, n_threads_batch=1) as llm:
    state = llm.save_state()
    stream = llm.create_completion([1, 2], stream=True)
    next(stream)
calls = {{
    "call": lambda: llm("hi"), "tokenize": lambda: llm.tokenize(b"hi"), "n_ctx": llm.n_ctx,
    "chat": lambda: llm.create_chat_completion([{{"role": "user", "content": "hi"}}]),
    "detokenize": lambda: llm.detokenize([1]), "n_vocab": llm.n_vocab, "n_embd": llm.n_embd,
    "reset": llm.reset, "eval": lambda: llm.eval([1]), "generate": lambda: next(llm.generate([1])),
    "sample": llm.sample, "save": llm.save_state, "load": lambda: llm.load_state(state),
    "eos": llm.token_eos, "bos": llm.token_bos, "nl": llm.token_nl, "ctx": lambda: llm.ctx,
    "model": lambda: llm.model, "stats": lambda: llm.mtp_stats, "session": lambda: llm.session,
    "is_end": lambda: llm.is_end(1), "pooling": llm.pooling_type, "stream": lambda: next(stream),
    "tokenizer": lambda: llm.tokenizer().tokenize(b"hi"), "enter": lambda: llm("hi", stream=True),
}}
wrong = {{}}
for name, call in calls.items():
    try:
        result = call()
        wrong[name] = repr(next(result) if name == "enter" else result)
    except NativeError as error:
        if str(error) != "the model is closed":
            wrong[name] = str(error)
    except BaseException as error:
        wrong[name] = repr(error)
llm.close()
print(json.dumps(wrong))
"""
    assert json.loads(python_on(STOCK, "-c", code, timeout=60)) == {}


# ----------------------------------------------------------------------------- two-phase


@pytest.mark.parametrize("rollback", ["snapshot", "checkpoint", "two-phase", "host"])
def test_stopping_criteria_see_the_text_after_its_end(dial: Dial, rollback: str) -> None:
    """This includes a stop between accepted drafts that cannot be rolled back."""
    path = dial("tiny", hit=1.0)
    seen: dict[str, list[list[int]]] = {}
    texts: dict[str, list[str]] = {}
    with plain(path) as theirs, load(path, depth=5, rollback=rollback) as ours:
        for name, llm in (("theirs", theirs), ("ours", ours)):
            seen[name] = []

            def criterion(ids: Any, _: Any, name: str = name) -> bool:
                seen[name].append(ids.tolist())
                return False

            criteria = llama_cpp.StoppingCriteriaList([criterion])
            texts[name] = [
                text(llm, PROMPT, max_tokens=n, stopping_criteria=criteria) for n in (7, 8, 9, 10)
            ]
            texts[name].append(text(llm, [*PROMPT, *OTHER]))
            chat: Any = llm.create_chat_completion(MESSAGES, **GREEDY)
            texts[name].append(chat["choices"][0]["message"]["content"])
    assert texts["ours"] == texts["theirs"]
    assert seen["ours"] == seen["theirs"]


@pytest.mark.parametrize("rollback", ["two-phase", "host"])
def test_tokens_that_cannot_be_rolled_back_are_evaluated_again(dial: Dial, rollback: str) -> None:
    """A stop between accepted drafts, followed by the same text, a state, or another text."""
    with load(dial("tiny", hit=1.0), depth=5, rollback=rollback) as llm:
        want = take(llm, 12, PROMPT)
        for n in (2, 3, 4, 5):
            llm.reset()
            begun = take(llm, n, PROMPT)
            assert llm.n_tokens == len(PROMPT) + n - 1
            state = llm.save_state()
            for _ in range(2):
                llm.eval([begun[-1]])
                assert [*begun, *take(llm, 12 - n, [], reset=False)] == want
                llm.load_state(state)


# ----------------------------------------------------------------------- models that cannot draft


@pytest.fixture(scope="module")
def llama_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the architecture llama, with a token that begins a text."""
    return write_model(tmp_path_factory.mktemp("llama") / "llama.gguf", "llama", halves=False)


def same_calls(llm: llama_cpp.Llama) -> dict[str, Any]:
    """Return the results of common calls on a model."""
    out: dict[str, Any] = {}
    out["completion"] = [text(llm), text(llm), text(llm, [*PROMPT, *OTHER])]
    out["sampled"] = text(llm, "aha", temperature=0.8, seed=7)
    stream: Any = llm.create_completion("aha", stream=True, **GREEDY)
    out["streamed"] = read(stream)
    chat: Any = llm.create_chat_completion(MESSAGES, **GREEDY)
    out["chat"] = chat["choices"][0]["message"]
    state = llm.save_state()
    out["evaluated"] = llm.n_tokens, llm.input_ids[: llm.n_tokens].tolist()
    out["other"] = text(llm, OTHER)
    llm.load_state(state)
    out["again"] = llm.n_tokens
    out["generated"] = take(llm, 8, PROMPT)
    llm.set_cache(LlamaRAMCache())
    out["cached"] = [text(llm, "abc"), text(llm, "abc")]
    out["empty"] = text(llm, "") if llm._model.add_bos_token() else None
    return out


@pytest.mark.parametrize("kind", ["no head", "architecture"])
def test_models_that_cannot_draft_behave_like_llama_cpp(
    models: Models, llama_model: Path, kind: str
) -> None:
    path = llama_model if kind == "architecture" else models.gguf("dense-no-mtp", "Q4_K_M", "F16")
    with plain(path) as theirs:
        want = same_calls(theirs)
    reason = "the file has no MTP head" if kind == "no head" else "no MTP head for .* 'llama'"
    note = reason + ".*; decoding without drafts, as llama_cpp.Llama does"
    for options in ({"lookup": False}, {"lookup": False, "depth": "auto"}):
        with noted(note, path, **options) as ours:
            assert same_calls(ours) == want
            assert (ours.depth, ours.head, ours.mtp_stats.cycles) == (0, None, 0)
            with pytest.raises(NativeError, match="the model has no session"):
                _ = ours.session
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_cpp, "Llama", MTPLlama)  # as for llama_cpp's own server
        with noted(reason, path) as ours:
            assert text(ours) == want["completion"][0]
    for given in ({"depth": 1}, {"depth": 2}, {"exact": True}):  # who asks for drafts is told
        with pytest.raises(HeadMissingError, match="no MTP head"):
            load(path, **given)
    with load(path, depth=0) as ours:
        assert text(ours) == want["completion"][0]


def test_a_model_without_a_head_drafts_from_its_text(models: Models, llama_model: Path) -> None:
    """By default where rollback needs no copies of a state: with attention only, or by replay."""
    hybrid = models.gguf("dense-no-mtp", "Q4_K_M", "F16")
    for path, drafts in ((llama_model, True), (hybrid, replays("qwen35", 0))):
        with plain(path) as theirs:
            want = text(theirs, PROMPT * 3)
        note = "drafting only from the text" if drafts else "decoding without drafts"
        with noted(f"no MTP head.*; {note}", path) as ours:
            assert text(ours, PROMPT * 3) == want
            assert (ours.mtp_stats.cycles > 0) is drafts


def test_embeddings_and_vocabularies(dial: Dial) -> None:
    path = dial("tiny")
    with plain(path, embedding=True, n_ctx=64) as theirs:
        want = theirs.embed(["aha", "na na"])
        assert len(want) == 2
    with noted("embedding=True; decoding without drafts", path, embedding=True, n_ctx=64) as ours:
        assert np.array_equal(ours.embed("aha"), want[0])
        assert all(
            np.array_equal(*pair) for pair in zip(ours.embed(["aha", "na na"]), want, strict=True)
        )
        assert ours.create_embedding("aha")["usage"]["total_tokens"] > 0
    with load(path, depth=0, embedding=True, n_ctx=64) as ours:
        assert np.array_equal(ours.embed("aha"), want[0])
    with plain(path, vocab_only=True) as theirs:
        tokens = theirs.tokenize(b"aha")
    with noted("vocab_only=True", path, vocab_only=True) as ours:
        assert ours.tokenize(b"aha") == tokens
        assert ours.detokenize(tokens) == b"aha"


def test_a_small_context_is_rounded_up_with_its_batches(dial: Dial) -> None:
    """llama.cpp limits batches to what was asked for, in which no draft would have room."""
    path = dial("tiny", hit=1.0)
    with plain(path, n_ctx=256) as theirs:
        want = text(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load(path, n_ctx=1, depth=None)
    with loaded as ours:
        assert (ours.n_ctx(), ours.max_depth) == (256, AUTO_MAX_DEPTH)
        assert text(ours) == want
        assert sum(ours.mtp_stats.accepted) > 0


@pytest.mark.parametrize("name", ["n_batch", "n_ubatch"])
@pytest.mark.parametrize("rollback", ["snapshot", "host"])
def test_small_batches_limit_the_depth(dial: Dial, name: str, rollback: str) -> None:
    path = dial("tiny", hit=1.0)
    with plain(path) as theirs:
        want = text(theirs)
    taken = 2 if rollback == "snapshot" else 1
    for size in (1, 2, 3, 4):
        room = max(size - taken, 0)
        options = {name: size, "rollback": rollback, "max_depth": 3}
        if room < 3:
            loaded: Any = noted(
                f"batches of {size} tokens have room for {room} drafts", path, **options
            )
            with pytest.raises(NativeError, match=r"n_batch.*: expected . or more for"):
                load(path, depth=3, **options)
        else:
            loaded = load(path, **options)
        with loaded as ours:
            assert ours.max_depth == room
            assert text(ours) == want


def test_an_empty_prompt_is_refused_and_never_continues_another(dial: Dial) -> None:
    """llama_cpp.Llama fails an assertion there; a model with a BOS token has a prompt of one."""
    with load(dial("tiny")) as llm:
        for before in (lambda: None, lambda: text(llm)):
            before()
            llm.reset()
            for call in (
                lambda: text(llm, ""),
                lambda: text(llm, []),
                lambda: next(llm.generate([])),
            ):
                with pytest.raises(NativeError, match="prompt: expected at least one token, found"):
                    call()
        assert text(llm) == text(llm)


def test_an_evaluated_prompt_is_sampled_without_evaluating_it_again(dial: Dial) -> None:
    """Its logits are available, so nothing is evaluated again or dropped."""
    with load(dial("tiny"), depth=3) as llm:
        want = take(llm, 9, PROMPT)
        for prompt in (PROMPT, PROMPT[:1]):
            llm.reset()
            llm.eval(prompt)
            llm.session.reset_stats()
            got = take(llm, 9, prompt)
            assert llm.mtp_stats.prefilled == 0
            assert got == want or prompt != PROMPT
            assert llm.n_tokens == len(prompt) + 8


# ----------------------------------------------------------------------------- threads


def test_threads_default_to_the_performance_cores(
    dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_gguf.native.llama.loaded.computing_threads", lambda: 3)
    for given, expected in (({}, (3, 3)), ({"n_threads": None, "n_threads_batch": 1}, (3, 1))):
        with MTPLlama(str(dial("tiny")), n_ctx=64, **given) as llm:
            assert (llm.n_threads, llm.n_threads_batch) == expected
            assert llama_cpp.llama_n_threads(llm.ctx) == expected[0]


def test_other_threads_wait_for_the_model(dial: Dial) -> None:
    prompts = [[*PROMPT, i] for i in range(6)]
    with load(dial("tiny")) as llm:

        def streamed(prompt: list[int]) -> str:
            return read(llm.create_completion(prompt, stream=True, **GREEDY))

        def evaluated(prompt: list[int]) -> int:
            llm.reset()
            llm.eval(prompt)
            return len(llm.save_state().llama_state)

        with ThreadPoolExecutor(6) as pool:
            for work in (lambda prompt: text(llm, prompt), streamed):
                want = [work(prompt) for prompt in prompts]
                assert list(pool.map(work, prompts)) == want
            assert all(size > 0 for size in pool.map(evaluated, prompts))
        assert streamed(prompts[0]) == want[0]


def test_other_threads_can_be_refused(dial: Dial) -> None:
    with load(dial("tiny"), busy="raise") as llm:
        want = text(llm)
        stream = llm.create_completion(PROMPT, stream=True, **GREEDY)
        begun = next(stream)["choices"][0]["text"]
        with ThreadPoolExecutor(1) as pool:
            for call in (
                lambda: text(llm, OTHER),
                llm.reset,
                lambda: llm.eval([1]),
                llm.save_state,
            ):
                with pytest.raises(NativeError, match="the model is in use by another thread"):
                    pool.submit(call).result()
            assert begun + read(stream) == want
            assert pool.submit(text, llm).result() == want


def test_a_stream_may_be_read_by_several_threads(dial: Dial) -> None:
    """Event loops do this; a waiting call runs once the stream is read or closed."""
    with load(dial("tiny")) as llm:
        want = text(llm)
        stream = llm.create_completion(PROMPT, stream=True, **GREEDY)
        done: list[str] = []
        waiting = threading.Thread(target=lambda: done.append(text(llm, OTHER)))
        pieces = []
        with ThreadPoolExecutor(3) as pool:
            pieces.append(pool.submit(next, stream).result())
            waiting.start()
            while (chunk := pool.submit(next, stream, None).result()) is not None:
                assert not done
                pieces.append(chunk)
        waiting.join(30)
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == want
        assert done == [text(llm, OTHER)]
        for give_up in (lambda s: s.close(), lambda _: None):  # the second: its thread has ended
            stream = llm.create_completion(PROMPT, stream=True, **GREEDY)
            beginner = threading.Thread(target=next, args=[stream])
            beginner.start()
            beginner.join()
            give_up(stream)
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(text, llm, OTHER).result(30) == done[0]


def test_closing_releases_waiting_threads(dial: Dial) -> None:
    with load(dial("tiny")) as llm:
        stream = llm.create_completion(PROMPT, stream=True, **GREEDY)
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(text, llm, OTHER)
            assert not waiting.done()
            llm.close()
            with pytest.raises(NativeError, match="the model is closed"):
                waiting.result(30)
        with pytest.raises(NativeError, match="the model is closed"):
            next(stream)


def test_a_generation_is_stopped_from_another_thread(dial: Dial) -> None:
    begun = threading.Event()

    def begin(*_: Any) -> bool:
        begun.set()
        return False

    with load(dial("tiny"), n_ctx=2048, depth=3) as llm, ThreadPoolExecutor(1) as pool:
        llm.stop()  # nothing runs
        full = text(llm, max_tokens=30)
        options = {**GREEDY, "max_tokens": 2000, "stopping_criteria": [begin]}
        running = pool.submit(llm.create_completion, PROMPT, **options)
        begun.wait()
        llm.stop()
        choice = running.result()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert full.startswith(choice["text"]) or choice["text"].startswith(full)
        assert llm.n_tokens < 2000
        assert text(llm, max_tokens=30) == full


@pytest.mark.parametrize("depth", [0, 3])
def test_a_stream_that_is_stopped_ends_with_its_reason(dial: Dial, depth: int) -> None:
    with load(dial("tiny"), n_ctx=512, depth=depth) as llm:
        streams: list[Any] = [
            llm.create_completion(PROMPT, temperature=0, max_tokens=400, stream=True),
            llm.create_chat_completion(MESSAGES, temperature=0, max_tokens=400, stream=True),
        ]
        for stream in streams:
            chunks = list(itertools.islice(stream, 2))
            llm.stop()
            chunks += stream
            assert len(chunks) < 20
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        tokens = llm.generate(PROMPT, temp=0.0)
        next(tokens)
        llm.stop()
        assert list(tokens) == []


def test_models_that_cannot_draft_can_be_stopped(models: Models) -> None:
    path = models.gguf("dense-no-mtp", "Q4_K_M", "F16")
    with noted("no MTP head", path, n_ctx=128) as llm:
        stream: Any = llm.create_completion(PROMPT, temperature=0, max_tokens=90, stream=True)
        next(stream)
        llm.stop()
        assert list(stream)[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("keep_prompt", [True, False])
def test_the_evaluation_of_a_prompt_can_be_stopped(
    dial: Dial, monkeypatch: pytest.MonkeyPatch, keep_prompt: bool
) -> None:
    prompt = [token % 700 for token in range(3, 3003, 7)]
    options = {"n_ctx": 512, "n_batch": 32, "depth": 2, "keep_prompt": keep_prompt}
    with load(dial("tiny"), **options) as llm:
        want = text(llm, prompt)
        llm.reset()
        decode = llm.session.decode

        def stop(tokens: Any, **options: Any) -> None:
            decode(tokens, **options)
            if llm.session.length() == 96:
                llm.stop()

        monkeypatch.setattr(llm.session, "decode", stop)
        answer: Any = llm.create_completion(prompt, **GREEDY)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert (answer["choices"][0]["text"], llm.n_tokens) == ("", 96)
        monkeypatch.undo()
        assert text(llm, prompt) == want


def test_max_completion_tokens(dial: Dial) -> None:
    with load(dial("tiny")) as llm:
        answer: Any = llm.create_chat_completion(MESSAGES, temperature=0, max_completion_tokens=3)
        assert answer["usage"]["completion_tokens"] == 3
        with pytest.raises(NativeError, match=r"max_completion_tokens: .* found both"):
            llm.create_chat_completion(MESSAGES, max_tokens=3, max_completion_tokens=3)


def test_unknown_arguments_are_refused_with_a_suggestion(dial: Dial) -> None:
    for wrong, said in (
        ({"dept": 3}, "found 'dept'; did you mean 'depth'"),
        ({"n_gpu_layer": 3}, "found 'n_gpu_layer'; did you mean 'n_gpu_layers'"),
        ({"zzz": 3}, "found 'zzz'$"),
    ):
        with pytest.raises(TypeError, match=said):
            load(dial("tiny"), **wrong)
    with pytest.raises(TypeError, match="found 'dept'"):  # before anything is downloaded
        MTPLlama.from_pretrained("owner/name", None, dept=3)


def test_arguments_of_earlier_versions_are_ignored_as_in_llama_cpp(dial: Dial) -> None:
    with load(dial("tiny"), f16_kv=True, n_parts=-1, rpc_servers=None) as llm:  # LangChain's
        assert text(llm)


def test_a_subclass_may_have_arguments_of_its_own(dial: Dial) -> None:
    class Named(MTPLlama):  # type: ignore[misc]
        def __init__(self, path: str, *, name: str = "", **options: Any) -> None:
            super().__init__(path, **options)
            self.name = name

    with closing(Named(str(dial("tiny")), name="a", depth=1, **SMALL)) as llm:
        assert (llm.name, llm.depth) == ("a", 1)
