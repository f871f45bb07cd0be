"""The plugin for Simon Willison's llm, in the real llm: its commands and its Python interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llm
import pytest
from click.testing import CliRunner, Result
from llm.cli import cli

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.plugins.llm import GgufModel, loaded
from support.commands import run_python, succeed
from support.gguf_files import edited
from support.models import Models

QUESTION = "def is_prime(n):"
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ctx": 512, "depth": 2}
WORDS = [word for name, value in OPTIONS.items() for word in ("-o", name, str(value))]


@pytest.fixture(scope="module")
def demo(models: Models) -> Path:
    return models.convert("demo", "--mtp-f16")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """llm's folder of settings and logs."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    return tmp_path / "llm"


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    loaded.close()


def run(*words: object, text: str = "") -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], input=text)


def said(*words: object, text: str = "") -> str:
    """What a command of llm prints."""
    done = run(*words, text=text)
    assert done.exit_code == 0, done.output
    return done.stdout


def generated(demo: Path, *messages: str) -> str:
    """The answer of `mtp-gguf generate` to a conversation that begins with a system message."""
    roles = ("system", *("user", "assistant") * len(messages))
    parts = [f"<|im_start|>{r}\n{m}<|im_end|>\n" for r, m in zip(roles, messages, strict=False)]
    prompt = "".join(parts) + "<|im_start|>assistant\n"
    options = ("--temp", 0, "-n", 12, "--ctx", 512)
    return succeed("generate", demo, "-p", prompt, *options).strip()


def test_a_registered_model_answers(demo: Path) -> None:
    assert said("mtp-gguf", "register", demo, "--name", "demo") == f"demo: {demo.resolve()}\n"
    assert "mtp-gguf: demo\n" in said("models")
    first = said("-m", "demo", "-s", "Write.", *WORDS, text=QUESTION).strip()
    assert first == generated(demo, "Write.", QUESTION)
    second = said("-c", "hello", *WORDS).strip()
    assert second == generated(demo, "Write.", QUESTION, first, "hello")
    logged = json.loads(said("logs", "--json", "-n", "1"))[0]
    assert logged["output_tokens"] == 12
    assert said("mtp-gguf", "unregister", "demo") == ""
    assert "mtp-gguf: demo\n" not in said("models")


def test_a_conversation_keeps_the_context(demo: Path) -> None:
    conversation = GgufModel("demo", str(demo)).conversation()
    text = "What does this program do? " * 20
    first = conversation.prompt(text, system="Write.", **OPTIONS)
    pieces = list(first)
    assert len(pieces) > 5  # while it is generated
    with loaded.use(GgufModel("demo", str(demo)).settings(first.prompt.options)) as chat:
        before = chat.llm.mtp_stats.prefilled
        second = conversation.prompt("hello", **OPTIONS)
        assert second.text().strip() == generated(demo, "Write.", text, "".join(pieces), "hello")
        assert second.usage().input > 100
        assert chat.llm.mtp_stats.prefilled - before < 20


def test_options_are_those_of_generate(demo: Path) -> None:
    settings = ("--temp", 20, "--top-k", 7, "--top-p", 0.9, "--seed", 5, "-n", 12)
    words = ("--ctx", 512, "--depth", 0, "--chat", "-p", "one two")
    hot = {**OPTIONS, "temperature": 20, "top_k": 7, "top_p": 0.9, "seed": 5, "depth": 0}
    model = GgufModel("demo", str(demo))
    answer = model.prompt("one two", **hot).text().strip()
    assert answer == succeed("generate", demo, *settings, *words).strip()
    for other in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1.0}, {"seed": 6}):
        assert model.prompt("one two", **{**hot, **other}).text().strip() != answer, other


def test_thinking_is_not_the_answer(demo: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>\n"
        "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
    )

    thinking = {"tokenizer.chat_template": Value(ValueType.STRING, template)}
    edited(demo, tmp_path / "model.gguf", metadata=thinking)
    response = GgufModel("thinks", str(tmp_path / "model.gguf")).prompt(
        QUESTION, system="Think.", **OPTIONS
    )
    kinds = {event.type for event in response.stream_events()}
    assert kinds == {"reasoning"}
    assert response.text() == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": 99}, 'depth: expected 0 to 16 or "auto", found 99'),
        ({"ctx": 256, "prompt": "word " * 400}, "the message: expected fewer than 256 tokens"),
    ],
)
def test_what_a_prompt_may_not_ask(options: dict[str, Any], words: str, demo: Path) -> None:
    asked = {"prompt": QUESTION, **OPTIONS, **options}
    with pytest.raises(llm.ModelError, match=words):
        GgufModel("demo", str(demo)).prompt(**asked).text()


def test_what_is_no_model(demo: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("text")
    for name in ("missing.gguf", "text.gguf", "."):
        done = run("mtp-gguf", "register", tmp_path / name)
        assert done.exit_code == 1
        assert done.output.startswith(f"Error: {tmp_path / name}".rstrip("/."))
    assert not (home / "mtp-gguf.json").exists()
    done = run("mtp-gguf", "unregister", "demo")
    assert done.output == "Error: demo: expected a registered model; there are: none\n"
    said("mtp-gguf", "register", demo, "--name", "demo")
    (home / "mtp-gguf.json").write_text("[]")
    done = run("models")  # the other models stay usable
    assert done.exit_code == 0
    assert "mtp-gguf.json: expected" in done.stderr
    with pytest.raises(llm.ModelError, match=r"gone\.gguf"):
        GgufModel("gone", str(tmp_path / "gone.gguf")).prompt(QUESTION).text()


def test_a_name_on_the_hub_is_registered_as_it_is() -> None:
    assert said("mtp-gguf", "register", "OWNER/NAME:Q4_K_M") == (
        "OWNER/NAME:Q4_K_M: OWNER/NAME:Q4_K_M\n"
    )


def test_nothing_else_imports_llm_and_llm_loads_no_llama_cpp(demo: Path, home: Path) -> None:
    run_python(
        "import sys; sys.modules['llm'] = None\n"
        "from mtp_gguf.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "assert 'mtp_gguf.plugins' not in sys.modules",
        *("generate", demo, "-p", "a", "-n", 2),
    )
    said("mtp-gguf", "register", demo, "--name", "demo")
    run_python(
        "import sys, llm; assert 'demo' in [m.model_id for m in llm.get_models()]\n"
        "assert not {'llama_cpp', 'huggingface_hub', 'mtp_gguf.cli'} & {*sys.modules}"
    )
