"""The plugin for Simon Willison's `llm`: registered GGUF models, which draft with their MTP head.

llm imports it through the entry point in pyproject.toml. llama.cpp is loaded with the first prompt.
"""

import json
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click
import llm
from pydantic import Field

from mtp_gguf.gguf_tools.errors import MtpGgufError
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.files.output import OutputFile
from mtp_gguf.gguf_tools.hub.remote import hub_gguf
from mtp_gguf.gguf_tools.model import open_model, whole_name

if TYPE_CHECKING:
    from mtp_gguf.native.chat.chat import Chat, Message

_DEFAULT_CONTEXT = 8192
_SEEDS = 1 << 32


class _Options(llm.Options):
    """Options of a prompt, with the names that plugins of llm share."""

    temperature: float | None = Field(
        description="Temperature; 0: greedy (default: the file's, else 0.8)", ge=0, default=None
    )
    top_p: float | None = Field(
        description="Likeliest tokens that add up to this (default: the file's, else 0.95)",
        ge=0,
        le=1,
        default=None,
    )
    top_k: int | None = Field(
        description="Number of likeliest tokens; 0: all (default: the file's, else 40)",
        ge=0,
        default=None,
    )
    max_tokens: int | None = Field(
        description="Tokens of the answer at most (default: as many as the context holds)",
        ge=1,
        default=None,
    )
    seed: int | None = Field(
        description="Seed of the sampler (default: random)", ge=0, lt=_SEEDS, default=None
    )
    depth: Literal["auto"] | int | None = Field(
        description="Tokens to draft in each cycle; 0: none (default: as tuned, else auto)",
        default=None,
    )
    ctx: int = Field(
        description="Size of the context in tokens; 0: the model's own",
        ge=0,
        default=_DEFAULT_CONTEXT,
    )


class Settings(NamedTuple):
    """What a model is loaded with."""

    source: str
    context: int
    depth: int | Literal["auto"] | None


class _Loaded:
    """The model that was used last, which stays loaded until another one is used."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._chat: Chat | None = None

    @contextmanager
    def use(self, settings: Settings) -> Iterator["Chat"]:
        """Load a model, unless it is loaded; other threads wait until its use ends."""
        with self._lock:
            if self._chat is None or settings != self._settings:
                self.close()
                self._chat, self._settings = _load(settings), settings
            yield self._chat

    def close(self) -> None:
        """Free the model."""
        with self._lock:
            if self._chat is not None:
                self._chat.llm.close()
            self._chat = self._settings = None


loaded = _Loaded()


def _load(settings: Settings) -> "Chat":
    """Load a model; its warnings become notes on standard error."""
    from mtp_gguf.native.chat.chat import Chat  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.native.llama.mtp_llama import MTPLlama  # noqa: PLC0415

    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        model = MTPLlama(settings.source, n_ctx=settings.context, depth=settings.depth)
    for note in notes:
        click.echo(f"mtp-gguf: {note.message}", err=True)
    try:
        return Chat(model)
    except BaseException:
        model.close()
        raise


class GgufModel(llm.Model):
    """A GGUF model that drafts with its MTP head. source: its file, or its name on the hub."""

    can_stream = True
    Options = _Options

    def __init__(self, model_id: str, source: str) -> None:
        self.model_id = model_id
        self._source = source

    def __str__(self) -> str:
        return f"mtp-gguf: {self.model_id}"

    def settings(self, options: Any) -> Settings:
        """Return what the model is loaded with for a prompt with these options."""
        return Settings(self._source, options.ctx, options.depth)

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[Any]:
        """Generate the answer; the context keeps the part of a conversation that it holds."""
        try:
            from llm.parts import StreamEvent  # noqa: PLC0415  (older versions have none)
        except ImportError:
            raise llm.ModelError("llm: expected version 0.32 or newer; upgrade it") from None
        options = prompt.options
        try:
            with loaded.use(self.settings(options)) as chat:
                from mtp_gguf.native.llama.sampling import Sampling  # noqa: PLC0415

                sampling = Sampling.chosen(
                    chat.llm.metadata,
                    temp=options.temperature,
                    top_p=options.top_p,
                    top_k=options.top_k,
                )
                seed = secrets.randbelow(_SEEDS) if options.seed is None else options.seed
                chat.llm.set_seed(seed)
                asked = chat.prompt([_message(message) for message in prompt.messages])
                before = chat.generated.total()
                for piece in chat.answer(asked, sampling, options.max_tokens or 0):
                    yield StreamEvent("reasoning" if piece.thinking else "text", piece.text)
                response.set_usage(input=len(asked.tokens), output=chat.generated.total() - before)
        except MtpGgufError as error:
            raise llm.ModelError(str(error)) from None


def _message(message: Any) -> "Message":
    """Return a message of llm as the chat template reads it, without the thinking."""
    from llm.parts import ReasoningPart, TextPart  # noqa: PLC0415

    texts = [part for part in message.parts if not isinstance(part, ReasoningPart)]
    if any(not isinstance(part, TextPart) for part in texts):
        raise llm.ModelError("the conversation: expected texts, found an attachment or a tool")
    return {"role": message.role, "content": "".join(part.text for part in texts)}


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Offer the registered models to llm."""
    for name, source in _registered().items():
        register(GgufModel(name, source))


@llm.hookimpl
def register_commands(cli: click.Group) -> None:
    """Add `llm mtp-gguf`."""

    @cli.group(name="mtp-gguf")
    def group() -> None:
        """Choose the GGUF models that llm runs with mtp-gguf."""

    @group.command(name="register")
    @click.argument("model")
    @click.option("--name", help="Name of the model in llm (default: the file's, without .gguf).")
    def register(model: str, name: str | None) -> None:
        """Add a GGUF file, or OWNER/NAME:QUANT on the hub, which its first prompt downloads."""
        default = model
        if hub_gguf(model) is None:
            try:
                with open_model(Path(model)) as opened:
                    path = opened.paths[0].resolve()
            except MtpGgufError as error:
                raise click.ClickException(str(error)) from None
            model, default = str(path), Path(whole_name(path)).stem
        name = name or default
        _write({**_registered(), name: model})
        click.echo(f"{name}: {model}")

    @group.command(name="unregister")
    @click.argument("name")
    def unregister(name: str) -> None:
        """Remove a model from llm; its file stays."""
        models = _registered()
        if models.pop(name, None) is None:
            known = ", ".join(models) or "none"
            raise click.ClickException(f"{name}: expected a registered model; there are: {known}")
        _write(models)


def _registry() -> Path:
    return Path(llm.user_dir()) / "mtp-gguf.json"


def _registered() -> dict[str, str]:
    """Return the file or hub name of each registered model, by its name in llm."""
    path = _registry()
    if not path.exists():
        return {}
    try:
        models = parse_json(path.read_text("utf-8"))
        return {str(name): str(source) for name, source in models.items()}
    except (OSError, ValueError, AttributeError):
        click.echo(
            f"mtp-gguf: {path}: expected the registered models, found no such JSON", err=True
        )
        return {}


def _write(models: dict[str, str]) -> None:
    data = f"{json.dumps(models, indent=1, ensure_ascii=False)}\n".encode()
    with OutputFile(_registry(), len(data)) as out:
        out.write(0, data)
        out.commit()
