"""`mtp-gguf chat` on the demo model: through a pipe, and at a terminal as a user types."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.cli.conversation import Conversation
from mtp_gguf.cli.drafting_model import drafting_model
from mtp_gguf.cli.token_colors import style
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.model import Metadata
from mtp_gguf.native.chat.chat import Chat
from mtp_gguf.native.llama.sampling import Sampling
from support.commands import MAIN, check_refusal, invoke, spawn, succeed
from support.gguf_files import edited
from support.models import DEMO, Models

QUESTION = "def is_prime(n):"
ENDLESS = "1 1 1 1 1 1"  # the demo model answers with zeros until the context is full
OPTIONS = ("--temp", "0", "--ctx", "2048", "--threads", "1")
PATIENCE = 40.0


@pytest.fixture(scope="module")
def demo(models: Models) -> Path:
    return models.convert("demo", "--mtp-f16")


def piped(model: Path, text: str, *options: object) -> subprocess.CompletedProcess[str]:
    with spawn("chat", model, *OPTIONS, *options, stdin=subprocess.PIPE) as process:
        out, err = process.communicate(text, timeout=PATIENCE)
        return subprocess.CompletedProcess([], process.returncode, out, err)


class Terminal:
    """A chat in a terminal of its own. output: all that it has shown."""

    def __init__(
        self, model: Path, *options: object, shell: Sequence[str] = (), columns: int = 80
    ) -> None:
        """shell: a command that runs the words after it."""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        words = [sys.executable, "-c", MAIN, "chat", str(model), *OPTIONS, *map(str, options)]
        self.process = subprocess.Popen(
            [*shell, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # Ctrl-C goes to the session whose terminal it is.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
            # the terminal's width is its own, whatever that of the tests' is
            env={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
            | {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(theirs)
        self.output = ""
        self._seen = 0

    def until(self, pattern: str) -> str:
        """Read on to the next match; what was shown up to its end."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.compile(pattern).search(self.output, self._seen)):
            ready, _, _ = select.select([self._ours], [], [], deadline - time.monotonic())
            assert ready, f"{pattern!r} not in {self.output[self._seen :]!r}"
            self.output += os.read(self._ours, 1 << 16).decode(errors="replace")
        shown = self.output[self._seen : found.end()]
        self._seen = found.end()
        return shown

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> int:
        """Close the chat as a user does; its exit code."""
        self.type("\x04")
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


# What prompt_toolkit writes after a line was entered, and for an empty one that waits for input.
ACCEPTED = r"\x1b\[\?2004l"
PROMPT = r"\x1b\[\?2004h[^>]*>[^>]*\x1b\[\?25h"


@contextmanager
def terminal(model: Path, *options: object, waits: str = "", **how: Any) -> Iterator[Terminal]:
    """A chat that waits for a message. waits: what it shows before."""
    chat = Terminal(model, *options, **how)
    try:
        chat.until(r"Ctrl-D\s+ends\s+the\s+chat")
        chat.until(re.escape(waits))
        chat.until(PROMPT)
        yield chat
    finally:
        chat.close()


