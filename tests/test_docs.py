"""The documentation says what the code does: made pages, commands, tables and links."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from mtp_gguf.cli import app
from mtp_gguf.cli.bench_table import bench_table
from support import bench_records as records
from support.commands import invoke
from support.models import ROOT
from support.pages import BLOCK, DOCS, PAGES, blocks, fits, words_of


def test_tensors_page_is_the_codes() -> None:
    made = subprocess.run(
        [sys.executable, DOCS / "make_tensors.py"], capture_output=True, text=True, check=True
    )
    assert made.stdout == (DOCS / "tensors.md").read_text(encoding="utf-8")


def commands(page: Path) -> Iterator[str]:
    """Every command line of ours in a page: in its code blocks, and in its text if it has words."""
    text = page.read_text(encoding="utf-8")
    lines: list[str] = []
    for _, code in BLOCK.findall(text):
        typed = re.findall(r"^\$ .*", code, re.MULTILINE)  # the rest of a transcript is output
        lines += typed or code.splitlines()
    lines += re.findall(r"(?<!`)`([^`\n]*mtp-gguf [^`\n]*)`(?!`)", BLOCK.sub("", text))
    for line in lines:
        for part in re.split(r"&&|\|(?=\s)|;\s", line.partition(" #")[0]):
            words = part.removeprefix("$ ").strip()
            if match := re.match(r"(?:[A-Z_]+=(?:\"[^\"]*\"|\S*) )*mtp-gguf +(?=\S)", words):
                yield words[match.end() :]


def parses(words: list[str]) -> str | None:
    """Why the command line does not accept these words; None if it does. Nothing is run."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    try:
        while hasattr(group, "commands") or hasattr(group, "list_commands"):
            name, group, words = group.resolve_command(context, words)
        group.make_context(name, [*words], resilient_parsing=False)
    except typer.Exit:
        return None  # --help
    except Exception as error:  # the parser's own, of several kinds
        return getattr(error, "message", str(error))
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_is_accepted(page: Path) -> None:
    """Names of commands and options exist, values are possible, and nothing is left out."""
    wrong = {}
    for line in commands(page):
        if re.search(r"…|\.\.\.|\[|<", line):  # a synopsis
            continue
        if reason := parses(words_of(line)):
            wrong[line] = reason
    assert not wrong


def test_commands_are_found() -> None:
    found = [*commands(ROOT / "README.md")]
    assert "generate demo.gguf -p $'def is_prime(n):\\n' -n 96 --ctx 512 --depth 3 --stats" in found
    assert "serve OWNER/NAME:Q4_K_M" in found
    assert len(found) > 20
    assert "No such option" in str(parses(["convert", "x", "--no-such"]))
    assert "No such command" in str(parses(["converts", "x"]))


class TestReadme:
    def test_the_demo_runs_these_commands(self, tmp_path: Path) -> None:
        """`mtp-gguf demo` prints the commands of the first transcript, word for word."""
        printed = invoke("demo", "-o", tmp_path / "demo.gguf").output
        [first, *_] = [code for code in blocks(ROOT / "README.md", "") if code.startswith("$ ")]
        shown = [line for line in first.splitlines() if line.startswith("$ mtp-gguf ")]
        assert len(shown) == 2
        assert {*shown} <= {*printed.splitlines()}


def test_measured_tables_have_the_columns_of_today() -> None:
    """docs/bench.md shows figures that were measured once, under what `bench` prints now."""
    result = records.result()
    texts = tuple(text for text in result.texts if text.depth != "auto")  # it has no kinds
    printed = {line.rstrip() for line in bench_table(replace(result, texts=texts))}
    shown = "\n".join(blocks(DOCS / "bench.md", "")).splitlines()
    headings = [line for line in shown if "±" in line or line.startswith("llama-server, ")]
    assert len(headings) == 3
    assert {*headings} <= printed


def test_what_fits() -> None:
    assert fits("a\n…\nd", "a\nb\nc\nd")
    assert fits("a\n…", "a\nb")
    assert fits("cycles: 27, 3.52 tokens each", "cycles: 28, 3.41 tokens each")
    assert not fits("a\n…\nc", "a\nb")
    assert not fits("a", "a\nb")


def test_links_lead_somewhere() -> None:
    """Links to files and to headings of other pages."""
    broken = []
    for page in PAGES:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"https?:|mailto:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def anchors(page: Path) -> set[str]:
    """The names of a page's headings and of its bold questions, as GitHub makes them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}
