"""`mtp-gguf chat` with pictures: the answers are llama_cpp's with its handler of vision towers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest

from mtp_gguf.cli.conversation import Conversation
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.native import MTPLlama
from mtp_gguf.native.chat.chat import Chat
from mtp_gguf.native.chat.pictures import Pictures
from mtp_gguf.native.llama.sampling import Sampling
from mtp_gguf.native.runtime import llama_cpp
from support.checkpoints import TINY
from support.commands import check_refusal, invoke, spawn, succeed
from support.conversions import converted
from support.vision_models import demo_with_tower, png, write_vision_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra"),
]

SMALL: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
OPTIONS = ("--ctx", 512, "--threads", 1, "-n", 24, "--temp", 0)
QUESTION = "for name in "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = demo_with_tower(tmp_path_factory.mktemp("pictures"))
    (made / "wide.png").write_bytes(png(160, 96))
    (made / "my photo.png").write_bytes(png(64, 64, 1))
    return made


@pytest.fixture
def conversation(folder: Path) -> Iterator[Conversation]:
    with closing(MTPLlama(str(folder / "model.gguf"), depth=2, **SMALL)) as llm:
        chat = Chat(llm, mmproj=folder / "mmproj.gguf")
        yield Conversation(chat, Sampling(temp=0), 0, None, 24)


def expected(folder: Path, messages: list[dict[str, Any]]) -> str:
    """The answer of llama_cpp.Llama itself."""
    from llama_cpp.llama_chat_format import MTMDChatHandler  # noqa: PLC0415

    handler = MTMDChatHandler(str(folder / "mmproj.gguf"), verbose=False, use_gpu=False)
    model: Any = llama_cpp.Llama(str(folder / "model.gguf"), chat_handler=handler, **SMALL)
    with closing(model) as llm:
        said = llm.create_chat_completion(
            messages, temperature=0, repeat_penalty=1.0, max_tokens=24
        )
        return str(said["choices"][0]["message"]["content"]).strip()


def ask(conversation: Conversation, message: str) -> str:
    return "".join(piece.text for piece in conversation.answer(message, lambda: False)).strip()


def test_pictures_of_options_and_commands(folder: Path, tmp_path: Path) -> None:
    """A picture named on the command line, one in a command, and both in a saved conversation."""
    saved = tmp_path / "chat.json"
    text = f'/image "{folder / "my photo.png"}"\nand?\n/save {saved}\n/save {tmp_path / "a.md"}\n'
    options = ("--mmproj", folder / "mmproj.gguf", "--image", folder / "wide.png", *OPTIONS)
    result = invoke("chat", folder / "model.gguf", *options, "-p", QUESTION, input=text)
    assert result.exit_code == 0, result.stderr
    messages = json.loads(saved.read_text("utf-8"))
    kinds = [[part["type"] for part in m["content"]] for m in messages[::2]]
    assert kinds == [["image_url", "text"]] * 2
    assert messages[0]["content"] != messages[2]["content"]
    for end in (1, 3):
        assert messages[end]["content"] == expected(folder, messages[:end])
    assert "## user\n\n(a picture)\nand?\n" in (tmp_path / "a.md").read_text("utf-8")
    again = invoke(
        "chat", folder / "model.gguf", *options[:2], *OPTIONS, input=f"/load {saved}\n/regen\n"
    )
    assert again.stdout.strip() == messages[3]["content"]


def test_llama_cpp_prints_nothing(folder: Path) -> None:
    named = ("--mmproj", folder / "mmproj.gguf", "--image", folder / "wide.png")
    with spawn(
        "chat", folder / "model.gguf", *named, *OPTIONS, "-p", QUESTION, stdin=DEVNULL
    ) as run:
        answer, notes = run.communicate(timeout=60)
    assert (run.returncode, notes) == (0, "")
    assert answer.strip()


def test_a_tower_of_another_model_says_why(folder: Path, tmp_path: Path) -> None:
    spec = replace(TINY, mtp=False)
    converted(
        write_vision_checkpoint(tmp_path / "other", spec), tmp_path / "o.gguf", "--mmproj-only"
    )
    with closing(MTPLlama(str(folder / "model.gguf"), depth=0, **SMALL)) as llm:
        chat = Chat(llm, mmproj=tmp_path / "o.gguf")
        assert chat.pictures is not None
        with pytest.raises(RequestError, match=r"cannot load the vision tower: .*mismatch"):
            chat.pictures.read(folder / "wide.png")


def test_a_tower_beside_the_model_is_used(folder: Path, tmp_path: Path) -> None:
    for name, target in (("model", "model"), ("mmproj-model", "mmproj")):
        (tmp_path / f"{name}.gguf").symlink_to(folder / f"{target}.gguf")
    options = ("-p", QUESTION, "--image", folder / "wide.png", *OPTIONS)
    answer = succeed("chat", tmp_path / "model.gguf", *options).strip()
    named = ("--mmproj", folder / "mmproj.gguf")
    assert answer == succeed("chat", folder / "model.gguf", *named, *options).strip()


def test_a_picture_is_evaluated_once(folder: Path, conversation: Conversation) -> None:
    """A conversation that goes on keeps it in the context; another one evaluates it again."""
    llm = conversation._chat.llm
    conversation.attach(folder / "wide.png")
    ask(conversation, QUESTION)
    first = min(llm.input_ids[: llm.n_tokens])
    answer = ask(conversation, "and then?")
    assert min(llm.input_ids[: llm.n_tokens]) == first < 0
    assert answer == expected(folder, conversation.messages[:-1])
    again = "".join(p.text for p in conversation.regenerate(lambda: False)).strip()
    assert again == answer
    conversation.reset()
    conversation.attach(folder / "my photo.png")
    other = ask(conversation, QUESTION)
    assert min(llm.input_ids[: llm.n_tokens]) < first
    assert other == expected(folder, conversation.messages[:-1])


def test_pictures_in_a_session(
    folder: Path, conversation: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved with their states: what follows is as if there had been no other process."""
    saved = tmp_path / "a.session"
    for name in ("wide.png", "my photo.png"):
        conversation.attach(folder / name)
        ask(conversation, QUESTION)
    conversation.save_session(saved)

    def follow(conversation: Conversation) -> tuple[str, list[int], list[int]]:
        conversation._chat.llm.session.reset_stats()
        text = ask(conversation, "and then?")
        did = conversation._chat.llm.mtp_stats
        return text, list(did.drafted), list(did.accepted)

    want = follow(conversation)
    assert want[0] == expected(folder, conversation.messages[:-1])
    assert sum(want[2]) > 0

    def loaded(llm: MTPLlama, tower: Path) -> Conversation:
        other = Conversation(Chat(llm, mmproj=tower), Sampling(temp=0), 0, None, 24)
        other.attach(folder / "my photo.png")
        ask(other, "another picture, which gets the first id here")
        other.load_session(saved)
        return other

    evaluated = []
    really = Pictures._evaluated

    def noted(pictures: Pictures, *args: Any) -> list[int]:
        evaluated.append(pictures)
        return really(pictures, *args)

    monkeypatch.setattr(Pictures, "_evaluated", noted)
    changed = tmp_path / "mmproj.gguf"
    changed.write_bytes((folder / "mmproj.gguf").read_bytes() + bytes(64))
    for tower in (folder / "mmproj.gguf", changed):
        with closing(MTPLlama(str(folder / "model.gguf"), depth=2, **SMALL)) as llm:
            other = loaded(llm, tower)
            ids = llm.input_ids[: llm.n_tokens].tolist()
            assert sorted({i for i in ids if i < 0}) == [-3, -2]  # -1 is the other picture here
            evaluated.clear()
            found = follow(other)
            if tower == changed:
                assert found[0] == want[0]
                assert evaluated
            else:
                assert found == want
                assert not evaluated
                assert llm.input_ids[: len(ids)].tolist() == ids
    for record in (None, {}, {"digest": 1, "length": 3}, {"digest": "x", "length": 10**9}):
        with closing(MTPLlama(str(folder / "model.gguf"), depth=2, **SMALL)) as llm:
            other = loaded(llm, folder / "mmproj.gguf")
            assert other._chat.pictures is not None
            other._chat.pictures.restore(record)
            assert ask(other, "and then?") == want[0]
    options = ("--mmproj", folder / "mmproj.gguf", *OPTIONS, "--session", saved)
    assert succeed("chat", folder / "model.gguf", *options, "-p", "and then?").strip() == want[0]
    words = ("generate", folder / "model.gguf", *OPTIONS, "--session", saved, "--json")
    text = json.loads(succeed(*words, "-p", QUESTION))["text"]  # not in the session
    assert text == json.loads(succeed(*words[:-3], "--json", "-p", QUESTION))["text"]


