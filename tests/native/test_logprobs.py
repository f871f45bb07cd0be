"""Log-probabilities, `echo` and `max_tokens=0` of completions, as evaluation harnesses ask for."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.native import NativeError
from mtp_gguf.native.llama import generation as llama_generation
from mtp_gguf.native.llama.logprobs import TokenLogprobs
from mtp_gguf.native.runtime import llama_cpp
from support import generation
from support.gguf_files import Rewrite
from support.models import DEMO, Models

PROMPT = 'def add(a, b):\n    """Return the sum, of a and b."""\n'
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "logprobs": 3}
load = partial(generation.load, depth=3)


@pytest.fixture(scope="module")
def demo(models: Models) -> Path:
    return models.gguf("demo", "F32", "F32")


def complete(llm: Any, prompt: Any = PROMPT, **options: Any) -> Any:
    answer = llm.create_completion(prompt, **{**GREEDY, **options})
    json.dumps(answer if isinstance(answer, dict) else None)
    return answer


def streamed(llm: Any, prompt: Any = PROMPT, **options: Any) -> dict[str, Any]:
    """The choice of a streamed completion, put together."""
    whole: dict[str, Any] = {"text": "", "logprobs": {}}
    for chunk in complete(llm, prompt, stream=True, **options):
        json.dumps(chunk)
        choice = chunk["choices"][0]
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"].setdefault(name, []).extend(values)
    return whole


def assert_close(got: dict[str, Any], want: dict[str, Any], atol: float = 0.0) -> None:
    assert got["tokens"] == want["tokens"]
    assert got["text_offset"] == want["text_offset"]
    for name in ("token_logprobs", "top_logprobs"):
        for ours, theirs in zip(got[name], want[name], strict=True):
            assert ours == pytest.approx(theirs, abs=atol)


# ------------------------------------------------------------------------------- the prompt


@pytest.mark.thorough
@pytest.mark.upstream
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the `upstream` extra")
@pytest.mark.filterwarnings("ignore")
def test_prompts_as_transformers_computes_them(demo: Path) -> None:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415  (slow)

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        every = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
    want = every[torch.arange(ids.shape[1] - 1), ids[0, 1:]].tolist()
    with load(demo) as llm:
        found = complete(llm, max_tokens=0, echo=True)["choices"][0]
    assert found["text"] == PROMPT
    logprobs = found["logprobs"]
    assert "".join(logprobs["tokens"]) == PROMPT
    assert [PROMPT[at:] for at in logprobs["text_offset"]] == [
        PROMPT[len("".join(logprobs["tokens"][:i])) :] for i in range(ids.shape[1])
    ]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(want, abs=1e-3)
    best = every.max(dim=-1).values.tolist()
    for top, value in zip(logprobs["top_logprobs"][1:], best[:-1], strict=True):
        assert max(top.values()) == pytest.approx(value, abs=1e-3)
        assert len(top) in (3, 4)  # the prompt's own token may be among the likeliest


@pytest.mark.parametrize(
    "options",
    [{"depth": 0}, {"n_batch": 7}, {"logits_all": True}, {"rows": 3}, {"plain": True}],
    ids=str,
)
def test_prompts_in_all_ways_of_loading(
    options: dict[str, Any], demo: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(demo) as llm:
        want = complete(llm, echo=True)["choices"][0]
    if rows := options.pop("rows", 0):
        monkeypatch.setattr(llama_generation, "LOGITS_BYTES", rows * 4 * llm._n_vocab)
    if options.pop("plain", False):  # a model without a head runs on llama_cpp's own methods
        demo = models.convert("demo", "--quant", "F32", "--no-mtp")
        with pytest.warns(UserWarning, match="decoding without drafts"):
            opened = load(demo, depth=None, lookup=False, logits_all=True)
    else:
        opened = load(demo, **options)
    with opened as llm:
        got = complete(llm, echo=True)["choices"][0]
        assert got["text"] == want["text"]
        assert_close(got["logprobs"], want["logprobs"], 1e-3)
        again = streamed(llm, echo=True)
        assert again["text"] == want["text"]
        assert_close(again["logprobs"], want["logprobs"], 1e-3)


def test_prompts_with_a_first_token_as_llama_cpp_has_them(demo: Path, rewrite: Rewrite) -> None:
    """Where the tokenizer adds none, llama_cpp gives each token the values of the next one."""
    keys = {
        "tokenizer.ggml.add_bos_token": Value(ValueType.BOOL, True),
        "tokenizer.ggml.bos_token_id": Value(ValueType.U32, 0),
    }
    path = rewrite(demo, keys)
    with generation.plain(path, logits_all=True) as llm:
        want: Any = llm.create_completion(PROMPT, **GREEDY, echo=True)
    with load(path) as llm:
        got = complete(llm, echo=True)
    assert got["usage"] == want["usage"]
    assert got["choices"][0]["text"] == want["choices"][0]["text"]
    wanted = want["choices"][0]["logprobs"]
    n = len(wanted["tokens"])
    found = got["choices"][0]["logprobs"]
    assert found["tokens"][n:] == [""]  # the end of text, which llama_cpp leaves out
    assert_close({name: values[:n] for name, values in found.items()}, wanted, 1e-3)


def test_prompts_of_tokens(demo: Path) -> None:
    with load(demo) as llm:
        want = complete(llm, echo=True)["choices"][0]
        ids = llm.tokenize(PROMPT.encode(), add_bos=False)
        got = complete(llm, ids, echo=True)["choices"][0]
        assert got == want
        assert complete(llm, ids)["choices"][0]["text"] == want["text"][len(PROMPT) :]


def test_echo_without_logprobs(demo: Path) -> None:
    with load(demo) as llm:
        want = complete(llm, logprobs=None)["choices"][0]["text"]
        for read in (streamed, lambda *a, **o: complete(*a, **o)["choices"][0]):
            got = read(llm, logprobs=None, echo=True)
            assert got["text"] == PROMPT + want
            assert not got["logprobs"]


def test_the_next_prompt_continues(demo: Path) -> None:
    """What was read for its log-probabilities is as good a beginning as any."""
    with load(demo) as llm:
        want = complete(llm, PROMPT * 3, logprobs=None)["choices"][0]["text"]
        llm.reset()
        complete(llm, PROMPT, echo=True, max_tokens=0)
        assert llm.n_tokens
        evaluated = llm.mtp_stats.prefilled
        assert complete(llm, PROMPT * 3, logprobs=None)["choices"][0]["text"] == want
        assert llm.mtp_stats.prefilled - evaluated < len(llm.tokenize(PROMPT.encode() * 3)) - 9


# ---------------------------------------------------------------------- what is generated


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "seed": 4}, {"logit_bias": {65: 1.0}}]
)
def test_generated_tokens_need_no_logits_all(demo: Path, options: dict[str, Any]) -> None:
    with load(demo, logits_all=True, rejection=False) as llm:
        want = complete(llm, **options)["choices"][0]
    with load(demo, rejection=False) as llm:
        got = complete(llm, **options)["choices"][0]
        assert got["text"] == want["text"]
        assert_close(got["logprobs"], want["logprobs"], 1e-4)
        again = streamed(llm, **options)
        assert again["text"] == want["text"]
        assert_close(again["logprobs"], want["logprobs"], 1e-4)
        assert llm.mtp_stats.cycles


def test_commas_and_characters_of_several_tokens(demo: Path) -> None:
    """llama_cpp takes commas, whose id is its default of a first token, for a first token."""
    text = "a, b, €, \U0001f600, ß,"
    grammar = llama_cpp.llama_grammar.LlamaGrammar.from_string(f'root ::= "{text}"', verbose=False)
    with load(demo) as llm:
        want = complete(llm, grammar=grammar, max_tokens=64)["choices"][0]
        got = streamed(llm, grammar=grammar, max_tokens=64)
    assert got["text"] == want["text"] == text
    assert want["logprobs"]["tokens"].count(",") + sum(
        t.count(",") for t in want["logprobs"]["tokens"] if t != ","
    ) == text.count(",")
    assert got["logprobs"]["tokens"] == want["logprobs"]["tokens"]
    assert got["logprobs"]["token_logprobs"] == want["logprobs"]["token_logprobs"]


def test_streams_have_the_tokens_of_a_stop_string(demo: Path) -> None:
    with load(demo) as llm:
        text = complete(llm)["choices"][0]["text"]
        for stop in (text[4:6], text[3:5]):
            want = complete(llm, stop=stop)["choices"][0]
            got = streamed(llm, stop=stop)
            assert got["text"] == want["text"]
            for name in ("tokens", "token_logprobs", "top_logprobs"):
                assert got["logprobs"][name] == want["logprobs"][name]


def test_chats(demo: Path) -> None:
    messages: Any = [{"role": "user", "content": "What does os.path.join do?"}]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "logprobs": True}
    with load(demo) as llm:
        whole = llm.create_chat_completion(messages, top_logprobs=2, **options)["choices"][0]
        chunks = llm.create_chat_completion(messages, top_logprobs=2, stream=True, **options)
        parts = [chunk["choices"][0] for chunk in chunks]
        bare = llm.create_chat_completion(messages, **options)["choices"][0]
    listed = whole["logprobs"]["content"]
    assert "".join(entry["token"] for entry in listed) == whole["message"]["content"]
    assert [e for p in parts if p["logprobs"] for e in p["logprobs"]["content"]] == listed
    assert all(len(entry["top_logprobs"]) == 2 for entry in listed)
    assert [e["logprob"] for e in bare["logprobs"]["content"]] == [e["logprob"] for e in listed]
    json.dumps([whole, parts, bare])


@pytest.mark.parametrize("plain", [False, True])
def test_no_tokens(demo: Path, models: Models, plain: bool) -> None:
    if plain:
        path = models.convert("demo", "--quant", "F32", "--no-mtp")
        with pytest.warns(UserWarning, match="decoding without drafts"):
            opened = load(path, depth=None, lookup=False)
    else:
        opened = load(demo)
    with opened as llm:
        answer = complete(llm, max_tokens=0, logprobs=None)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert answer["usage"]["completion_tokens"] == 0
        got = streamed(llm, max_tokens=0, logprobs=None)
        assert (got["text"], got["finish_reason"]) == ("", "length")
        assert streamed(llm, max_tokens=0, logprobs=None, echo=True)["text"] == PROMPT
        messages: Any = [{"role": "user", "content": "x"}]
        answer = llm.create_chat_completion(messages, max_tokens=0)
        assert answer["choices"][0]["message"]["content"] == ""
        assert complete(llm, max_tokens=3, logprobs=None)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_prompts_of_tokens_that_do_not_exist(demo: Path, token: int) -> None:
    with load(demo) as llm:
        want = complete(llm)
        for echo in (False, True):
            with pytest.raises(NativeError):
                complete(llm, [5, token, 5], echo=echo)
        assert complete(llm)["choices"] == want["choices"]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("top", [0, 1, 4, 50_000])
@pytest.mark.parametrize("size", [1, 15, 1000, 1024, 1025, 40_000])
def test_values(size: int, top: int, threads: int) -> None:
    """Against numbers in double precision, from logits of any size; equal ones in their order."""
    logits = np.random.default_rng(size).normal(0, 30, (5, size)).astype(np.float32) + 500
    logits[1, size // 2 :] = logits[1, size // 2]
    logits[2, :-1] = -np.inf
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    want = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    tokens = [(7 + i) % size for i in range(5)]
    record = TokenLogprobs(top, prompt=True, threads=threads)
    record.add_prompt([*logits], tokens)
    for row, (entry, token) in enumerate(zip(record.prompt, tokens, strict=True)):
        assert entry.token == token
        assert entry.logprob == pytest.approx(want[row, token], abs=1e-4)
        order = np.argsort(-logits[row], kind="stable")[:top]
        assert [i for i, _ in entry.top] == order.tolist()
        assert [p for _, p in entry.top] == pytest.approx(want[row, order].tolist(), abs=1e-4)