def saved(chat: Terminal, path: Path) -> list[dict[str, str]]:
    chat.type(f"/save {path}\r")
    chat.until("written: ")
    chat.until(PROMPT)
    messages: list[dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
    return messages


# ------------------------------------------------------------ through a pipe


def test_answers_are_those_of_generate_in_the_template(demo: Path) -> None:
    done = piped(demo, f"{QUESTION}\nhello\n", "--system", "Write.")
    assert done.returncode == 0, done.stderr
    parts = ["<|im_start|>system\nWrite.<|im_end|>\n"]
    answers = []
    for message in (QUESTION, "hello"):
        parts.append(f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n")
        found = json.loads(succeed("generate", demo, "-p", "".join(parts), *OPTIONS, "--json"))
        answers.append(found["text"].rstrip("\n"))
        parts.append(f"{answers[-1].strip()}<|im_end|>\n")
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)


def test_commands_and_long_messages_through_a_pipe(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    text = f"one\\\ntwo\n\n/save {path}\n/reset\n/nothing\n/stats\n/save {path}\n/save\n/exit\nno\n"
    done = piped(demo, text, "-n", 3)
    assert done.returncode == 0, done.stderr
    messages = json.loads(path.read_text(encoding="utf-8"))
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[0]["content"] == "one\ntwo"
    assert messages[1]["content"] == done.stdout.strip()
    for said in ("written", "forgotten", "/nothing: no such command", "3 tokens in", "exists"):
        assert said in done.stderr
    assert "/save: expected a file" in done.stderr
    assert "--overwrite" not in done.stderr  # which chat has not


def test_a_quoted_file_name(demo: Path, tmp_path: Path) -> None:
    names = ["my file.md", "my other file.md", "it's.md", "third file.md"]
    said = [
        f'"{tmp_path / names[0]}"',
        f"'{tmp_path / names[1]}'",
        *(tmp_path / n for n in names[2:]),
    ]
    done = piped(demo, "".join(f"/save {name}\n" for name in said))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_statistics_without_a_head(models: Models) -> None:
    model = models.convert("demo", "--no-mtp")
    done = piped(model, "hello\n/stats\n", "-n", 3)
    assert re.search(r"3 tokens in .* s, prompt included\n(.*\n)*no drafts made\n", done.stderr)


def test_reset_keeps_the_system_message(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    text = f"one\n/reset\n/save {path}\n"
    assert piped(demo, text, "--system", "Write.", "-n", 3).returncode == 0
    assert json.loads(path.read_text("utf-8")) == [{"role": "system", "content": "Write."}]


def test_the_conversation_as_json(demo: Path) -> None:
    done = piped(demo, f"{QUESTION}\n", "-n", 5, "--depth", 2, "--json")
    found = json.loads(done.stdout)
    assert [m["role"] for m in found["messages"]] == ["user", "assistant"]
    assert found["messages"][1]["content"]
    assert found["generated"] == 5
    assert sum(found["drafted"]) > 0


def test_old_messages_make_room_and_long_ones_are_refused(demo: Path) -> None:
    done = piped(demo, "hello\n" * 20 + f"{'word ' * 400}\n", "--ctx", "256", "-n", 8)
    assert re.search(r"the oldest \d+ messages no longer fit the context", done.stderr)
    assert len(done.stdout.splitlines()) >= 20
    last = done.stderr.splitlines(keepends=True)[-1]
    check_refusal(done.returncode, last, "expected fewer than 256 tokens", "raise --ctx")


def test_what_is_dropped_and_what_is_refused_leaves_whole_exchanges(demo: Path) -> None:
    with closing(drafting_model(str(demo), None, 0, 256, 1, 0, 0)) as llm:
        chat = Conversation(Chat(llm), Sampling(temp=0), 0, "Write.", 8)
        read = []
        for i in range(12):
            [*chat.answer(f"hello {'again ' * i}{i}", lambda: False)]
            reuse = llm.prompt_reuse
            assert reuse is not None
            read.append(reuse.tokens - reuse.reused)
            roles = [message["role"] for message in chat.messages]
            assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)]
        before = [*chat.messages]
        assert 2 < len(before) < 24  # some no longer fit
        assert sum(tokens > 80 for tokens in read) <= 4  # the others were in the context
        assert before[-2]["content"].endswith("11")
        with pytest.raises(RequestError, match="expected fewer than 256 tokens"):
            [*chat.answer("word " * 400, lambda: False)]
        assert chat.messages == before


def exchanges(path: Path) -> list[tuple[str, str]]:
    """The messages that /save wrote, with their roles."""
    return [(m["role"], m["content"]) for m in json.loads(path.read_text("utf-8"))]


def test_messages_are_undone_and_answered_again(demo: Path, tmp_path: Path) -> None:
    saved = [tmp_path / f"{i}.json" for i in range(4)]
    steps = [
        "/undo\n/regen\none\ntwo",
        "/regen",
        "/undo\n/system Write.\n/system",
        "/undo\n/undo\n/clear",
    ]
    text = "".join(f"{step}\n/save {path}\n" for step, path in zip(steps, saved, strict=True))
    done = piped(demo, text, "-n", 8, "--temp", 5, "--seed", 1)
    assert done.returncode == 0, done.stderr
    first, again, system, cleared = map(exchanges, saved)
    assert [role for role, _ in first] == ["user", "assistant"] * 2
    assert again[:3] == first[:3]
    assert again[3] != first[3]  # another seed
    assert system == [("system", "Write."), *first[:2]]
    assert cleared == [("system", "Write.")]
    assert done.stderr.count("the conversation has no message yet") == 3
    assert "\nWrite.\n" in done.stderr


@pytest.mark.thorough
def test_a_saved_conversation_goes_on(demo: Path, tmp_path: Path) -> None:
    """The answers are those of a conversation that was never saved."""
    whole, start, rest = (tmp_path / f"{name}.json" for name in ("whole", "start", "rest"))
    options = ("-n", 8, "--system", "Write.")
    assert piped(demo, f"one\n/save {start}\ntwo\n/save {whole}\n", *options).returncode == 0
    done = piped(demo, f'/load "{start}"\ntwo\n/save {rest}\n', "-n", 8)
    assert done.returncode == 0, done.stderr
    assert exchanges(rest) == exchanges(whole)
    record = tmp_path / "record.json"
    record.write_text(piped(demo, "one\n", *options, "--json").stdout, "utf-8")
    done = piped(demo, f"/load {record}\ntwo\n", "-n", 8, "--json")
    assert [(m["role"], m["content"]) for m in json.loads(done.stdout)["messages"]] == exchanges(
        whole
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("## user", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[1]", "expected messages"),
        ('{"messages": null}', "expected messages"),
        ('[{"role": "user", "content": "a"}]', "expected messages"),
        ('[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]', "alternating"),
        ('[{"role": "user", "content": 1}, {"role": "assistant", "content": "b"}]', "expected"),
        ('[{"role": "system", "content": [{"type": "text", "text": "a"}]}]', "expected"),
        (
            '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}'
            ']}, {"role": "assistant", "content": "b"}]',
            "expected messages",
        ),
    ],
)
def test_what_is_no_conversation(content: str | None, words: str, tmp_path: Path) -> None:
    """It leaves the conversation as it was; nothing else is read, whatever it names."""
    path = tmp_path / "chat.json"
    if content is not None:
        path.write_text(content, "utf-8")
    chat: Any = object.__new__(Conversation)
    chat.messages = before = [{"role": "system", "content": "Write."}]
    with pytest.raises(RequestError, match=words) as error:
        chat.load(path)
    assert str(path) in str(error.value)
    assert chat.messages is before


@pytest.mark.thorough
def test_the_first_message_as_an_option(demo: Path) -> None:
    expected = piped(demo, f"{QUESTION}\nhello\n", "-n", 8).stdout
    assert piped(demo, "hello\n", "-n", 8, "-p", QUESTION).stdout == expected
    assert piped(demo, f"{QUESTION}\nhello\n", "-n", 8, "-p", "").stdout == expected
    with terminal(demo, "-n", 8, "-p", "/not a command", waits="> /not a command") as chat:
        assert "no such command" not in chat.output
        assert chat.end() == 0


@pytest.mark.parametrize(
    "option",
    [
        ("--top-k", 3),
        ("--top-p", 0.5),
        ("--min-p", 0.5),
        ("--repeat-penalty", 3),
        ("--presence-penalty", 9),
        ("--frequency-penalty", 9),
        ("--seed", 8),
    ],
    ids=lambda option: option[0],
)
def test_a_sampling_option_is_that_of_generate(option: tuple[str, float], demo: Path) -> None:
    settings = ("--top-k", 0, "--top-p", 1, "--min-p", 0, "--temp", 4, "--seed", 7, "-n", 20)
    hot = ("-p", QUESTION, "--ctx", 512, "--threads", 1, "--depth", 0, *settings)
    without, with_it = (succeed("generate", demo, "--chat", *hot, *o) for o in ((), option))
    answer = succeed("chat", demo, *hot, *option)
    assert answer.strip() == with_it.strip() != without.strip()


def test_the_file_recommends_settings(demo: Path, tmp_path: Path) -> None:
    """An option wins over them, and they win over llama.cpp's defaults."""

    def recommended(keys: Metadata) -> None:
        keys["general.sampling.temp"] = Value(ValueType.F32, 9.0)
        keys["general.sampling.top_k"] = Value(ValueType.I32, 1)

    model = tmp_path / "model.gguf"
    edited(demo, model, metadata=recommended)
    settings = ("--top-p", 1, "--min-p", 0, "--seed", 3, "-n", 12)
    options = ("--ctx", 2048, "--threads", 1, "--depth", 0, *settings)
    answers = [
        succeed(*words, *options).strip()
        for words in (
            ("generate", model, "--chat", "-p", QUESTION, "--temp", 0),
            ("generate", model, "--chat", "-p", QUESTION, "--temp", 9),
            ("chat", model, "-p", QUESTION),
            ("chat", model, "-p", QUESTION, "--top-k", 40),
        )
    ]
    assert answers[0] == answers[1] == answers[2] != answers[3]


def test_settings_of_a_file_that_are_no_numbers() -> None:
    keys = {"general.sampling.temp": "warm", "general.sampling.top_k": "20.0"}
    keys |= {"general.sampling.top_p": "nan", "general.sampling.min_p": "1e400"}
    assert Sampling.chosen(keys, presence_penalty=1.5) == Sampling(top_k=20, presence_penalty=1.5)
    assert Sampling.chosen(keys, temp=0.0, top_k=5) == Sampling(temp=0.0, top_k=5)


# As Qwen's: it thinks unless it is told not to, and shows what was thought before.
THINKING = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"
    "{%- endif %}{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n' }}"
    "{%- endif %}"
)