def test_pictures_make_room(folder: Path, conversation: Conversation) -> None:
    """The oldest pictures are forgotten with their messages when the context is full."""
    for i in range(6):
        conversation.attach(folder / "wide.png")
        ask(conversation, f"{i} {'word ' * 60}")
    assert len(conversation.messages) < 12
    assert conversation.messages[-2]["content"][1]["text"].startswith("5 ")
    assert conversation.messages[-1]["content"] == expected(folder, conversation.messages[:-1])


def test_what_is_no_picture(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture " * 20)
    (tmp_path / "empty.png").write_bytes(b"")
    names = [tmp_path / name for name in ("text.png", "empty.png", "missing.png", ".")]
    text = "".join(f"/image {name}\n" for name in names) + "/image\nhello\n"
    named = ("--mmproj", folder / "mmproj.gguf")
    result = invoke("chat", folder / "model.gguf", *named, *OPTIONS, input=text)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()  # the chat goes on, without a picture
    for words in (
        "text.png: expected a picture, such as a PNG or JPEG",
        "empty.png: expected a picture of 1 to",
        "missing.png: cannot be read: No such file",
        "cannot be read: Is a directory",
        "/image: expected a file, as in /image photo.png",
    ):
        assert words in result.stderr
    result = invoke("chat", folder / "model.gguf", "--image", names[0], *OPTIONS, input="a\n")
    check_refusal(result.exit_code, result.stderr, "name its mmproj file with --mmproj")
