"""`mtp-gguf chat`: talk to a model in the terminal, drafting with its MTP head."""

import json
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError
from mtp_gguf.gguf_tools.files.output import check_output

from . import named_sessions, options, token_colors
from .chat_commands import Answer, obey
from .conversation import Conversation
from .drafting_model import drafting_model, vision_tower
from .generate import as_utf8, parse_depth
from .gpu_options import MainGpu, Split, TensorSplit, split_options
from .progress import reports_errors
from .session_option import SessionFile

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyPressEvent

_LARGEST_LINE = 1 << 20  # characters of a message from standard input


class Reasoning(str, Enum):
    """Whether a model thinks before it answers; AUTO leaves that to its template."""

    ON = "on"
    OFF = "off"
    AUTO = "auto"

    @property
    def enabled(self) -> bool | None:
        """The template's variable `enable_thinking`; None to leave it undefined."""
        return None if self is Reasoning.AUTO else self is Reasoning.ON


@reports_errors
def chat(
    model: options.ModelName,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this message first."),
    ] = None,
    system: options.System = None,
    reasoning: Annotated[
        Reasoning,
        typer.Option(
            "-rea",
            "--reasoning",
            help="Let the model think before it answers; auto: as its template decides.",
        ),
    ] = Reasoning.AUTO,
    budget: Annotated[
        int,
        typer.Option(
            "--reasoning-budget",
            min=-1,
            max=2**31 - 1,
            help="Think for at most N tokens; -1: as many as the context holds.",
        ),
    ] = -1,
    mmproj: options.Mmproj = None,
    images: options.Images = None,
    n: Annotated[
        int,
        typer.Option(
            "-n",
            "--tokens",
            min=-1,
            help="Answer with at most N tokens; 0 or -1: as many as the context holds.",
        ),
    ] = 0,
    session: SessionFile = None,
    name: Annotated[
        str | None,
        typer.Option(
            named_sessions.OPTION,
            metavar="[NAME]",
            help="Continue the conversation of this name, or start it, and save it at the end; "
            "without NAME, the last one with this model.",
        ),
    ] = None,
    context: options.Context = 8192,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = 0,
    n_cpu_moe: options.CpuMoe = 0,
    split_mode: Split = None,
    tensor_split: TensorSplit = None,
    main_gpu: MainGpu = None,
    temperature: Annotated[
        float | None,
        options.sampling_option(
            "--temp",
            min=0.0,
            max=100.0,
            help="Sample at this temperature; 0: greedy (default: the file's, else 0.8).",
        ),
    ] = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = None,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = -1,
    depth: Annotated[str | None, options.depth_option()] = None,
    head: options.HeadFile = None,
    mtp_type: options.LoadedType = None,
    plain: options.NoColor = False,
    as_json: options.AsJson = False,
) -> None:
    """Chat with a model in the terminal, drafting with its MTP head.

    Uses the model's chat template. Accepted drafts are colored and underlined, as by `generate`;
    the model's thinking is dimmed. /help lists the commands. If standard input is not a terminal,
    each line is a message, and only the answers are printed; with --json, the conversation at its
    end.

    **Examples**

    mtp-gguf chat model.gguf

    mtp-gguf chat OWNER/NAME:Q4_K_M --system "Answer in one sentence." --ctx 16384

    mtp-gguf chat model.gguf --reasoning off --image photo.png -p "What is this?"

    mtp-gguf chat model.gguf --session notes.session

    mtp-gguf chat model.gguf --continue notes

    echo "What is a GGUF?" | mtp-gguf chat model.gguf --temp 0
    """
    if name is not None and session is not None:
        raise typer.BadParameter(f"{named_sessions.OPTION} and --session cannot be combined")
    wanted = parse_depth(depth)
    system = system and as_utf8("--system", system)
    split = split_options(split_mode, tensor_split, main_gpu)
    llm = drafting_model(
        model,
        head,
        wanted,
        context,
        threads,
        gpu_layers,
        n_cpu_moe,
        split=split,
        mtp_type=mtp_type,
    )
    from mtp_gguf.native.chat.chat import Chat  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.native.llama.sampling import Sampling  # noqa: PLC0415

    with closing(llm):
        answers = Chat(
            llm,
            thinking=reasoning.enabled,
            most_thinking=budget,
            mmproj=vision_tower(llm, mmproj),
        )
        sampling = Sampling.chosen(
            llm.metadata,
            temp=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )
        conversation = Conversation(answers, sampling, options.sampler_seed(seed), system, n)
        if name is not None:
            session = named_sessions.path_of(name, llm)
        if session is not None:
            check_output(session, [], overwrite=True)
            if session.exists():
                conversation.load_session(session)
                if system is not None:
                    conversation.system = system
        for image in images or ():
            conversation.attach(image)
        terminal = not as_json and sys.stdin is not None and sys.stdin.isatty()
        terminal = terminal and sys.stdout.isatty()
        screen = _Screen(not plain and token_colors.wanted(sys.stdout), terminal, quiet=as_json)
        if terminal:
            _say("/help lists the commands, Ctrl-D ends the chat.")
        if prompt:
            screen.echo(prompt)
            screen.show(partial(conversation.answer, prompt))
        for message in _from_terminal() if terminal else _from_input():
            if not message.startswith("/"):
                screen.show(partial(conversation.answer, message))
                continue
            outcome = obey(conversation, message)
            if outcome.ends:
                break
            if outcome.said:
                _say(outcome.said)
            if outcome.answer is not None:
                screen.show(outcome.answer)
        if session is not None and llm.n_tokens:
            try:
                conversation.save_session(session)
            except MtpGgufError as error:
                _say(f"mtp-gguf: the session is not saved: {error}")
        if as_json:
            typer.echo(json.dumps(conversation.record(), ensure_ascii=False))