def with_template(folder: Path, template: str | None) -> Path:
    """The demo model with another chat template."""
    checkpoint = shutil.copytree(DEMO, folder / "checkpoint")
    (checkpoint / "chat_template.jinja").unlink()
    file = checkpoint / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    del config["chat_template"]
    more = {} if template is None else {"chat_template": template}
    file.write_text(json.dumps({**config, **more}), "utf-8")
    model = folder / "model.gguf"
    succeed("convert", checkpoint, "-o", model, "--mtp-f16")
    return model


def test_a_model_without_a_template(tmp_path: Path) -> None:
    result = invoke("chat", with_template(tmp_path, None), *OPTIONS)
    check_refusal(result.exit_code, result.stderr, "expected a model with a chat template")


# ------------------------------------------------------------ at a terminal


def test_a_chat_at_a_terminal(demo: Path, tmp_path: Path) -> None:
    with terminal(demo, "--depth", "2") as chat:
        chat.type(f"{QUESTION}\r")
        answer = chat.until(PROMPT)
        for draft in (1, 2):
            assert style(draft) in answer
        chat.type("/stats\r")
        assert "draft 1" in chat.until("accepted by position[^>]*draft 2")
        chat.until(PROMPT)
        chat.type("first\x1b\rsecond\r")  # Alt-Enter
        chat.until(PROMPT)
        messages = saved(chat, tmp_path / "chat.json")
        assert [m["content"] for m in messages[::2]] == [QUESTION, "first\nsecond"]
        chat.type("/reset\r")
        chat.until("forgotten")
        chat.until(PROMPT)
        assert saved(chat, tmp_path / "empty.json") == []
        chat.type("/help\r")
        chat.until("/save FILE")
        chat.until(PROMPT)
        assert chat.end() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(demo: Path, tmp_path: Path) -> None:
    with terminal(demo, "--ctx", "65536", "--depth", "2", "--no-color") as chat:
        chat.type(f"{ENDLESS}\r")
        chat.until(ACCEPTED)
        chat.until("(?s).{60}")  # of the answer
        chat.type("\x03")
        chat.until(PROMPT)
        chat.type("a line that is cleared\x03")
        chat.until(PROMPT)
        chat.type("a message that is cleared\\\r")
        chat.until(ACCEPTED)
        chat.until(r"\x1b\[\?2004h")
        chat.type("\x03")
        chat.until(PROMPT)
        messages = saved(chat, tmp_path / "chat.json")
        assert [m["role"] for m in messages] == ["user", "assistant"]
        assert 20 < len(messages[1]["content"]) < 60_000
        assert style(1) not in chat.output
        assert chat.end() == 0


