"""The conversation of `mtp-gguf chat`: its messages, and the answers that the model gives."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.json_text import parse_json

from . import token_colors
from .generate import as_utf8, report
from .options import SEEDS

if TYPE_CHECKING:
    from mtp_gguf.native.chat.chat import Chat, Message, Piece, Prompt
    from mtp_gguf.native.llama.sampling import Sampling

LARGEST_SAVED = 1 << 30  # bytes of a saved conversation, which may have pictures
_ROLES = ("user", "assistant")


class Conversation:
    """The messages of a chat, and the model that answers them.

    messages: a system message, if there is one, and then pairs of a user's message and its answer.
    seed: of the first answer; later ones use the numbers after it. most: tokens of an answer; 0 or
    -1 for as many as the context holds.
    """

    def __init__(
        self, chat: "Chat", sampling: "Sampling", seed: int, system: str | None, most: int
    ) -> None:
        self._chat = chat
        self._sampling = sampling
        self._seed = seed
        self._most = most
        self._seconds = 0.0
        self._pictures: list[dict[str, Any]] = []  # parts of the next message
        self.messages: list[Message] = []
        if system is not None:
            self.system = system

    @property
    def system(self) -> str | None:
        """The system message; None if there is none."""
        return next((m["content"] for m in self.messages[:1] if m["role"] == "system"), None)

    @system.setter
    def system(self, text: str) -> None:
        self.messages = [{"role": "system", "content": text}, *self._later(self.messages)]

    @property
    def statistics(self) -> str:
        """Speed and acceptance of all answers."""
        generated = self._chat.generated
        if not generated:
            return "no answer yet"
        did = self._chat.llm.mtp_stats
        lines = report(did, generated.total(), self._seconds)
        if any(did.drafted):
            lines += token_colors.table(generated, did.acceptance, colored=False)
        return lines.rstrip("\n")

    def record(self) -> dict[str, Any]:
        """Return the conversation and its statistics for --json."""
        return {
            "messages": self.messages,
            "generated": self._chat.generated.total(),
            "seconds": self._seconds,
            **asdict(self._chat.llm.mtp_stats),
        }

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = self._first(self.messages)
        self._pictures = []

    def undo(self) -> None:
        """Remove the last message and its answer; RequestError if there is none."""
        self.check_exchange()
        self.messages = self.messages[:-2]

    def check_exchange(self) -> None:
        """RequestError if nothing has been asked yet."""
        if not self._later(self.messages):
            raise RequestError("the conversation has no message yet")

    def attach(self, path: Path) -> None:
        """Add the picture in a file to the next message; RequestError if it cannot be used."""
        if self._chat.pictures is None:
            raise RequestError("the model has no vision tower; name its mmproj file with --mmproj")
        self._pictures.append(self._chat.pictures.read(path))

    def load(self, path: Path) -> None:
        """Continue the conversation in a file that /save or --json wrote.

        RequestError if it has none, which leaves this one as it was.
        """
        try:
            with path.open("rb") as file:
                data = file.read(LARGEST_SAVED)
        except OSError as error:
            raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            found = parse_json(data)
        except ValueError:
            raise RequestError(
                f"{path}: expected JSON, as /save FILE.json writes it; found something else"
            ) from None
        messages: Any = found.get("messages") if isinstance(found, dict) else found
        if not _is_conversation(messages):
            raise RequestError(
                f"{path}: expected messages of the user and answers, alternating, after a system "
                "message or none; found something else"
            )
        self.messages = [{"role": m["role"], "content": m["content"]} for m in messages]
        self._pictures = []

    def load_session(self, path: Path) -> None:
        """Continue the conversation in a session file, without reading its text again.

        RequestError if it has none; errors of `MTPLlama.load_session`.
        """
        extra = self._chat.llm.load_session(path)
        messages: Any = extra.get("messages")
        if not _is_conversation(messages):
            raise RequestError(
                f"{path}: expected a session of `mtp-gguf chat`, found one without its messages"
            )
        self.messages = [{"role": m["role"], "content": m["content"]} for m in messages]
        self._pictures = []
        if self._chat.pictures is not None:
            self._chat.pictures.restore(extra.get("pictures"))

    def save_session(self, path: Path) -> None:
        """Write the conversation and the model's state; errors of `MTPLlama.save_session`."""
        extra: dict[str, Any] = {"messages": self.messages}
        if self._chat.pictures is not None:
            extra["pictures"] = self._chat.pictures.record()
        self._chat.llm.save_session(path, extra=extra)

    def answer(self, message: str, stopped: Callable[[], bool]) -> Iterator["Piece"]:
        """Answer a message, and the pictures that were added to it.

        stopped: asked after each token; the answer so far is kept then. RequestError, which leaves
        the conversation as it was, if the message is not UTF-8 or does not fit the context.
        """
        content: Any = as_utf8("the message", message)
        if self._pictures:  # before the text, as in llama.cpp
            content = [*self._pictures, {"type": "text", "text": content}]
        yield from self._answer([*self.messages, {"role": "user", "content": content}], stopped)

    def regenerate(self, stopped: Callable[[], bool]) -> Iterator["Piece"]:
        """Answer the last message again, which `check_exchange` has found."""
        yield from self._answer(self.messages[:-1], stopped)

    def _answer(self, asked: list["Message"], stopped: Callable[[], bool]) -> Iterator["Piece"]:
        began = perf_counter()
        prompt = self._fitting(asked)
        self._pictures = []
        self._chat.llm.set_seed(self._seed)
        self._seed = (self._seed + 1) % SEEDS  # so that /regen gives another answer
        text: list[str] = []
        try:
            for piece in self._chat.answer(prompt, self._sampling, self._most, stopped):
                text += [] if piece.thinking else [piece.text]
                yield piece
        finally:
            self._seconds += perf_counter() - began
            answer = {"role": "assistant", "content": "".join(text).strip()}
            self.messages = [*prompt.messages, answer]

    def _fitting(self, asked: list["Message"]) -> "Prompt":
        """Return the prompt of the messages, without the oldest turns if they do not fit."""
        from mtp_gguf.native.errors import ContextFullError  # noqa: PLC0415  (loads llama.cpp)

        try:
            prompt = self._chat.prompt(asked, max(self._most, 0))
        except ContextFullError as error:
            raise RequestError(f"{error}; shorten it, or raise --ctx") from None
        if dropped := len(asked) - len(prompt.messages):
            note = f"the oldest {dropped} messages no longer fit the context"
            typer.echo(f"mtp-gguf: {note}", err=True)
        return prompt

    def _first(self, messages: list["Message"]) -> list["Message"]:
        return [message for message in messages[:1] if message["role"] == "system"]

    def _later(self, messages: list["Message"]) -> list["Message"]:
        return messages[len(self._first(messages)) :]


def text_of(message: "Message") -> str:
    """Return a message's text, with a mark for each picture."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "(a picture)") for part in content)


def _is_conversation(messages: Any) -> bool:
    """Whether this is a conversation of whole exchanges whose pictures are in it."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return False
    later = messages[1:] if messages and messages[0].get("role") == "system" else messages
    if len(later) % 2 or any(m.get("role") != _ROLES[i % 2] for i, m in enumerate(later)):
        return False
    return all(_is_content(message.get("content"), message["role"]) for message in messages)


def _is_content(content: Any, role: str) -> bool:
    """Whether this is a text, or for a user's message texts and pictures, as data and not a URL."""
    if isinstance(content, str):
        return True
    if role != "user" or not isinstance(content, list):
        return False
    with suppress(KeyError, TypeError, AttributeError):
        return all(
            isinstance(part["text"], str)
            if part["type"] == "text"
            else part["type"] == "image_url" and part["image_url"]["url"].startswith("data:")
            for part in content
        )
    return False
