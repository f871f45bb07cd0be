"""`mtp-gguf chat`: talk to a model in the terminal, drafting with its MTP head."""

import codecs
import json
import secrets
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError
from mtp_gguf.gguf_tools.output import OutputFile, check_output

from . import token_colors
from .drafting_model import drafting_model
from .generate import parse_depth, report
from .options import (
    AsJson,
    Context,
    CpuMoe,
    GpuLayers,
    HeadFile,
    ModelName,
    Temperature,
    Threads,
)
from .progress import reports_errors

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyPressEvent

    from mtp_gguf.native.llama import MTPLlama

Message: TypeAlias = dict[str, str]

THINK, END_THINK = "<think>", "</think>"
HELP = """\
/reset         forget the conversation
/save FILE     write the conversation to FILE: JSON if it ends with .json, else Markdown
/stats         show speed and acceptance of the answers
/help          show this
/exit          leave, as Ctrl-D does
Alt-Enter or a backslash at the end of a line continues a message in the next line. Ctrl-C stops an
answer, or clears the line."""

_LARGEST_LINE = 1 << 20  # characters of a message from standard input


@reports_errors
def chat(
    model: ModelName,
    system: Annotated[
        str | None,
        typer.Option("-sys", "--system", help="Begin the conversation with this system message."),
    ] = None,
    n: Annotated[
        int,
        typer.Option(
            "-n",
            "--tokens",
            min=-1,
            help="Answer with at most N tokens; 0 or -1: as many as the context holds.",
        ),
    ] = 0,
    context: Context = 8192,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    n_cpu_moe: CpuMoe = 0,
    temperature: Temperature = 0.7,
    seed: Annotated[
        int, typer.Option(min=-1, max=(1 << 32) - 2, help="Seed the sampler; -1: at random.")
    ] = -1,
    depth: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Draft N tokens per cycle, 0: none; auto: as many as pay off (default: as tuned, "
            "else auto).",
        ),
    ] = None,
    head: HeadFile = None,
    plain: Annotated[
        bool, typer.Option("--no-color", help="Do not color tokens by their source.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Chat with a model in the terminal, drafting with its MTP head.

    Uses the model's chat template. Accepted drafts are colored and underlined, as by `generate`;
    the model's thinking is dimmed. /help lists the commands. If standard input is not a terminal,
    each line is a message, and only the answers are printed; with --json, the conversation at its
    end.

    **Examples**

    mtp-gguf chat model.gguf

    mtp-gguf chat OWNER/NAME:Q4_K_M --system "Answer in one sentence." --ctx 16384

    echo "What is a GGUF?" | mtp-gguf chat model.gguf --temp 0
    """
    wanted = parse_depth(depth)
    llm = drafting_model(model, head, wanted, context, threads, gpu_layers, n_cpu_moe)
    from mtp_gguf.native.generate import chat_renderer  # noqa: PLC0415  (loads llama.cpp)

    with closing(llm):
        llm.set_seed(secrets.randbelow(1 << 32) if seed == -1 else seed)
        render = chat_renderer(llm.metadata.get("tokenizer.chat_template"))
        if render is None:
            raise RequestError(
                f"{model}: expected a model with a chat template, found none; use mtp-gguf generate"
            )
        conversation = Conversation(llm, render, system, n, temperature)
        terminal = not as_json and sys.stdin is not None and sys.stdin.isatty()
        terminal = terminal and sys.stdout.isatty()
        colored = not plain and token_colors.wanted(sys.stdout)
        if terminal:
            typer.echo("/help lists the commands, Ctrl-D ends the chat.", err=True)
        for message in _from_terminal() if terminal else _from_input():
            if message.startswith("/"):
                if not _obey(conversation, message):
                    break
            else:
                _answer(conversation, message, colored=colored, terminal=terminal, quiet=as_json)
        if as_json:
            typer.echo(json.dumps(conversation.record(), ensure_ascii=False))


class Conversation:
    """The messages of a chat, and the model that answers them."""

    def __init__(
        self,
        llm: "MTPLlama",
        render: Callable[[list[Message]], str],
        system: str | None,
        most: int,
        temperature: float,
    ) -> None:
        self._llm = llm
        self._render = render
        self._first = [{"role": "system", "content": system}] if system is not None else []
        self._most = most
        self._temperature = temperature
        self._generated: Counter[int] = Counter()  # tokens by origin
        self._seconds = 0.0
        self.messages = [*self._first]

    @property
    def statistics(self) -> str:
        """Speed and acceptance of all answers."""
        if not self._generated:
            return "no answer yet"
        did = self._llm.mtp_stats
        lines = report(did, self._generated.total(), self._seconds)
        if any(did.drafted):
            lines += token_colors.table(self._generated, did.acceptance, colored=False)
        return lines.rstrip("\n")

    def record(self) -> dict[str, Any]:
        """Return the conversation and its statistics for --json."""
        return {
            "messages": self.messages,
            "generated": self._generated.total(),
            "seconds": self._seconds,
            **asdict(self._llm.mtp_stats),
        }

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [*self._first]

    def answer(self, message: str, stopped: Callable[[], bool]) -> Iterator[tuple[str, int, bool]]:
        """Answer a message: yields pieces of text, with their origin and whether they are thinking.

        stopped: asked after each token; the answer so far is kept then. RequestError, which leaves
        the conversation as it was, if the message does not fit the context.
        """
        llm = self._llm
        self.messages.append({"role": "user", "content": message})
        try:
            prompt, tokens = self._prompt()
        except MtpGgufError:
            self.messages.pop()
            raise
        room = llm.n_ctx() - len(tokens)
        most = min(self._most, room) if self._most > 0 else room
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        thinking = ThinkingText(prompt.rstrip().endswith(THINK))
        text: list[str] = []
        began = perf_counter()
        with closing(llm.generate(tokens, temp=self._temperature)) as stream:
            for token in islice(stream, most):
                if stopped() or llm.is_end(token):
                    break
                origin = llm.token_origin
                self._generated[origin] += 1
                for piece, thought in thinking.add(decoder.decode(llm.detokenize([token]))):
                    text += [] if thought else [piece]
                    yield piece, origin, thought
        for piece, thought in [*thinking.add(decoder.decode(b"", final=True)), *thinking.end()]:
            text += [] if thought else [piece]
            yield piece, 0, thought
        self._seconds += perf_counter() - began
        self.messages.append({"role": "assistant", "content": "".join(text).strip()})

    def _prompt(self) -> tuple[str, list[int]]:
        """Return the prompt as text and tokens, without the oldest messages if they do not fit."""
        later = self.messages[len(self._first) :]
        while True:
            prompt = self._render([*self._first, *later])
            tokens = self._llm.tokenize(prompt.encode(), special=True)
            if len(tokens) < self._llm.n_ctx():
                break
            if len(later) == 1:
                raise RequestError(
                    f"the message: expected fewer than {self._llm.n_ctx()} tokens, found "
                    f"{len(tokens)}; shorten it, or raise --ctx"
                )
            later = later[2:]
        if len(later) < len(self.messages) - len(self._first):
            self.messages = [*self._first, *later]
            typer.echo("mtp-gguf: the oldest messages no longer fit the context", err=True)
        return prompt, tokens


class ThinkingText:
    """Separates a model's thinking, between THINK and END_THINK, from its answer."""

    def __init__(self, thinking: bool) -> None:
        """thinking: the text begins with it, because the prompt ends with THINK."""
        self._thinking = thinking
        self._waiting = ""  # text that may be the beginning of a mark

    def add(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield the text that is known to be no mark, and whether it is thinking."""
        text = self._waiting + text
        while True:
            mark = END_THINK if self._thinking else THINK
            before, found, text_after = text.partition(mark)
            if not found:
                break
            if before:
                yield before, self._thinking
            self._thinking, text = not self._thinking, text_after
        n = next(n for n in range(len(mark) - 1, -1, -1) if text.endswith(mark[:n]))
        self._waiting = text[len(text) - n :]
        if text := text[: len(text) - n]:
            yield text, self._thinking

    def end(self) -> Iterator[tuple[str, bool]]:
        """Yield what was waiting for the rest of a mark."""
        if self._waiting:
            yield self._waiting, self._thinking


def _answer(
    conversation: Conversation, message: str, *, colored: bool, terminal: bool, quiet: bool
) -> None:
    """Print the answer to a message unless `quiet`; on a terminal Ctrl-C stops it."""
    shown, before = "", False
    with _stop_button(terminal) as stopped:
        try:
            for piece, origin, thought in conversation.answer(message, stopped):
                if quiet or (thought and not terminal):
                    continue
                if before and not thought and terminal:
                    sys.stdout.write("\n")  # between thinking and answer
                before = thought
                shown = token_colors.styled(
                    piece, origin, colored=colored, terminal=terminal, dimmed=thought
                )
                sys.stdout.write(shown)
                sys.stdout.flush()
        except RequestError as error:
            if not terminal:
                raise
            typer.echo(f"mtp-gguf: {error}", err=True)
    sys.stdout.write("" if quiet or shown.endswith("\n") else "\n")
    sys.stdout.flush()


@contextmanager
def _stop_button(terminal: bool) -> Iterator[Callable[[], bool]]:
    """Make the first Ctrl-C stop an answer instead of the program, on a terminal.

    Yields a function that tells whether it was pressed.
    """
    pressed = threading.Event()

    def press(_number: int, _frame: FrameType | None) -> None:
        if pressed.is_set():  # a long prompt does not stop: the second one ends the program
            raise KeyboardInterrupt
        pressed.set()

    if not terminal:
        yield pressed.is_set
        return
    handler = signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, handler)


def _obey(conversation: Conversation, line: str) -> bool:
    """Carry out a command of the chat; False for the one that ends it."""
    word, _, rest = line.partition(" ")
    if word in ("/exit", "/quit"):
        return False
    if word == "/reset":
        conversation.reset()
        said = "the conversation is forgotten"
    elif word == "/stats":
        said = conversation.statistics
    elif word == "/help":
        said = HELP
    elif word == "/save":
        said = _save(conversation, rest.strip())
    else:
        said = f"{word}: no such command; /help lists them"
    typer.echo(said, err=True)
    return True


def _save(conversation: Conversation, name: str) -> str:
    """Write the conversation; return what to say about it."""
    if not name:
        return "/save: expected a file, as in /save chat.md"
    path = Path(name).expanduser()
    if path.suffix == ".json":
        text = json.dumps(conversation.messages, indent=1, ensure_ascii=False)
    else:
        text = "\n\n".join(f"## {m['role']}\n\n{m['content']}" for m in conversation.messages)
    data = f"{text}\n".encode()
    if path.exists():
        return f"{path}: exists; choose another name"
    try:
        check_output(path, [], overwrite=False)
        with OutputFile(path, len(data)) as out:
            out.write(0, data)
            out.commit()
    except MtpGgufError as error:
        return str(error)
    return f"written: {path}"


def _from_terminal() -> Iterator[str]:
    """Yield the messages that the user types."""
    from prompt_toolkit import PromptSession  # noqa: PLC0415  (slow to import)
    from prompt_toolkit.key_binding import KeyBindings  # noqa: PLC0415

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: "KeyPressEvent") -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(key_bindings=keys, prompt_continuation="  ")
    lines: list[str] = []
    while True:
        try:
            line = session.prompt("  " if lines else "> ")
        except KeyboardInterrupt:  # clears the line
            lines.clear()
            continue
        except EOFError:
            return
        yield from _messages(lines, line)


def _from_input() -> Iterator[str]:
    """Yield the messages on standard input, one in each line."""
    lines: list[str] = []
    while sys.stdin is not None and (line := sys.stdin.readline(_LARGEST_LINE)):
        yield from _messages(lines, line.rstrip("\n"))
    yield from _messages(lines, "")


def _messages(lines: list[str], line: str) -> Iterator[str]:
    """Yield the message that ends with this line, if one does; `lines` has those before."""
    if line.endswith("\\"):
        lines.append(line[:-1])
        return
    message = "\n".join([*lines, line]).strip()
    lines.clear()
    if message:
        yield message
