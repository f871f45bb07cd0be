"""MTPLlama as a replacement for llama_cpp.Llama."""

from __future__ import annotations

import gc
import itertools
import json
import math
import pickle
import re
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp.llama_grammar import LlamaGrammar

from mtp_gguf.bench.model import BenchModel
from mtp_gguf.convert.families.target_model import HeadChoice
from mtp_gguf.gguf_tools.files.format import open_gguf
from mtp_gguf.native import MTPLlama, NativeError
from mtp_gguf.native.errors import ContextFullError, ModelRefusedError
from mtp_gguf.native.libraries.replay import replays
from mtp_gguf.native.runtime import llama_cpp
from support import generation, places
from support.cached_pages import in_huge_pages, in_small_pages
from support.commands import invoke
from support.generation import plain, random_tokens
from support.gguf_files import Rewrite
from support.models import Dial, Models

PROMPT = random_tokens(20, 2)


load = partial(generation.load, depth=3)


def take(llm: llama_cpp.Llama, n: int, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    return generation.take(llm, n, prompt, **options)


SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "seed": 5},
    "penalties": {"temperature": 0.0, "repeat_penalty": 1.3, "presence_penalty": 0.4},
    "biased": {"temperature": 0.0, "logit_bias": {65: 2.0}},
}


@pytest.mark.stock
@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("quiet", [True, False], ids=["", "logprobs"])
def test_completions_are_those_of_llama_cpp(
    dial: Dial, options: dict[str, Any], quiet: bool
) -> None:
    """The same text, finish reason and usage, whatever the sampler: drafts change nothing.

    The dial's text never hangs on a near tie, so that kernels that differ do not show.
    """
    options = {"max_tokens": 24, **options} | ({} if quiet else {"logprobs": 3})
    with plain(dial("tiny"), logits_all=not quiet) as llm:
        want: Any = llm.create_completion(PROMPT, **options)
    with load(dial("tiny"), depth=3, logits_all=not quiet, rejection=False) as llm:
        got: Any = llm.create_completion(PROMPT, **options)
        stats = llm.mtp_stats
    assert got["choices"][0]["text"] == want["choices"][0]["text"]
    assert got["choices"][0]["finish_reason"] == want["choices"][0]["finish_reason"]
    assert got["usage"] == want["usage"]
    if not quiet:
        ours, theirs = (x["choices"][0]["logprobs"] for x in (got, want))
        assert ours["tokens"] == theirs["tokens"]
        assert np.allclose(ours["token_logprobs"], theirs["token_logprobs"], atol=0.05)
    assert stats.cycles
    if options["temperature"] == 0 and "repeat_penalty" not in options:
        assert stats.tokens_per_cycle > 1.5


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(64, 16), (50, 30), (30, 50)])
def test_logits_of_a_prompt_of_several_batches(dial: Dial, n_batch: int, n_ubatch: int) -> None:
    prompt = [token % 700 for token in range(7, 1300, 13)]
    batches = {"n_batch": n_batch, "n_ubatch": n_ubatch}
    options = {"logits_all": True, "flash_attn": True, **batches}
    scores = []
    for llm in (plain(dial("tiny"), **options), load(dial("tiny"), **options)):
        with llm as opened:
            opened.eval(prompt)
            scores.append(opened.scores[: len(prompt)].copy())
    assert np.abs(scores[0] - scores[1]).max() < 1e-3


def test_logits_processor_and_stopping_criteria(dial: Dial) -> None:
    seen: list[int] = []

    def processor(ids: Any, logits: Any) -> Any:
        seen.append(len(ids))
        return logits

    with load(dial("tiny")) as ours:
        want = take(ours, 20)
        ours.reset()
        got = take(ours, 20, logits_processor=llama_cpp.LogitsProcessorList([processor]))
        assert got == want
        # Before each token is sampled Python sees exactly the tokens before it.
        assert seen == list(range(len(PROMPT), len(PROMPT) + len(seen)))
        calls: list[int] = []

        def criterion(ids: Any, _: Any) -> bool:
            calls.append(len(ids))
            return len(calls) == 6

        criteria = llama_cpp.StoppingCriteriaList([criterion])
        assert take(ours, 20, stopping_criteria=criteria) == want[:5]
        assert calls == list(range(len(PROMPT), len(PROMPT) + 6))


