"""Generate docs/commands.md from the commands themselves.

    python docs/make_commands.py            prints the page
    python docs/make_commands.py --write    replaces docs/commands.md

A test compares the commands and options of the page with those of the code.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from mtp_gguf.cli.app import app

PAGE = Path(__file__).with_name("commands.md")
_INTRODUCTION = """\
# Commands and their options

Made from the code by `docs/make_commands.py`. The option `--help` of a command prints the same.
"""


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    context = typer.Context(typer.main.get_command(app), info_name="mtp-gguf")
    yield _INTRODUCTION
    commands = list(_commands(context))
    for command in commands:
        first = (command.command.help or "").partition("\n")[0]
        link = command.command_path.replace(" ", "-")
        yield f"- [`{command.command_path}`](#{link}): {first}"
    for command in commands:
        yield from _command(command)


def _commands(context: Any) -> Iterator[Any]:
    """Yield the contexts of the commands of a group, and of those of its groups."""
    for name in context.command.list_commands(context):
        command = context.command.get_command(context, name)
        inner = typer.Context(command, info_name=name, parent=context)
        if hasattr(command, "list_commands"):
            yield from _commands(inner)
        else:
            yield inner


def _command(context: Any) -> Iterator[str]:
    """Yield the section of a command: its help, arguments and options."""
    command = context.command
    yield f"\n## {context.command_path}\n"
    examples = False
    for paragraph in filter(None, f"{command.help or ''}\n\n{command.epilog or ''}".split("\n\n")):
        is_example = paragraph.strip().startswith("mtp-gguf ")
        if is_example != examples:
            yield "```\n" if not is_example else "```sh"
        examples = is_example
        yield paragraph.strip() if is_example else f"{paragraph.strip()}\n"
    if examples:
        yield "```\n"
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record and param.name != "help":
            yield f"- `{record[0]}`: {record[1]}"


if __name__ == "__main__":
    made = "\n".join(page()) + "\n"
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(made, encoding="utf-8")
    else:
        sys.stdout.write(made)