@dataclass(frozen=True)
class _Screen:
    """Standard output: a terminal, or what reads the answers alone; nothing of them if quiet."""

    colored: bool
    terminal: bool
    quiet: bool

    def echo(self, message: str) -> None:
        """Show a message that was not typed, as if it had been."""
        if self.terminal:
            typer.echo(f"> {message}")

    def show(self, answer: Answer) -> None:
        """Print an answer while it is generated; on a terminal Ctrl-C stops it."""
        shown, before = "", False
        with _stop_button(self.terminal) as stopped:
            try:
                for piece in answer(stopped):
                    if self.quiet or (piece.thinking and not self.terminal):
                        continue
                    if before and not piece.thinking and self.terminal:
                        sys.stdout.write("\n")  # between thinking and answer
                    before = piece.thinking
                    shown = token_colors.styled(
                        piece.text,
                        piece.origin,
                        colored=self.colored,
                        terminal=self.terminal,
                        dimmed=piece.thinking,
                    )
                    sys.stdout.write(shown)
                    sys.stdout.flush()
            except RequestError as error:
                if not self.terminal:
                    raise
                _say(f"mtp-gguf: {error}")
        sys.stdout.write("" if self.quiet or shown.endswith("\n") else "\n")
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


def _say(text: str) -> None:
    """Print on standard error what is not an answer, within the columns of a terminal."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        text = "\n".join(_wrapped(line, columns) for line in text.split("\n"))
    typer.echo(text, err=True)


def _wrapped(line: str, columns: int) -> str:
    """Wrap a line, if it is too long, between words; indent what continues it."""
    if len(line) <= columns:
        return line
    return textwrap.fill(" ".join(line.split()), columns, subsequent_indent="    ")


def _from_terminal() -> Iterator[str]:
    """Yield the messages that the user types."""
    from prompt_toolkit import PromptSession  # noqa: PLC0415  (slow to import)
    from prompt_toolkit.key_binding import KeyBindings  # noqa: PLC0415

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: "KeyPressEvent") -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        key_bindings=keys, prompt_continuation="  ", enable_suspend=True
    )
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