def test_ctrl_z_suspends_the_chat(demo: Path) -> None:
    """While it waits for a message, and while it answers; the shell then continues it."""
    shell = ("bash", "-c", 'set -m; "$@"; echo "status $?"; fg; echo "status $?"; fg', "bash")
    with terminal(demo, "--ctx", "65536", "--no-color", shell=shell) as chat:
        chat.type("\x1a")
        chat.until("status 148")
        chat.until(PROMPT)
        chat.type(f"{ENDLESS}\r")
        chat.until(ACCEPTED)
        chat.until("0{20}")
        chat.type("\x1a")
        chat.until("status 148")
        chat.until("0{20}")
        chat.type("\x03")
        chat.until(PROMPT)
        assert chat.end() == 0


def test_a_narrow_terminal(demo: Path) -> None:
    """Everything that is not an answer breaks between words."""
    with terminal(demo, "-n", 3, columns=40) as chat:
        chat.type(f"{QUESTION}\r")
        chat.until(ACCEPTED)
        chat.until(PROMPT)
        for command in ("/help", "/stats", "/nothing-of-this-name"):
            chat.type(f"{command}\r")
            chat.until(ACCEPTED)
            shown = chat.until(PROMPT).partition("\x1b[?2004h")[0]
            lines = [re.sub(r"\x1b\S*?[a-zA-Z]", "", line) for line in shown.splitlines()]
            assert max(map(len, lines)) in range(30, 41), lines


