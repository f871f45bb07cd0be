"""MTPLlama with llama_cpp's handler of pictures: drafting goes on, the text stays the same.

The vision tower is random, but its rows stand in the trunk's memory and its positions run in three
dimensions, so that a wrong state changes the text or the acceptance rate.
"""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest

from mtp_gguf.native import MTPLlama, NativeError
from mtp_gguf.native.runtime import llama_cpp
from support import generation
from support.checkpoints import TINY
from support.commands import check_refusal, invoke
from support.conversions import converted
from support.vision_models import (
    CHATS as NAMED_CHATS,
)
from support.vision_models import (
    NARROW,
    WIDE,
    demo_with_tower,
    picture,
    png,
    says,
    write_vision_checkpoint,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra"),
]

GREEDY: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1.0, "max_tokens": 40}
DEPTHS: tuple[Any, ...] = (0, 1, 2, 3, 4, "auto")
LEAST_ACCEPTED = 0.5  # of the first drafts; measured: 0.8
CHATS = [*NAMED_CHATS.values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo model and a vision tower."""
    return demo_with_tower(tmp_path_factory.mktemp("pictures"))


def handler(folder: Path) -> Any:
    from llama_cpp.llama_chat_format import MTMDChatHandler  # noqa: PLC0415

    return MTMDChatHandler(str(folder / "mmproj.gguf"), verbose=False, use_gpu=False)


def load(folder: Path, **options: Any) -> closing[MTPLlama]:
    options = {"n_ctx": 512, "chat_handler": handler(folder), **options}
    return generation.load(folder / "model.gguf", **options)


def answer(llm: llama_cpp.Llama, messages: Any, **options: Any) -> str:
    said: Any = llm.create_chat_completion(messages, **{**GREEDY, **options})
    return str(said["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """The answers of llama_cpp.Llama itself."""
    model = folder / "model.gguf"
    with generation.plain(model, n_ctx=512, chat_handler=handler(folder)) as llm:
        return [answer(llm, chat) for chat in CHATS]


@pytest.mark.sample(2)
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_text_is_the_same(depth: Any, folder: Path, expected: list[str]) -> None:
    with load(folder, depth=depth) as llm:
        for chat, text in zip(CHATS, expected, strict=True):
            assert answer(llm, chat) == text
        if depth == 1:
            stats = llm.mtp_stats
            assert sum(stats.accepted) > LEAST_ACCEPTED * sum(stats.drafted)
    assert len(set(expected)) == len(CHATS)


def test_log_probabilities_of_the_answer(folder: Path, expected: list[str]) -> None:
    """A picture's places, which no token has, are no text of the prompt."""
    with load(folder, depth=3) as llm:
        said: Any = llm.create_chat_completion(CHATS[0], logprobs=True, **GREEDY)
    choice = said["choices"][0]
    assert choice["message"]["content"] == expected[0]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == expected[0]


@pytest.mark.parametrize("rollback", ["checkpoint", "two-phase", "host"])
def test_every_rollback(rollback: str, folder: Path, expected: list[str]) -> None:
    with load(folder, depth=3, rollback=rollback) as llm:
        assert [answer(llm, chat) for chat in CHATS] == expected


def test_a_picture_after_a_rollback(folder: Path, expected: list[str]) -> None:
    """A stream that ends between accepted drafts, and one that is left open."""
    with load(folder, depth=3) as llm:
        for read in (2, 3, 4):
            stream: Any = llm.create_chat_completion(CHATS[3], stream=True, **GREEDY)
            for _ in range(read):
                next(stream)
            assert answer(llm, CHATS[0]) == expected[0]


def test_streams_and_states(folder: Path, expected: list[str]) -> None:
    with load(folder, depth=3) as llm:
        stream: Any = llm.create_chat_completion(CHATS[1], stream=True, **GREEDY)
        chunks = [chunk["choices"][0]["delta"].get("content", "") for chunk in stream]
        assert "".join(chunks) == expected[1]
        answer(llm, CHATS[0], max_tokens=4)
        state = llm.save_state()
        tokens = [*llm.input_ids[: llm.n_tokens].tolist(), *llm.tokenize(b" and", add_bos=False)]
        texts = []
        for _ in range(2):
            said: Any = llm.create_completion(tokens, **GREEDY)
            texts.append(said["choices"][0]["text"])
            answer(llm, CHATS[3])
            llm.load_state(state)
        assert texts[0]
        assert texts[0] == texts[1]


def test_a_picture_is_not_taken_for_another(folder: Path) -> None:
    """The ids of a prompt with a picture that is no longer there are refused, not read as text."""
    with load(folder, depth=2) as llm:
        answer(llm, [says("a", WIDE, "b")], max_tokens=2)
        tokens = llm.input_ids[: llm.n_tokens].tolist()
        assert min(tokens) < 0
        for other in (CHATS[3], [says("a", picture(png(160, 96, 5)), "b")]):
            answer(llm, other, max_tokens=2)
            with pytest.raises(NativeError, match="a picture that is no longer in the context"):
                llm.create_completion(tokens, max_tokens=2)
            assert answer(llm, CHATS[3], max_tokens=8)
        # Everything but the picture is what the context holds, so that nothing is rolled back.
        answer(llm, [says("a", picture(png(160, 96, 5)), "b")], max_tokens=2)
        now = llm.input_ids[: llm.n_tokens].tolist()
        asked = [old if new < 0 else new for old, new in zip(tokens, now, strict=True)]
        with pytest.raises(NativeError, match="a picture that is no longer in the context"):
            llm.create_completion([*asked, 5], max_tokens=2)


def test_a_picture_leaves_no_logits(folder: Path) -> None:
    """If the text after it fails, those of the text before it are not sampled from."""
    with load(folder, depth=2, n_ctx=256) as llm:
        with pytest.raises(ValueError, match="Prompt exceeds n_ctx"):
            answer(llm, [says("x", picture(png(64, 64)), "y " * 1000)])
        tokens = llm.input_ids[: llm.n_tokens].tolist()
        assert tokens[-1] < 0
        with pytest.raises(NativeError, match="a picture that is no longer in the context"):
            llm.create_completion(tokens, max_tokens=2)


@pytest.mark.parametrize("depth", [0, 2])
def test_bad_pictures(depth: int, folder: Path, expected: list[str]) -> None:
    """The errors of llama_cpp, with and without drafting, and the same answers after them."""
    with load(folder, depth=depth, n_ctx=128) as llm:
        for data, words in (
            (b"no picture at all" * 10, "Failed to create bitmap"),
            (png(160, 96)[:2000], "Failed to create bitmap"),
            (png(2000, 2000), "Prompt exceeds n_ctx"),
        ):
            with pytest.raises(ValueError, match=words):
                answer(llm, [says("x", picture(data))])
            assert answer(llm, CHATS[0]) == expected[0]
        assert answer(llm, [says("x", picture(png(1, 1)))])


@pytest.mark.slow  # it takes seconds to resize
@pytest.mark.parametrize("depth", [0, 2])
def test_a_huge_picture(depth: int, folder: Path, expected: list[str]) -> None:
    with load(folder, depth=depth, n_ctx=128) as llm:
        with pytest.raises(ValueError, match="Prompt exceeds n_ctx"):
            answer(llm, [says("x", picture(png(10000, 10000)))])
        assert answer(llm, CHATS[0]) == expected[0]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs Unix timers")
def test_an_interrupt_while_a_picture_is_encoded(
    folder: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is raised when llama_cpp returns; the next answers are as ever."""
    with load(folder, depth=2) as llm:
        assert answer(llm, CHATS[3]) == expected[3]
        mtmd = cast("Any", llm.chat_handler)._mtmd_cpp
        encode = mtmd.mtmd_helper_eval_chunk_single

        def interrupted(*arguments: Any) -> Any:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            return encode(*arguments)

        monkeypatch.setattr(mtmd, "mtmd_helper_eval_chunk_single", interrupted)
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                answer(llm, [says("x", picture(png(500, 400)))])
        finally:
            monkeypatch.undo()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert answer(llm, CHATS[0]) == expected[0]
        assert answer(llm, CHATS[3]) == expected[3]


def test_a_context_full_of_a_picture(folder: Path) -> None:
    """A picture takes more cells than positions, so that memory ends before positions do."""
    with load(folder, depth=0, n_ctx=128) as llm:
        answer(llm, CHATS[0], max_tokens=1)
        session = llm.session

        def fill() -> None:
            while session.length() < llm.n_ctx():
                session.decode([5])

        with pytest.raises(NativeError, match=r"has no room for 1 more tokens at position \d+$"):
            fill()


def test_a_tower_of_another_model(folder: Path, tmp_path: Path) -> None:
    tower = write_vision_checkpoint(tmp_path / "checkpoint", replace(TINY, mtp=False))
    converted(tower, tmp_path / "mmproj.gguf", "--mmproj-only")
    with (
        load(folder, depth=2, chat_handler=handler(tmp_path)) as llm,
        pytest.raises(ValueError, match="Failed to load mtmd context"),
    ):
        answer(llm, CHATS[0])


def test_skipping_positions(folder: Path) -> None:
    with load(folder, depth=2) as llm:
        session = llm.session
        for length in (0, -1, 10**6):
            with pytest.raises(NativeError, match="length: expected 1 to"):
                session.skip(length)
        session.decode([1, 2, 3])
        with pytest.raises(NativeError, match="length: expected 3 to"):
            session.skip(2)
        session.skip(8)
        session.decode([4, 5])
        assert session.length() == 10
        session.step(6, 2)
        if session.length() != 11 + 2:  # a draft was rejected, and is still in the memory
            with pytest.raises(NativeError, match="while rejected drafts were in it"):
                session.skip(20)
            assert session.length() == 0


class TestGenerate:
    """`mtp-gguf generate --image`, which gives the answers of llama_cpp's handler."""

    def test_the_text_is_that_of_the_handler(self, folder: Path, tmp_path: Path) -> None:
        images = [tmp_path / "narrow.png", tmp_path / "wide.png"]
        images[0].write_bytes(png(64, 64, 1))
        images[1].write_bytes(png(160, 96))
        with load(folder, depth=0) as llm:
            text = answer(llm, [says(NARROW, WIDE, "def is_prime(n):")])
        beside = shutil.copytree(folder, tmp_path / "beside", ignore=lambda *_: ["checkpoint"])
        (beside / "mmproj.gguf").rename(beside / "mmproj-demo.gguf")
        options = ("-p", "def is_prime(n):", "-n", "40", "-c", "512", "-t", "1", "--json")
        for model, tower in (
            (folder / "model.gguf", ("--mmproj", folder / "mmproj.gguf")),
            (beside / "model.gguf", ()),
        ):
            done = invoke("generate", model, *tower, "--image", *images, *options)
            found = json.loads(done.stdout)
            assert found["text"] == text
            assert found["accepted"][0] > LEAST_ACCEPTED * found["drafted"][0]

    def test_refusals(self, folder: Path, tmp_path: Path) -> None:
        model, tower = folder / "model.gguf", ("--mmproj", folder / "mmproj.gguf")
        picture = tmp_path / "a.png"
        picture.write_bytes(png(160, 96))
        (tmp_path / "text.png").write_text("no picture")
        for words, said in (
            ((*tower, "--image", tmp_path / "none.png"), "none.png: cannot be read"),
            ((*tower, "--image", tmp_path / "text.png"), "text.png: expected a picture"),
            (("--mmproj", model, "--image", picture), "expected an mmproj file"),
            (("--image", picture), "model.gguf: expected a vision tower that fits it"),
            ((*tower, "--image", picture, "-c", "64"), "fits a context of 256 tokens"),
        ):
            done = invoke("generate", model, *words, "-p", "x" * 300, "-t", "1")
            assert done.exit_code == 1
            assert said in done.stderr.splitlines()[-1]
        done = invoke("generate", model, "-p", "x", *tower)
        check_refusal(done.exit_code, done.stderr, "--mmproj is for --image", code=2)