def test_prefixes_are_reused_without_stale_state(dial: Dial) -> None:
    path = dial("tiny")
    with load(path) as llm:
        first = take(llm, 17)
        assert llm.n_tokens == len(PROMPT) + 16
        assert llm.input_ids[: llm.n_tokens].tolist() == PROMPT + first[:-1]
        assert llm.session.length() == llm.n_tokens
        llm.session.reset_stats()
        follow = [*PROMPT, *first, 3, 4]  # a chat that goes on
        second = take(llm, 10, follow)
        assert llm.mtp_stats.prefilled == 3
        third = take(llm, 10)  # the first prompt again: too far back, all anew
        assert llm.mtp_stats.prefilled == 3 + len(PROMPT)
    assert third == first[:10]
    with load(path) as llm:
        assert take(llm, 10, follow) == second


def test_a_known_prompt_is_not_sampled_from_other_logits(dial: Dial) -> None:
    """After a cycle the logits are of another token."""
    with load(dial("tiny")) as llm:
        text = [*PROMPT, *take(llm, 30)]
        for n in range(1, 8):  # between drafts, too
            take(llm, n)
            known = llm.input_ids[: llm.n_tokens].tolist()
            assert take(llm, 1, known) == [text[len(known)]]


def test_a_prompt_that_fails_leaves_no_logits(dial: Dial) -> None:
    """What was rolled back for it is the prompt's beginning, whose logits are not available."""
    with load(dial("tiny"), depth=3) as llm:
        text = [*PROMPT, *take(llm, 10)]
        llm.reset()
        llm.eval(text[:26])
        with pytest.raises(NativeError, match=r"tokens\[0\]: expected 0 to"):
            take(llm, 1, [*text[:25], 10**6])
        assert llm.n_tokens == 25
        assert take(llm, 1, text[:25]) == [text[25]]


def test_a_reader_can_force_tokens(dial: Dial) -> None:
    path = dial("tiny")
    with load(path) as llm:
        stream = llm.generate(PROMPT, temp=0.0)
        head = [next(stream), next(stream)]
        forced = stream.send([11, 12])
        rest = [forced, *itertools.islice(stream, 5)]
        stream.close()
        llm.reset()
        assert take(llm, 6, [*PROMPT, *head, 11, 12]) == rest


@pytest.mark.stock
def test_states_are_saved_and_loaded(dial: Dial) -> None:
    path = dial("tiny")
    with load(path) as llm:
        text = take(llm, 9)
        state = llm.save_state()
        after = take(llm, 12, [*PROMPT, *text])
        take(llm, 5, PROMPT[::-1])
        llm.load_state(state)
        assert llm.session.length() == llm.n_tokens == len(PROMPT) + 8
        llm.session.reset_stats()
        assert take(llm, 12, [*PROMPT, *text]) == after
        assert llm.mtp_stats.prefilled == 1
        # Only the trunk's state is kept, so its snapshots are gone: refused, not believed.
        llm.load_state(state)
        with pytest.raises(NativeError, match="can roll back only 0"):
            llm.session.remove(len(PROMPT) + 7)
    with load(path) as other:
        other.load_state(state)
        assert take(other, 12, [*PROMPT, *text]) == after


def test_the_state_of_a_text_that_was_shortened(dial: Dial) -> None:
    """The head does not know the hidden state of its last token; it goes on behind the next one."""
    prompt = [token % 100 for token in PROMPT]
    with load(dial.gguf("glm4moe", 0.8)) as llm:
        llm.eval([*prompt, *prompt[::-1]])
        llm.n_tokens = len(prompt)
        state = llm.save_state()
        want = take(llm, 12, [*prompt, 7])
        llm.load_state(state)
        assert llm.session.length() == len(prompt)
        assert take(llm, 12, [*prompt, 7]) == want
        assert llm.mtp_stats.drafted[0] > 0


