"""The documentation that is made from the code equals what the code makes."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_tensors_page_is_the_codes() -> None:
    made = subprocess.run(
        [sys.executable, DOCS / "make_tensors.py"], capture_output=True, text=True, check=True
    )
    assert made.stdout == (DOCS / "tensors.md").read_text(encoding="utf-8")
