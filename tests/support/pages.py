"""The pages of the documentation, their code blocks, and what the code tells its readers."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.models import ROOT

DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "benchmarks/results").glob("*.md")),
    *(ROOT / name / "README.md" for name in ("benchmarks/demo_model", "native/kernels", "patches")),
]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
# Figures that depend on the machine's kernels, which round differently at near ties.
MEASURED = re.compile(r"^(cycles: |accepted by position: |acceptance: ).*")


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in a language; "" for those that name none."""
    text = page.read_text(encoding="utf-8")
    return [code for found, code in BLOCK.findall(text) if found == language]


@cache
def repository() -> list[str]:
    """The names of all files of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@cache
def prose(path: Path) -> list[tuple[int, str]]:
    """What a file tells its readers, in numbered lines: a page, or the message of a patch.

    Of code its comments, docstrings and strings of three words or more, which are help and errors.
    In tests strings are data and left out.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return list(_of_python(text, strings="tests" not in path.relative_to(ROOT).parts))
    if path.suffix in (".md", ".patch"):
        return list(enumerate(text.partition("\ndiff --git ")[0].splitlines(), 1))
    part = C_PROSE if path.suffix in (".c", ".cpp", ".h") else re.compile(r"(?:^|\s)#.*")
    lines = enumerate(text.splitlines(), 1)
    return [(number, found) for number, line in lines for found in part.findall(line)]


C_PROSE = re.compile(r'//.*|/\*.*|^\s*\*.*|"[^"\n]* [^"\n]* [^"\n]*"')


def _of_python(text: str, *, strings: bool) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    docstrings = set()
    for node in ast.walk(ast.parse(text)):  # statements come before what they consist of
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstrings |= {part.value for part in node.body[:1] if isinstance(part, ast.Expr)}
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if node in docstrings or (strings and node.value.count(" ") > 1):
            for number, line in enumerate(node.value.splitlines(), node.lineno):
                yield number, line.strip()


def shown(path: Path) -> str:
    """The lines of `prose` as a text."""
    return "\n".join(line for _, line in prose(path))


@cache
def words_of(line: str) -> list[str]:
    """The words of a command, as bash splits it."""
    script = f"printf '%s\\0' {line}"
    done = subprocess.run(["bash", "-fc", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def fits(expected: str, printed: str) -> bool:
    """Whether a text is as shown, with `…` for any lines and other figures where measured."""
    lines = [MEASURED.sub(r"\1N", line) for line in expected.splitlines()]
    pattern = "\n".join(r"(?:.*\n)*?.*" if line == "…" else re.escape(line) for line in lines)
    text = "\n".join(MEASURED.sub(r"\1N", line) for line in printed.splitlines())
    return re.fullmatch(pattern, text) is not None
