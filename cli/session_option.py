"""`--session` of the commands that generate text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from mtp_gguf.gguf_tools.errors import MtpGgufError
from mtp_gguf.gguf_tools.files.output import check_output

if TYPE_CHECKING:
    from mtp_gguf.native.llama.mtp_llama import MTPLlama

SessionFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--session",
        "--prompt-cache",
        metavar="FILE",
        help="Continue the session in this file, if it exists; save it there at the end.",
    ),
]


def load(llm: "MTPLlama", path: Path | None) -> dict[str, Any] | None:
    """Load the session if there is one, and return what was saved with it, else None.

    Errors of `MTPLlama.load_session`, or of a path that could not be written later.
    """
    if path is None:
        return None
    check_output(path, [], overwrite=True)
    _ = llm.session  # NativeError if the model runs without one
    return llm.load_session(path) if path.exists() else None


def save(llm: "MTPLlama", path: Path, extra: dict[str, Any]) -> None:
    """Save the session; what prevents that is a warning, as the text is complete."""
    try:
        llm.save_session(path, extra=extra)
    except MtpGgufError as error:
        typer.echo(f"mtp-gguf: the session is not saved: {error}", err=True)


def prompt_tokens(llm: "MTPLlama", extra: dict[str, Any], text: str) -> list[int] | None:
    """Return the tokens of a prompt that continues the loaded session; None for other prompts.

    An empty prompt is the session's text; one that begins with that text keeps its tokens, so that
    none of them is read again.
    """
    following = extra.get("next")
    known: list[int] = llm.input_ids[: llm.n_tokens].tolist()
    if isinstance(following, list) and all(type(token) is int for token in following):
        known += [token for token in following if 0 <= token < llm.n_vocab()]
    if not text:
        return known
    if min(known, default=0) < 0:
        return None  # a picture is no text
    start = llm.detokenize(known, special=True).decode(errors="surrogateescape")
    if not start or not text.startswith(start):
        return None
    rest = text[len(start) :].encode()
    return [*known, *llm.tokenize(rest, add_bos=False, special=True)]
