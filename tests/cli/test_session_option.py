"""`--session` of `generate` and `chat`: each run goes on where the last one ended."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native import MTPLlama
from mtp_gguf.native.sessions.session_file import read_header
from support.commands import check_refusal, invoke
from support.models import Models

PROMPT = "def is_prime(n):\n"


@pytest.fixture(scope="module")
def demo(models: Models) -> Path:
    return models.convert("demo", "--mtp-f16")


def generate(model: Path, *options: object) -> dict[str, Any]:
    words = ("generate", model, "-t", "1", "--ctx", "512", "--depth", 3, "--json")
    done = invoke(*words, *options)
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("option", ["--session", "--prompt-cache"])
def test_generate_goes_on(option: str, demo: Path, tmp_path: Path) -> None:
    """An empty prompt, and the text so far with more after it, are read from their end only."""
    file = tmp_path / "a.session"
    whole = generate(demo, "-p", PROMPT, "-n", 40)
    first = generate(demo, "-p", PROMPT, "-n", 20, option, file)
    assert first["text"] == whole["text"][: len(first["text"])]
    rest = generate(demo, "-p", "", "-n", 20, option, file)
    assert first["text"] + rest["text"] == whole["text"]
    assert rest["prefilled"] <= 1
    text = PROMPT + whole["text"] + "\n# and then\n"
    more = generate(demo, "-p", text, "-n", 20, option, file)
    assert more["prefilled"] < 20 < more["prompt_tokens"]
    other = generate(demo, "-p", "import ", "-n", 5, option, file)
    assert other["text"] == generate(demo, "-p", "import ", "-n", 5)["text"]
    assert read_header(file).n_tokens < 20


def test_saved_tokens_are_kept(demo: Path, tmp_path: Path) -> None:
    """A text can have several tokenizations; the session's own is the one that is not read again.

    The token that the program saved beside it is used only if the model has it.
    """
    file = tmp_path / "a.session"
    with closing(MTPLlama(str(demo), depth=0, n_ctx=512)) as llm:
        letters = [token for c in b"return" for token in llm.tokenize(bytes([c]), add_bos=False)]
        assert letters != llm.tokenize(b"return", add_bos=False)
        llm.eval(letters)
        llm.save_session(file, extra={"next": [10**9, -1]})
    before = file.read_bytes()
    for text, n in (("return", len(letters)), ("", len(letters)), ("return x", len(letters) + 1)):
        found = generate(demo, "-p", text, "-n", 1, "--session", file)
        assert found["prompt_tokens"] >= n
        assert text != "return x" or found["prefilled"] == found["prompt_tokens"] - len(letters)
        file.write_bytes(before)


def test_a_session_of_another_model_stays_as_it_is(
    demo: Path, models: Models, tmp_path: Path
) -> None:
    file = tmp_path / "a.session"
    generate(demo, "-p", PROMPT, "-n", 5, "--session", file)
    before = file.read_bytes()
    fits = ("as in the loaded model, found ",)
    for words, expected in (
        (("generate", models.gguf(), "-p", PROMPT, "--session", file), fits),
        (("chat", models.gguf(), "--session", file), fits),
        (("generate", demo, "-p", PROMPT, "--session", demo), ("a session file",)),
        (("chat", demo, "--session", file), ("a session of `mtp-gguf chat`",)),
        (("generate", demo, "-p", PROMPT, "--session", tmp_path / "no" / "a"), ("its folder",)),
    ):
        done = invoke(*words)
        check_refusal(done.exit_code, done.stderr, *expected)
    done = invoke("generate", demo, "-p", PROMPT, "--session", file, "--image", file)
    assert done.exit_code == 2
    assert file.read_bytes() == before


def test_a_session_that_cannot_be_saved_costs_no_text(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    words = ("-p", PROMPT, "-n", "5", "--ctx", "512", "--session", tmp_path / "a")
    done = invoke("generate", demo, *words)
    assert done.exit_code == 0
    assert done.stdout.strip()
    assert "the session is not saved: " in done.stderr
    assert "are free on its disk" in done.stderr
    assert not list(tmp_path.iterdir())


def chat(model: Path, *options: object, message: str) -> dict[str, Any]:
    words = ("--temp", "0", "--ctx", "1024", "--threads", "1", "-n", "12", "--depth", "3", "--json")
    done = invoke("chat", model, *words, *options, input=message)
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_chat_goes_on(demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.session"
    whole = chat(demo, message="def f(n):\ndef g(n):\n")
    chat(demo, "--session", file, message="def f(n):\n")
    found = chat(demo, "--session", file, message="def g(n):\n")
    assert found["messages"] == whole["messages"]
    assert len(found["messages"]) == 4
    saved = tmp_path / "b.session"
    chat(demo, "--session", file, message=f"/save {saved}\n")
    loaded = chat(demo, message=f"/load {saved}\n")
    assert loaded["messages"] == whole["messages"]


def test_conversations_by_name(
    demo: Path, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder = tmp_path / "data" / "mtp-gguf" / "chats"
    none = ("--continue: expected a conversation with this model", "--continue NAME")
    for words, expected in (
        (("--continue",), none),
        (("--continue", "../a"), ("expected a name",)),
    ):
        done = invoke("chat", demo, *words)
        check_refusal(done.exit_code, done.stderr, *expected)
    assert not folder.exists()
    whole = chat(demo, message="def f(n):\ndef g(n):\n")
    chat(demo, "--continue", "notes", message="def f(n):\n")
    assert folder.stat().st_mode & 0o77 == 0
    chat(demo, "--continue", "other", message="import os\n")
    os.utime(folder / "other.session", (1, 1))
    (folder / "foreign.session").write_bytes(b"hello")
    found = chat(demo, "--continue", "--seed", 1, message="def g(n):\n")
    assert found["messages"] == whole["messages"]
    assert chat(demo, "--continue", "notes", message="")["messages"] == whole["messages"]
    assert len(list(folder.iterdir())) == 3
    done = invoke("chat", models.gguf(), "--continue")
    check_refusal(done.exit_code, done.stderr, *none)
    done = invoke("chat", demo, "--continue", "notes", "--session", tmp_path / "a")
    assert done.exit_code == 2


def test_doctor_reads_a_session(demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.session"
    generate(demo, "-p", PROMPT, "-n", 5, "--session", file)
    header = read_header(file)
    done = invoke("doctor", file)
    assert done.exit_code == 0
    assert f"{file}: a session of {header.n_tokens} tokens" in done.stdout
    assert f"checksum {header.sections[1].checksum:08x} holds" in done.stdout
    fields = json.loads(invoke("doctor", file, "--json").stdout)
    assert (fields["kind"], fields["tokens"]) == ("session", header.n_tokens)
    assert fields["identity"] == header.identity
    assert fields["extra"] == ["next"]
    assert PROMPT not in json.dumps(fields)
    assert fields["earlier"] == []
    generate(demo, "-p", PROMPT * 60, "-n", 5, "--session", tmp_path / "b.session")
    (length,) = json.loads(invoke("doctor", tmp_path / "b.session", "--json").stdout)["earlier"]
    assert f"earlier ({length} tokens): " in invoke("doctor", tmp_path / "b.session").stdout
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = invoke("doctor", file)
    check_refusal(done.exit_code, done.stderr, "checkpoint: expected checksum")
