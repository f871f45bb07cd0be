"""`echo`, `logprobs` and `max_tokens=0` of /v1/completions: the answers of MTPLlama, over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native import MTPLlama
from support.generation import load
from support.models import DEMO, Models
from support.real_server import Server, chunks_of, opened, post

pytestmark = pytest.mark.server

SHORT = 'def add(a, b):\n    """Return the sum, of a and b."""\n'
EURO = "price = '5 € or ß'  # \N{GRINNING FACE}\nfor "
LONG = "".join(f"def f{i}(a, b):\n    return a * {i} + b\n" for i in range(40))
IDS = [5, 6, 700, 9, 9, 40]
CLOSE = 1e-3  # rounding depends on the size of the batch


@pytest.fixture(scope="module")
def demo(models: Models) -> Path:
    return models.gguf("demo", "F32", "F32")


@pytest.fixture(scope="module", params=["--depth 3", "--no-draft"])
def port(server: Server, demo: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    options = request.param.split()
    with server.running(demo, "--parallel", 2, "--kv-unified", options=options) as client:
        yield client.port


@pytest.fixture(scope="module")
def python(demo: Path) -> Iterator[MTPLlama]:
    with load(demo, n_ctx=2048) as llm:
        yield llm


def ask(port: int, prompt: Any, **options: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, **options}
    status, found = post(port, "/v1/completions", body)
    assert status == 200, found
    answer: dict[str, Any] = found
    return answer


def streamed(port: int, prompt: Any, **options: Any) -> dict[str, Any]:
    """The answer of a stream, put together."""
    whole: dict[str, Any] = {"text": "", "logprobs": {}}
    body = {"prompt": prompt, "temperature": 0, "stream": True, **options}
    with opened(port, "/v1/completions", body) as answer:
        for chunk in chunks_of(answer):
            [choice] = chunk["choices"]
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"].setdefault(name, []).extend(values)
    return {"choices": [whole]}


def check(found: dict[str, Any], wanted: Any) -> None:
    """Compare choices; `content` is the server's own."""
    for name in ("text", "finish_reason"):
        assert found[name] == wanted[name]
    for name in ("tokens", "text_offset"):
        assert found["logprobs"][name] == wanted["logprobs"][name]
    for name in ("token_logprobs", "top_logprobs"):
        pairs = zip(found["logprobs"][name], wanted["logprobs"][name], strict=True)
        for ours, theirs in pairs:
            assert ours == pytest.approx(theirs, abs=CLOSE)


@pytest.mark.sample(3)
@pytest.mark.parametrize("send", [ask, streamed])
@pytest.mark.parametrize("max_tokens", [0, 12])
@pytest.mark.parametrize("prompt", [SHORT, EURO, LONG, IDS], ids=["short", "euro", "long", "ids"])
def test_prompts_have_the_log_probabilities_of_python(
    port: int, python: MTPLlama, prompt: Any, max_tokens: int, send: Callable[..., dict[str, Any]]
) -> None:
    options: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": 3, "echo": True}
    [wanted] = python.create_completion(prompt, temperature=0, **options)["choices"]
    for _ in range(2):  # also where the slot has the prompt already
        [found] = send(port, prompt, **options)["choices"]
        check(found, wanted)


def test_prompts_of_a_batch_are_as_each_alone(port: int) -> None:
    prompts = [SHORT, EURO, LONG]
    options: dict[str, Any] = {"max_tokens": 1, "logprobs": 1, "echo": True}
    together = ask(port, prompts, **options)["choices"]
    assert [choice["index"] for choice in together] == [0, 1, 2]
    for found, prompt in zip(together, prompts, strict=True):
        check(found, ask(port, prompt, **options)["choices"][0])


def test_several_answers_to_a_prompt_begin_with_it(port: int) -> None:
    found = ask(port, SHORT, max_tokens=2, logprobs=1, echo=True, n=2)["choices"]
    assert len(found) == 2
    for choice in found:
        check(choice, found[0])
    assert found[0]["logprobs"]["tokens"][0] == "def"


def test_a_prompt_is_repeated_without_log_probabilities(port: int) -> None:
    [found] = ask(port, SHORT, max_tokens=2, echo=True)["choices"]
    assert found["text"].startswith(SHORT)
    assert found["logprobs"] is None


def test_no_likeliest_tokens_are_asked_for(port: int) -> None:
    """OpenAI's `logprobs=0` has the log-probabilities of the tokens themselves."""
    [found] = ask(port, IDS, max_tokens=1, logprobs=0, echo=True)["choices"]
    assert found["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in found["logprobs"]["token_logprobs"][1:])


def test_no_token_is_generated_if_none_is_asked_for(port: int) -> None:
    for prompt in (SHORT, IDS):
        found = ask(port, prompt, max_tokens=0)
        assert found["choices"][0]["text"] == ""
        assert found["choices"][0]["finish_reason"] == "length"
        assert found["usage"]["completion_tokens"] == 0


@pytest.mark.upstream
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the `upstream` extra")
@pytest.mark.filterwarnings("ignore")
def test_prompts_as_transformers_computes_them(port: int) -> None:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415  (slow)

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    for prompt in (SHORT, LONG):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            every = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
        wanted = every[torch.arange(ids.shape[1] - 1), ids[0, 1:]].tolist()
        [found] = ask(port, prompt, max_tokens=0, logprobs=1, echo=True)["choices"]
        assert found["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, rel=1e-3, abs=CLOSE)
