"""The options that several commands have, each defined once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.model import Model

if TYPE_CHECKING:
    from mtp_gguf.convert.draft_vocabulary import DraftVocabulary

# Panels of the help.
HEAD, DRAFT = "MTP head", "FastMTP draft vocabulary"

DEFAULT_SIZE = -1  # stands for --fastmtp without a number, as in `convert`

_CORPUS = "--fastmtp-corpus"

MtpF16: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--mtp-f16", rich_help_panel=HEAD, help="MTP head in F16; short for --mtp-type F16."
    ),
]
FastMtp: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--fastmtp",
        metavar="[N]",
        rich_help_panel=DRAFT,
        help="Add a draft vocabulary of N tokens [32768].",
    ),
]
FastMtpCorpus: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        _CORPUS, metavar="FILE…", rich_help_panel=DRAFT, help="Text files to rank tokens by."
    ),
]
FastMtpIds: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--fastmtp-ids",
        metavar="FILE",
        rich_help_panel=DRAFT,
        help="Ranked ids: JSON, .npy or text.",
    ),
]
Revision: TypeAlias = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")
]
Overwrite: TypeAlias = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output.")
]
Budget = Annotated[
    str, typer.Option(help="About how long to measure: 90s, 5m, 1h. What matters less goes.")
]
AnswerTokens = Annotated[
    int | None,
    typer.Option("-n", "--tokens", min=2, max=4096, help="Of each answer. Without: what fits."),
]

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_LARGEST = 7 * 24 * 3600


class HeadCommand(TyperCommand):
    """A command whose `--fastmtp` may stand alone, and whose corpus may be several files."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare `--fastmtp` its stand-in value, and each corpus file its own option."""
        given: list[str] = []
        corpus = False
        for index, arg in enumerate(args):
            following = args[index + 1] if index + 1 < len(args) else ""
            if corpus and given[-1] != _CORPUS and Path(arg).is_file():
                given.append(_CORPUS)
            corpus = arg == _CORPUS or (corpus and not arg.startswith("-"))
            given.append(arg)
            if arg == "--fastmtp" and not following.isdecimal():
                given.append(str(DEFAULT_SIZE))
        return super().parse_args(ctx, given)


@dataclass(frozen=True)
class DraftOptions:
    """A draft vocabulary that was asked for: `size` None takes the default."""

    wanted: bool
    size: int | None
    corpus: tuple[Path, ...]
    ids_file: Path | None

    @classmethod
    def parse(
        cls, size: int | None, corpus: Sequence[Path] | None, ids_file: Path | None
    ) -> "DraftOptions":
        """The options as given; a usage error when they contradict each other."""
        if corpus and ids_file:
            raise typer.BadParameter("a list of ids and a corpus contradict each other")
        if size is not None and size < 1 and size != DEFAULT_SIZE:
            raise typer.BadParameter(f"expected a size from 1, found {size}")
        wanted = bool(size is not None or corpus or ids_file)
        return cls(wanted, None if size == DEFAULT_SIZE else size, tuple(corpus or ()), ids_file)

    @property
    def files(self) -> list[Path]:
        """The files that are read, to be held against an output's path."""
        return [*self.corpus, *([self.ids_file] if self.ids_file else [])]

    def ranked_for(self, model: Model) -> "DraftVocabulary":
        """The list that was asked for, ranked with the tokenizer of a GGUF."""
        from mtp_gguf.convert.gguf_draft import rank_for_gguf  # noqa: PLC0415  (NumPy)
        from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415
        from mtp_gguf.native.vocabulary import Vocabulary  # noqa: PLC0415

        tell_crashes()

        return rank_for_gguf(model, self.size, self.corpus, self.ids_file, Vocabulary)


def parse_budget(text: str) -> float:
    """Seconds; RequestError for what is no time."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([smh]?)", text.strip().lower(), re.ASCII)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= _LARGEST:
        raise RequestError(f"--budget: expected a time such as 90s, 5m or 1h; found {text!r}")
    return seconds


def parse_bytes(text: str) -> int:
    """`500M`, `4G` and the like as bytes, decimal as in llama.cpp's --split-max-size."""
    units = {"K": 10**3, "M": 10**6, "G": 10**9}
    number, unit = text[:-1], text[-1:].upper()
    if unit not in units or not number.isascii() or not number.isdigit() or not int(number):
        raise typer.BadParameter(
            f"expected a number and K, M or G, such as 4G; found {text!r}",
            param_hint="--split-max-size",
        )
    return int(number) * units[unit]
