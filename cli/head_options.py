"""The options on the MTP head and its draft vocabulary that several commands have."""

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

from .draft_options import DEFAULT_SIZE

# Panels of the help.
HEAD, DRAFT = "MTP head", "FastMTP draft vocabulary"

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
