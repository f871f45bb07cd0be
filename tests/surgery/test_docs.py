"""The transcripts of docs/surgery.md are what the commands print.

`python tests/surgery/test_docs.py` writes them anew.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.commands import invoke  # noqa: E402

PAGE = ROOT / "docs" / "surgery.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
# Kernels of other machines round differently at near ties.
MEASURED = re.compile(r"\d+%( of first drafts \()\d+")


def transcripts(folder: Path) -> Iterator[str]:
    """Each block of the page, with what its commands print in a folder with the demo's files."""
    from mtp_gguf import gguf_tools  # noqa: PLC0415

    (folder / "demo_model").symlink_to(Path(next(iter(gguf_tools.__path__))) / "demo_model")
    before = Path.cwd()
    os.chdir(folder)
    try:
        invoke("convert", "demo_model", "-o", "whole.gguf", "--mtp-f16")
        invoke("strip", "whole.gguf", "-o", "base.gguf")
        for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
            commands = [line for line in block.splitlines() if line.startswith("$ mtp-gguf ")]
            parts = []
            for command in commands:
                result = invoke(*shlex.split(command.removeprefix("$ mtp-gguf ")))
                parts.append(f"{command}\n{result.stdout}")
            yield "".join(parts)
    finally:
        os.chdir(before)


def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    shown = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(shown) == 5
    assert "% of first drafts (" in "".join(shown)
    printed = transcripts(tmp_path)
    assert [MEASURED.sub(r"N\1n", b) for b in shown] == [MEASURED.sub(r"N\1n", b) for b in printed]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        made = iter(list(transcripts(Path(scratch))))
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(BLOCK.sub(lambda _: f"```console\n{next(made)}```", text), encoding="utf-8")
