"""A llama-server with our patches sees pictures and drafts: same answers, same acceptance.

The vision tower is random, so a picture says nothing; but its rows stand in the trunk's memory, and
its positions run in three dimensions. The demo model's head drafts well only if it follows both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.model import Metadata
from mtp_gguf.native import MTPLlama, Session
from mtp_gguf.native.runtime import llama_cpp
from support.checkpoints import TINY
from support.commands import invoke
from support.conversions import converted
from support.gguf_files import edited
from support.loopback import Loopback
from support.models import DEMO
from support.real_server import STEPS, Client, Server, drafted, opened, post
from support.vision_models import (
    CHATS,
    NARROW,
    WIDE,
    picture,
    png,
    says,
    write_vision_checkpoint,
)

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra"),
]

DEMO_WIDTH = 256
SETTINGS = ("--ctx-size", 2048, "--parallel", 2, "--threads", 1)
DEPTHS = (1, 2, 3, 4, "auto")
TOKENS = 60
LEAST_ACCEPTED = 0.5  # of the first drafts; measured: 0.9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo model and a vision tower beside it."""
    made = tmp_path_factory.mktemp("pictures")
    converted(DEMO, made / "model.gguf", "--quant", "F16", "--mtp-f16")
    spec = replace(TINY, mtp=False, hidden=DEMO_WIDTH)
    tower = write_vision_checkpoint(made / "checkpoint", spec)
    converted(tower, made / "mmproj-model.gguf", "--mmproj-only")
    return made


def ask(client: Client, messages: list[dict[str, Any]]) -> Any:
    """The answer to a chat: text, tokens drafted, tokens accepted; or the text of an error."""
    body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    status, answer = post(client.port, "/v1/chat/completions", body)
    if status != 200:
        return answer["error"]["message"]
    message, timings = answer["choices"][0]["message"], answer["timings"]
    text = f"{message.get('content')}|{message.get('reasoning_content')}"
    return text, timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)


def answers(client: Client) -> list[Any]:
    """Each chat, then the first one again, whose prompt is reused."""
    chats = [*CHATS.values(), CHATS["one picture"]]
    return [ask(client, chat) for chat in chats]


@pytest.mark.thorough
def test_the_answers_are_the_same_at_every_depth(folder: Path, server: Server) -> None:
    model = folder / "model.gguf"
    with server.running(model, *SETTINGS, options=["--no-draft"]) as client:
        want = answers(client)
    assert len({text for text, _, _ in want}) == len(CHATS)
    for depth in DEPTHS:
        with server.running(model, *SETTINGS, options=["--depth", depth]) as client:
            found = answers(client)
            with ThreadPoolExecutor(2) as pool:  # in two slots
                together = list(pool.map(partial(ask, client), [*CHATS.values()][:2]))
        assert [text for text, _, _ in found] == [text for text, _, _ in want], depth
        assert [text for text, _, _ in together] == [text for text, _, _ in want[:2]], depth
        if depth == 1:
            shares = [accepted / offered for _, offered, accepted in found[:3]]
            assert min(shares) > LEAST_ACCEPTED, shares


def test_fused_drafts_are_those_of_llama_cpp(folder: Path, server: Server) -> None:
    """As many drafts are accepted after pictures as llama.cpp's own draft-mtp has accepted.

    Not exactly the same: after a picture its steps keep the rows before it, and pair the next token
    with zeros; the fused drafts begin anew. Without pictures they are the same.
    """
    model, counts = folder / "model.gguf", []
    for fused in ((), (STEPS,)):
        with server.running(model, *SETTINGS, *fused, options=["--depth", 1]) as client:
            counts.append([ask(client, chat)[1:] for chat in CHATS.values()])
    accepted, steps = (sum(of for _, of in chats) for chats in counts)
    assert accepted >= 0.97 * steps
    assert counts[0][-1] == counts[1][-1]


# As the demo's own, for contents of several parts as well.
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- for part in message.content %}{{- part.text }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{{- '<|im_start|>assistant\\n' }}"
)


@pytest.mark.thorough
def test_a_conversation_with_a_picture_outlives_the_server(
    folder: Path, server: Server, tmp_path: Path
) -> None:
    """It goes on after a restart as without one; with another picture it is another one."""
    # Enough to be kept.
    text = "def is_prime(n):\n    return all(n % i for i in range(2, n))\n" * 12
    model, options = folder / "model.gguf", ["--depth", 2]
    settings = ("--ctx-size", 2048, "--parallel", 1, "--threads", 1)
    first = [says(text, WIDE, "for name in ")]

    def goes_on(picture: dict[str, Any], answer: str) -> list[dict[str, Any]]:
        said = says(text, picture, "for name in ")
        return [said, says(answer, role="assistant"), says("And then?")]

    with server.running(model, *settings, options=options) as client:
        answer = ask(client, first)[0].split("|")[0]
        want = ask(client, goes_on(WIDE, answer))
    with server.running(model, *settings, options=options) as client:
        want_other = ask(client, goes_on(NARROW, answer))
    options += ["--session-dir", str(tmp_path / "sessions")]
    with server.running(model, *settings, options=options) as client:
        ask(client, first)
    with server.running(model, *settings, options=options, verbose=True) as client:
        assert ask(client, goes_on(WIDE, answer)) == want
    assert "restored a session of" in client.log()
    with server.running(model, *settings, options=options) as client:
        assert ask(client, goes_on(NARROW, answer)) == want_other


