"""The help of commands: flags without a type, and plain text in narrow terminals."""

import re
import shutil
from collections.abc import Iterator
from copy import copy
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from .progress import NARROW

_INDENT = "    "
_LITERAL = re.compile(r"(`[^`]*`)|(?<!\*)\*(?!\*)")  # code, or a star that is no emphasis

if TYPE_CHECKING:
    from typer.core import TyperCommand as _Base
else:
    _Base = object


class ReadableHelp(_Base):
    """A base for Typer's commands and groups; it goes before their own."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters. Flags have no type to show."""
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, without Typer's braces around required arguments."""
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"^(?:\{(.*)\}|\[(\[.*\])\])", r"\1\2", piece) for piece in pieces]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: Rich's tables, or plain paragraphs in a narrow terminal."""
        width = shutil.get_terminal_size().columns
        if width >= NARROW:
            shown = copy(self)
            shown.help = _LITERAL.sub(lambda found: found[1] or r"\*", self.help or "")
            super(ReadableHelp, shown).format_help(ctx, formatter)
            return
        formatter.write("\n".join(self._narrow(ctx, width)) + "\n")

    def _narrow(self, ctx: Any, width: int) -> Iterator[str]:
        """Yield the lines of the help for a terminal of so many columns."""
        yield from wrap(ctx.get_usage(), width, subsequent_indent=_INDENT)
        text = "\n\n".join(filter(None, (self.help, self.epilog))).replace("**", "")
        for paragraph in text.split("\n\n"):
            yield from ("", *wrap(paragraph, width))
        commands = getattr(self, "list_commands", lambda _: ())(ctx)
        records = [(name, self._short_help(ctx, name)) for name in commands]
        records += [found for p in self.get_params(ctx) if (found := p.get_help_record(ctx))]
        for name, text in records:
            yield from ("", *wrap(name, width, subsequent_indent=_INDENT))
            yield from wrap(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT)

    def _short_help(self, ctx: Any, name: str) -> str:
        command = self.get_command(ctx, name)  # type: ignore[attr-defined]
        return str((command.help or "").partition("\n")[0])
