"""The pages of the documentation: their code blocks, and the commands and output that they show."""

from __future__ import annotations

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
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
    ROOT / "patches" / "README.md",
]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
# Figures that depend on the machine's kernels, which round differently at near ties.
MEASURED = re.compile(r"^(cycles: |accepted by position: |accepts ).*")


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in a language; "" for those that name none."""
    text = page.read_text(encoding="utf-8")
    return [code for found, code in BLOCK.findall(text) if found == language]


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