def test_drafts_after_a_picture_are_those_of_a_session(
    folder: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows after a picture are at its own positions, and there are none of before it."""
    from llama_cpp.llama_chat_format import MTMDChatHandler  # noqa: PLC0415

    def with_template(keys: Metadata) -> None:
        keys["tokenizer.chat_template"] = Value(ValueType.STRING, TEMPLATE)

    model = edited(folder / "model.gguf", tmp_path / "model.gguf", metadata=with_template)
    tower = folder / "mmproj-model.gguf"
    chat = [says("def is_prime(n):\n    for i in range", WIDE, "for name in ")]
    options = ["--depth", 3, "--mmproj", tower]
    with server.running(model, *SETTINGS, options=options, verbose=True) as client:
        _, offered, _ = ask(client, chat)
    made: list[int] = []

    def begin(session: Session, token: int, depth: int) -> list[int]:
        made.extend(drafts := begun(session, token, depth))
        return drafts

    begun = Session.begin
    monkeypatch.setattr(Session, "begin", begin)
    handler = MTMDChatHandler(str(tower), verbose=False, use_gpu=False)
    one_by_one = llama_cpp.LogitsProcessorList([lambda _, logits: logits])
    greedy = {"temperature": 0, "repeat_penalty": 1.0, "max_tokens": TOKENS}
    with MTPLlama(str(model), chat_handler=handler, depth=3, n_ctx=2048, n_threads=1) as llm:
        llm.create_chat_completion(chat, logits_processor=one_by_one, **greedy)
    before = offered - 9  # of the last cycles, which have less room in the server
    assert before > TOKENS / 3
    assert made[:before] == drafted(client.log())[:before]


BAD: dict[str, Callable[[], bytes]] = {
    "no picture": lambda: b"no picture at all" * 10,
    "cut off": lambda: png(160, 96)[:2000],
    "10,000 × 10,000": lambda: png(10000, 10000),
    "1 × 1": lambda: png(1, 1),
}


@pytest.mark.thorough
def test_bad_pictures(folder: Path, server: Server) -> None:
    """The same errors with and without drafting, and the same answer after them."""
    said = []
    for options in (["--no-draft"], ["--depth", 2]):
        with server.running(folder / "model.gguf", *SETTINGS, options=options) as client:
            said.append([ask(client, [says("x", picture(make()))]) for make in BAD.values()])
            body = {"messages": [says("x", picture(png(900, 900)))]}
            with pytest.raises(TimeoutError):  # cancelled while the picture is encoded
                opened(client.port, "/v1/chat/completions", body, timeout=0.02)
            said[-1].append(ask(client, CHATS["one picture"]))
    texts = [[found if isinstance(found, str) else found[0] for found in run] for run in said]
    assert texts[0] == texts[1]
    assert texts[0][0] == texts[0][1] == "Failed to load image or audio file"
    assert "exceeds the available context size" in texts[0][2]
    assert isinstance(said[0][3], tuple)  # enlarged to the smallest size


def command(model: Path, *options: object) -> list[str]:
    """The command that `serve` prints."""
    result = invoke("serve", model, "--no-draft", "--print-command", "--json", *options)
    assert result.exit_code == 0, result.output + result.stderr
    words: list[str] = json.loads(result.stdout)["command"]
    return words


def test_the_tower_beside_the_model(
    folder: Path, patched_server: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MTP_GGUF_LLAMA_SERVER", str(patched_server))
    model, tower = folder / "model.gguf", folder / "mmproj-model.gguf"
    words = command(model)
    assert words[words.index("--mmproj") + 1] == str(tower)
    assert "--mmproj" not in command(model, "--", "--no-mmproj")
    alone = tmp_path / "model.gguf"
    alone.write_bytes(model.read_bytes())
    assert "--mmproj" not in command(alone)
    words = command(alone, "--mmproj", tower)
    assert words[words.index("--mmproj") + 1] == str(tower)
    for name in ("mmproj-a.gguf", "mmproj-b.gguf"):
        (tmp_path / name).write_bytes(tower.read_bytes())
    (tmp_path / "mmproj-broken.gguf").write_bytes(b"GGUF")
    result = invoke("serve", alone, "--no-draft", "--print-command")
    assert "several vision towers are beside it (mmproj-a.gguf, mmproj-b.gguf)" in result.stderr
    assert "--mmproj " not in result.stdout


def test_towers_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    tower = write_vision_checkpoint(tmp_path / "checkpoint", replace(TINY, mtp=False))
    narrow = tmp_path / "narrow.gguf"
    converted(tower, narrow, "--mmproj-only")
    model = folder / "model.gguf"
    result = invoke("serve", model, "--no-draft", "--mmproj", narrow, "--print-command")
    assert result.exit_code == 1
    assert "expected the vision tower of a model with embeddings of 256, found one for 64" in (
        result.stderr
    )
    result = invoke("serve", model, "--no-draft", "--mmproj", model, "--print-command")
    assert "expected an mmproj file, found architecture qwen35" in result.stderr


def test_pictures_are_fetched_only_if_the_user_allows_it(folder: Path, server: Server) -> None:
    """Otherwise clients could reach what only the server reaches."""
    asked: list[str] = []

    class Pictures(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png(64, 64, 1))

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    class Site(Loopback):
        handler = Pictures

    with Site() as site:
        url = f"http://127.0.0.1:{site.port}/small.png"
        remote = [says({"type": "image_url", "image_url": {"url": url}}, "?")]
        model = (folder / "model.gguf", *SETTINGS)
        with server.running(*model, options=["--no-draft"]) as client:
            assert "not allowed unless --media-remote is specified" in ask(client, remote)
        assert not asked
        with server.running(*model, "--media-remote", options=["--no-draft"]) as client:
            assert ask(client, remote) == ask(client, [says(NARROW, "?")])
        assert asked == ["/small.png"]
