"""The commands of `mtp-gguf chat`, such as /save."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError
from mtp_gguf.gguf_tools.files.output import OutputFile, check_output

from .conversation import Conversation, text_of
from .generate import as_utf8

if TYPE_CHECKING:
    from mtp_gguf.native.chat.chat import Piece


# Generates an answer until the function that it gets returns True.
Answer: TypeAlias = Callable[[Callable[[], bool]], Iterator["Piece"]]


class Outcome(NamedTuple):
    """What a command leads to: a text to tell, an answer to show, or the end of the chat."""

    said: str = ""
    answer: Answer | None = None
    ends: bool = False


class _Command(NamedTuple):
    """usage: with the argument that it needs, or may have in brackets."""

    usage: str
    help: str
    run: Callable[[Conversation, str], Outcome]


def obey(conversation: Conversation, line: str) -> Outcome:
    """Carry out a command of the chat; what is wrong with it is told."""
    word, _, rest = line.partition(" ")
    command = _COMMANDS.get(word)
    if command is None:
        return Outcome(f"{word}: no such command; /help lists them")
    argument = _unquoted(rest)
    if command.usage.endswith(" FILE") and not argument:
        return Outcome(f"{word}: expected a file, as in {word} {_EXAMPLES[word]}")
    try:
        return command.run(conversation, argument)
    except MtpGgufError as error:
        return Outcome(str(error))


def _unquoted(text: str) -> str:
    """Return the argument of a command, without quotes around it."""
    text = text.strip()
    quoted = re.fullmatch(r"""(["'])(.*)\1""", text, re.DOTALL)
    return quoted[2] if quoted else text


def _system(conversation: Conversation, text: str) -> Outcome:
    if not text:
        return Outcome(conversation.system or "no system message; /system TEXT sets one")
    conversation.system = as_utf8("/system", text)
    return Outcome("the system message is set")


def _image(conversation: Conversation, name: str) -> Outcome:
    path = Path(name).expanduser()
    conversation.attach(path)
    return Outcome(f"{path}: goes with the next message")


def _regenerate(conversation: Conversation, _: str) -> Outcome:
    conversation.check_exchange()
    return Outcome(answer=conversation.regenerate)


def _undo(conversation: Conversation, _: str) -> Outcome:
    conversation.undo()
    return Outcome("the last message and its answer are removed")


def _reset(conversation: Conversation, _: str) -> Outcome:
    conversation.reset()
    return Outcome("the conversation is forgotten")


def _save(conversation: Conversation, name: str) -> Outcome:
    path = Path(name).expanduser()
    if path.suffix == ".session":
        if path.exists():
            raise RequestError(f"{path}: exists; choose another name")
        conversation.save_session(path)
        return Outcome(f"written: {path}")
    if path.suffix == ".json":
        text = json.dumps(conversation.messages, indent=1, ensure_ascii=False)
    else:
        text = "\n\n".join(f"## {m['role']}\n\n{text_of(m)}" for m in conversation.messages)
    data = f"{text}\n".encode()
    if path.exists():
        raise RequestError(f"{path}: exists; choose another name")
    check_output(path, [], overwrite=False)
    with OutputFile(path, len(data)) as out:
        out.write(0, data)
        out.commit()
    return Outcome(f"written: {path}")


def _load(conversation: Conversation, name: str) -> Outcome:
    path = Path(name).expanduser()
    from mtp_gguf.native.sessions.session_file import is_session  # noqa: PLC0415  (NumPy)

    if is_session(path):
        conversation.load_session(path)
    else:
        conversation.load(path)
    return Outcome(
        f"{path}: the conversation goes on from its {len(conversation.messages)} messages"
    )


def _help(_: Conversation, __: str) -> Outcome:
    width = max(len(command.usage) for command in _COMMANDS.values())
    lines = [f"{command.usage:{width}}  {command.help}" for command in _listed()]
    return Outcome("\n".join([*lines, _KEYS]))


def _listed() -> list[_Command]:
    """Return the commands without their other names."""
    return list(dict.fromkeys(_COMMANDS.values()))


_KEYS = """\
Alt-Enter or a backslash at the end of a line continues a message in the next line. Ctrl-C stops an
answer, or clears the line; Ctrl-Z suspends the chat."""

_EXAMPLES = {"/image": "photo.png", "/save": "chat.md", "/load": "chat.json"}

_CLEAR = _Command("/reset", "forget the conversation; also /clear", _reset)
_EXIT = _Command("/exit", "leave, as Ctrl-D does", lambda *_: Outcome(ends=True))
_COMMANDS = {
    "/system": _Command("/system [TEXT]", "show the system message, or use another one", _system),
    "/image": _Command("/image FILE", "add a picture to the next message", _image),
    "/regen": _Command("/regen", "answer the last message again", _regenerate),
    "/undo": _Command("/undo", "remove the last message and its answer", _undo),
    "/reset": _CLEAR,
    "/clear": _CLEAR,
    "/save": _Command(
        "/save FILE",
        "write the conversation to FILE: JSON (.json), a session (.session), else Markdown",
        _save,
    ),
    "/load": _Command(
        "/load FILE", "continue the conversation in a JSON or session file of /save", _load
    ),
    "/stats": _Command(
        "/stats",
        "show speed and acceptance of the answers",
        lambda conversation, _: Outcome(conversation.statistics),
    ),
    "/help": _Command("/help", "show this", _help),
    "/exit": _EXIT,
    "/quit": _EXIT,
}
