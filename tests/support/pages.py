"""The pages of the documentation, their code blocks, and what the code tells its readers."""

from __future__ import annotations

import ast
import re
import subprocess
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
def shown(path: Path) -> str:
    """What a file tells its readers: a page, or the docstrings and help texts of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            found.append(ast.get_docstring(node) or "")
        if isinstance(node, ast.keyword) and node.arg == "help":
            constants = (n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant))
            found += [value for value in constants if isinstance(value, str)]
    return "\n".join(found)


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