def test_a_grammar_without_a_token_ends_no_process(models: Models) -> None:
    """llama.cpp throws where it is told of a token that a grammar does not allow."""
    with load(models.gguf("demo", "Q4_K_M", "F16")) as llm:
        seven = [t for t in range(llm.n_vocab()) if b"7" in llm.detokenize([t])]
        grammar = LlamaGrammar.from_string('root ::= "7"', verbose=False)
        for options in ({}, {"logprobs": 1}):
            with pytest.raises(NativeError, match="no token that the samplers allow"):
                llm.create_completion(
                    PROMPT, grammar=grammar, logit_bias=dict.fromkeys(seven, -math.inf), **options
                )
        text = llm.create_completion(PROMPT, grammar=grammar, max_tokens=4)["choices"][0]["text"]
        assert text == "7"


def test_what_fails_within_a_cycle_is_said(dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that no cycle is open, because it was closed by the failure."""
    with load(dial("tiny")) as llm:
        session = llm.session
        row, end = session.row, session.end

        def fails(accepted: int) -> int:
            row(accepted)
            end(0)
            raise NativeError("the device is gone")

        monkeypatch.setattr(session, "row", fails)
        with pytest.raises(NativeError, match="the device is gone"):
            llm.create_completion(PROMPT, logit_bias={1: 1.0}, max_tokens=4)


def test_drafts_after_a_loaded_state_are_the_same_as_before(models: Models) -> None:
    """On random weights, where a draft depends on all that the head has seen."""

    def drafts(llm: MTPLlama) -> tuple[list[int], list[float]]:
        tokens = llm.session.begin(7, 3)
        probabilities = llm.session._probabilities[:3]
        llm.session.row(0)
        llm.session.end(0)
        return tokens, probabilities

    path = models.gguf()
    with load(path) as llm:
        take(llm, 9)
        state = llm.save_state()
        want = drafts(llm)
        take(llm, 5, PROMPT[::-1])
        llm.load_state(state)
        assert drafts(llm) == want
    with load(path) as other:  # as from a file
        other.load_state(pickle.loads(pickle.dumps(state)))
        assert drafts(other) == want
        state.mtp_head = b""
        other.load_state(state)
        assert other.session.begin(7, 3) == []  # the head has to see a token first
        other.session.end(0)
        assert drafts(other)[1] != want[1]


def test_states_of_other_models_and_of_llama_cpp(models: Models, dial: Dial) -> None:
    path = dial("tiny")
    given = {"flash_attn": True}  # each keeps values in another order without
    with plain(path, **given) as theirs, load(path, **given) as ours:
        want = take(ours, 8)
        take(theirs, 5)
        ours.load_state(theirs.save_state())
        assert take(ours, 8, [*PROMPT, *want[:5]]) == take(theirs, 8, [*PROMPT, *want[:5]])
        theirs.load_state(ours.save_state())
        assert theirs.n_tokens == ours.n_tokens
        state = ours.save_state()
        state.mtp_head = state.mtp_head[:-1]
        with pytest.raises(ModelRefusedError, match="bytes after its header, found"):
            ours.load_state(state)
        assert ours.session.length() == ours.n_tokens == state.n_tokens
        assert take(ours, 8) == want
        with load(dial("tiny-3v"), **given) as another:
            take(another, 3)
            with pytest.raises(RuntimeError, match="Failed to set llama state"):
                another.load_state(state)
            assert another.n_tokens == another.session.length() == 0
            assert take(another, 3) == take(another, 3)
    with load(path, depth=0, **given) as none:
        none.load_state(state)
        assert take(none, 8) == want


def test_a_long_prompt_is_checkpointed(dial: Dial) -> None:
    """A chat whose template changes the end of the last turn is not evaluated from the start."""
    path = dial("tiny")
    long = (PROMPT * 15)[:290]
    turn = [*long[:286], 3, 1, 4, *PROMPT]
    with load(path, n_ctx=512) as llm:
        take(llm, 9, long)
        llm.session.reset_stats()
        got = take(llm, 12, turn)
        assert llm.mtp_stats.prefilled == len(turn) - (290 - 64)
        assert take(llm, 12, turn) == got  # the same prompt again
        assert llm.mtp_stats.prefilled == 2 * (len(turn) - (290 - 64))
        assert take(llm, 12, PROMPT) == take(llm, 12, PROMPT)
        llm.session.reset_stats()
        assert take(llm, 12, turn) == got  # nothing of it is left
        assert llm.mtp_stats.prefilled == len(turn)
        (kept,) = llm._prompts.fitting(llm.session)
    with pytest.raises(NativeError, match="closed"):
        _ = kept.handle
    for options in ({"keep_prompt": False}, {"depth": 0}):
        with load(path, n_ctx=512, **options) as llm:
            take(llm, 9, long)
            assert take(llm, 12, turn) == got
            kept_now = llm._prompts.fitting(llm.session)
            assert bool(kept_now) == ("keep_prompt" not in options)


def test_the_checkpoints_of_several_prompts(dial: Dial) -> None:
    """An agent's tool calls are prompts; the next message of the user drops what it thought before.

    When there are too many, the one that follows another most closely is dropped, never the newest.
    """
    path = dial("tiny")
    text = random_tokens(3000, 9, 120)
    with load(path, n_ctx=4096, n_threads=1) as llm:
        for end in (600, 900, 1500, 1800):
            take(llm, 2, text[:end])
        lengths = [c.length for c in llm._prompts.fitting(llm.session)]
        assert lengths == [600 - 64, 900 - 64, 1500 - 64, 1800 - 64]
        take(llm, 2, text[:2700])
        lengths = [c.length for c in llm._prompts.fitting(llm.session)]
        assert lengths == [600 - 64, 1500 - 64, 1800 - 64, 2700 - 64]
        llm.session.reset_stats()
        other = [*text[:1500], 121, 122, 123]
        got = take(llm, 8, other)
        assert llm.mtp_stats.prefilled == len(other) - (1500 - 64)
        lengths = [c.length for c in llm._prompts.fitting(llm.session)]
        assert lengths == [600 - 64, 1500 - 64]
        llm.reset()
        assert llm._prompts.fitting(llm.session) == []
        assert take(llm, 8, other) == got
    with pytest.raises(NativeError, match="keep_prompt: expected 0 or more, found -1"):
        load(path, keep_prompt=-1)


def test_a_full_context_ends_as_llama_cpp_does(dial: Dial) -> None:
    path = dial("tiny")
    with plain(path) as theirs, load(path, n_ctx=200, depth=5) as ours:
        answers: list[Any] = [
            llm.create_completion(PROMPT, max_tokens=None, temperature=0) for llm in (theirs, ours)
        ]
        want, got = answers
        assert got["choices"] == want["choices"]
        assert got["usage"] == want["usage"]
        assert got["choices"][0]["finish_reason"] == "length"
        with pytest.raises(ContextFullError):
            take(ours, 10_000)
        assert take(ours, 3) == take(ours, 3)


def test_the_variable_turns_drafts_off(
    models: Models, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(dial("tiny"), depth=0) as llm:
        want = take(llm, 10)
        assert llm.mtp_stats.drafted == ()
    monkeypatch.setenv("MTP_GGUF_DISABLE", "1")
    with load(dial("tiny"), depth=3) as llm:
        assert take(llm, 10) == want
        assert (llm.depth, llm.head) == (0, None)
    with load(models.gguf("dense-no-mtp", "Q4_K_M", "F16")) as llm:
        assert llm.depth == 0


def test_the_trunk_is_loaded_without_its_mtp_layer(
    dial: Dial, capfd: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp skips the tensors of the MTP block and no others."""
    with open_gguf(dial("tiny")) as file:
        layers = file.integer("qwen35.block_count")
        assert layers
        block = {t.name for t in file.tensors if t.name.startswith(f"blk.{layers - 1}.")}
    with load(dial("tiny"), verbose=True) as ours:
        assert ours.head is not None
        assert ours.head.mapped_bytes > ours.head.weight_bytes
    assert set(re.findall(r"model has unused tensor (\S+)", capfd.readouterr().err)) == block


def test_errors_carry_llama_cpps_log(models: Models, rewrite: Rewrite, tmp_path: Path) -> None:
    broken = rewrite(models.gguf("dense-tied"), tensors={"blk.0.ffn_gate.weight": None})
    with pytest.raises(ModelRefusedError, match=r"(?s)Failed to load.*\n.*blk\.0\.ffn_gate"):
        load(broken)
    with pytest.raises(ModelRefusedError, match="does not exist"):
        load(tmp_path / "absent.gguf")


@pytest.mark.stock
@pytest.mark.parametrize("layout", ["table", "sidecar"])
def test_layouts_that_stock_llama_cpp_cannot_load(models: Models, layout: str) -> None:
    """They work as heads of a trunk; loaded as a model, the error says what to do."""
    trunk = models.gguf("dense-tied", "Q4_K_M", "F16")
    choice = HeadChoice.ALONE if layout == "sidecar" else HeadChoice.WITH_TRUNK
    head = models.gguf("dense-tied", "Q4_K_M", "F16", layout, choice)
    with load(trunk, depth=0) as plain_llm, load(trunk, mtp_head=str(head)) as llm:
        assert llm.head is not None
        assert (llm.head.layout, llm.head.n_draft_vocab) == (layout, 324)
        assert take(llm, 12) == take(plain_llm, 12)
        assert llm.mtp_stats.drafted[0] > 0
    if layout == "table" and replays("qwen35", 0):  # the fast libraries
        with load(trunk, depth=0) as plain_llm, load(head) as llm:
            assert take(llm, 12) == take(plain_llm, 12)
        return
    alone = "expected a model, found only an MTP head"  # at depth 0 llama.cpp would crash
    said = alone if layout == "sidecar" else "stored as a table, .*`mtp-gguf info`"
    for depth in (0, 3):
        with pytest.raises(ModelRefusedError, match=said):
            load(head, depth=depth)


def test_a_failed_decode_carries_the_log_too(dial: Dial) -> None:
    """The trunk's memory was changed without the session and without calling sync()."""
    with load(dial("tiny")) as llm:
        want = take(llm, 9)
        one = (llama_cpp.llama_token * 1)(3)
        assert llama_cpp.llama_decode(llm.ctx, llama_cpp.llama_batch_get_one(one, 1)) == 0
        with pytest.raises(NativeError, match=r"(?s)llama_decode returned -1 .*\n  .*position"):
            llm.session.decode([1, 2])
        llm.reset()
        assert take(llm, 9) == want


def test_wrong_options(dial: Dial) -> None:
    for options, text in (
        ({"depth": 17}, 'depth: expected 0 to 16 or "auto", found 17'),
        ({"depth": -1}, 'depth: expected 0 to 16 or "auto", found -1'),
        ({"rollback": "magic"}, "rollback: expected one of snapshot"),
        ({"embedding": True}, "embedding=True: expected a plain"),
        ({"vocab_only": True}, "vocab_only=True: expected a plain"),
        ({"busy": "later"}, 'busy: expected "wait" or "raise", found'),
        ({"draft_model": object()}, "draft_model: expected None"),
        ({"mtp_device": "CUDA9"}, r"mtp_device: expected one of .*CPU.*, found 'CUDA9'"),
        ({"n_gpu_layers": -2}, r"n_gpu_layers: expected -1 \(all\) to 2147483647, found -2"),
        ({"n_gpu_layers": 2**32}, "n_gpu_layers: expected -1 .* found 4294967296"),
        ({"n_gpu_layers": "all"}, "n_gpu_layers: expected -1 .* found 'all'"),
        ({"split_mode": 4}, r"split_mode: expected one of 0 \(none\), 1 \(layer\), .*, found 4"),
        ({"main_gpu": -1}, "main_gpu: expected 0 or more, found -1"),
        ({"main_gpu": "first"}, "main_gpu: expected 0 or more, found 'first'"),
        ({"tensor_split": [3, -1]}, r"tensor_split: expected numbers .* found \[3, -1\]"),
        ({"tensor_split": [0, 0]}, r"tensor_split: .* one is not 0, found \[0, 0\]"),
        ({"n_cpu_moe": -1}, "n_cpu_moe: expected 0 to 2147483647, found -1"),
        ({"tensor_overrides": {"exps": "GPU"}}, r"tensor_overrides\['exps'\]: .*CPU.*'GPU'"),
        ({"tensor_overrides": {"": "CPU"}}, "tensor_overrides: expected a regular expression"),
        ({"tensor_overrides": {"(": "CPU"}}, "Mismatched '\\('"),
    ):
        with pytest.raises(NativeError, match=text):
            load(dial("tiny"), **options)


def test_wrong_arguments_of_completions(dial: Dial) -> None:
    found: Any
    with load(dial("tiny")) as llm:
        for name, expected, values in (
            (
                "prompt",
                "one text, or the tokens of one in a list",
                (None, 5, ["a"], ["a", 5], b"a"),
            ),
            ("max_tokens", "a number", ("x", [])),
            ("temperature", "a number", ("hot",)),
            ("top_k", "a number", ("1",)),
            ("logprobs", "a number", ("x",)),
            ("logprobs", "0 or more", (-1,)),
            ("logit_bias", "numbers by token", ("x", {5: "x"}, [5])),
            ("stop", "text or a list of texts", (5, [5])),
            ("grammar", "a LlamaGrammar", ('root ::= "x"',)),
        ):
            for found in values:
                with pytest.raises(NativeError) as caught:
                    llm.create_completion(**{"prompt": "aha", "max_tokens": 2, name: found})
                assert str(caught.value) == f"{name}: expected {expected}, found {found!r}"
        numbers: Any = {"temperature": np.float32(0), "max_tokens": np.int64(2)}
        assert llm.create_completion(PROMPT, **numbers)["usage"]["completion_tokens"] == 2


@pytest.mark.skipif(places.find_gpu() is not None, reason="there is a GPU")
def test_layers_on_a_gpu_where_there_is_none(dial: Dial) -> None:
    """They stay on the CPU, as in llama.cpp, and a warning says so."""
    with (
        pytest.warns(UserWarning, match="n_gpu_layers=99: llama.cpp found no GPU"),
        load(dial("tiny"), n_gpu_layers=99, main_gpu=0) as llm,
    ):
        assert len(take(llm, 5)) == 5


@pytest.mark.parametrize(
    ("shape", "why"),
    [("tiny", "the model has no experts"), ("tiny-moe", "all layers run on the CPU")],
)
def test_experts_that_are_on_the_cpu_anyway(dial: Dial, shape: str, why: str) -> None:
    match = f"n_cpu_moe: has no effect, because {why}"
    with pytest.warns(UserWarning, match=match) as notes, load(dial(shape), n_cpu_moe=3):
        assert len(notes) == 1


def test_an_abandoned_model_is_freed(dial: Dial) -> None:
    llm = MTPLlama(str(dial("tiny")), n_ctx=64, n_threads=1, n_threads_batch=1)
    take(llm, 3)
    handle = llm.session.handle
    del llm
    gc.collect()
    assert not handle


def test_a_second_thread_is_refused(dial: Dial) -> None:
    """While one thread decodes, another can neither use the session nor close it."""
    with load(dial("tiny"), n_ctx=2048) as llm:
        want = take(llm, 3)
        long = (PROMPT * 100)[:2000]
        refused: set[str] = set()

        def intrude() -> None:
            while thread.is_alive():
                for name, call in (("length", llm.session.length), ("close", llm.close)):
                    try:
                        call()
                    except NativeError as error:
                        refused.add(f"{name}: {error}")
                    else:
                        assert name == "length"  # between two calls of the other thread
                if len(refused) == 2:
                    return

        llm.reset()
        thread = threading.Thread(target=llm.session.decode, args=[long])
        thread.start()
        intrude()
        thread.join()
        assert refused == {
            f"{name}: the session is in use by another thread" for name in ("length", "close")
        }
        assert llm.session.length() == len(long)
        llm.reset()
        assert take(llm, 3) == want


def test_an_interrupt_leaves_the_model_usable(dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt right after a step, before Python has stored its tokens."""
    with load(dial("tiny")) as llm:
        want = take(llm, 20)
        original = llm.session.step
        calls = itertools.count()

        def interrupted(*args: Any, **kwargs: Any) -> list[int]:
            result = original(*args, **kwargs)
            if next(calls) == 3:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(llm.session, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            take(llm, 20)
        monkeypatch.undo()
        assert take(llm, 20) == want


class InterruptedScores:
    """Logits whose conversion, in llama_cpp's own Python code, is interrupted."""

    def __init__(self, logits: Any) -> None:
        self.logits = np.array(logits)

    def __array__(self, *_: Any, **__: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return self.logits


def fail(_: Any) -> Any:
    raise ValueError


def interrupt(_: Any) -> Any:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("act", "error"),
    [(fail, ValueError), (interrupt, KeyboardInterrupt), (InterruptedScores, KeyboardInterrupt)],
)
def test_exceptions_of_logits_processors_propagate(
    dial: Dial, act: Callable[[Any], Any], error: type[BaseException]
) -> None:
    """The processor is called from C; a signal during the call is a KeyboardInterrupt in it."""
    calls = itertools.count()

    def processor(_: Any, logits: Any) -> Any:
        return act(logits) if next(calls) == 5 else logits

    with load(dial("tiny")) as llm:
        want = take(llm, 12)
        llm.reset()
        with pytest.raises(error):
            take(llm, 12, logits_processor=llama_cpp.LogitsProcessorList([processor]))
        assert llm.n_tokens == llm.session.length()
        assert take(llm, 12) == want


@pytest.mark.filterwarnings("ignore:n_cpu_moe")
def test_pickles_like_llama_cpp(dial: Dial) -> None:
    """With everything on the CPU overrides change no text."""
    path, cycle = dial("tiny-moe"), dial.successors("tiny-moe")
    options = {"rollback": "host", "n_cpu_moe": 1, "tensor_overrides": {"ffn_.*_exps": "CPU"}}
    with (
        load(path, depth=2, **options) as llm,
        closing(pickle.loads(pickle.dumps(llm))) as again,
    ):
        state = again.__getstate__()
        assert (state["depth"], state["rollback"], len(again._overrides)) == (2, "host", 3)
        for tokens in (take(llm, 12), take(again, 12)):
            assert [cycle[t] for t in tokens[:-1]] == tokens[1:]


@pytest.mark.stock
def test_the_command(dial: Dial) -> None:
    words = ("generate", dial("tiny"), "-p", "aha", "-n", "24", "--ctx", "128", "-t", "1")
    drafted = invoke(*words, "--stats")
    assert drafted.exit_code == 0
    assert drafted.stdout == invoke(*words, "--depth", "0").stdout
    assert "accepted by position: " in drafted.stderr
    assert "24 tokens in" in drafted.stderr
    record = json.loads(invoke(*words, "--json").stdout)
    assert record["text"] + "\n" == drafted.stdout
    assert record["cycles"] < 24


@pytest.mark.parametrize(
    ("loader", "huge"),
    [
        (load, True),
        (partial(load, use_mmap=False), False),
        (partial(BenchModel, n_ctx=64, threads=1), True),
    ],
)
def test_a_file_that_is_mapped_is_in_huge_pages(
    loader: Callable[[Path], AbstractContextManager[object]],
    huge: bool,
    models: Models,
    tmp_path: Path,
) -> None:
    contents = models.gguf("demo", "Q4_K_M", "F16").read_bytes()
    path = in_small_pages(tmp_path / "model.gguf", contents)
    with loader(path):
        assert (in_huge_pages(path) > 0.5) == huge