# ------------------------------------------------------------ thinking


def test_thinking_is_dimmed_and_not_piped(tmp_path: Path) -> None:
    """A template that ends with the mark, as Qwen's; the demo model never ends its thinking."""
    model = with_template(tmp_path, THINKING)
    done = piped(model, f"{QUESTION}\n", "-n", 20)
    assert (done.returncode, done.stdout) == (0, "\n")
    with terminal(model, "-n", 20, "--depth", 0) as chat:
        chat.type(f"{QUESTION}\r")
        assert style(0, dimmed=True) == "\x1b[2m"
        assert "\x1b[2m" in chat.until(PROMPT)


@pytest.mark.thorough
def test_thinking_on_and_off(tmp_path: Path) -> None:
    """With a template like Qwen's, which thinks unless it is told not to."""
    model = with_template(tmp_path, THINKING)
    prompt = (
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    expected = succeed("generate", model, "-p", prompt, "-n", 20, *OPTIONS)
    for mode, answer in (("off", expected.strip()), ("on", ""), ("auto", "")):
        done = piped(model, f"{QUESTION}\n", "-n", 20, "--reasoning", mode)
        assert (done.returncode, done.stdout.strip()) == (0, answer), mode
    assert expected.strip()


@pytest.mark.thorough
def test_a_budget_ends_thinking(tmp_path: Path) -> None:
    """The demo model never ends its thinking by itself."""
    model = with_template(tmp_path, THINKING)
    answers = {
        depth: piped(
            model, f"{QUESTION}\n", "-n", 24, "--reasoning-budget", 5, "--depth", depth
        ).stdout
        for depth in (0, 3)
    }
    assert answers[0].strip()
    assert answers[0] == answers[3]
