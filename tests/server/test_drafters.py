"""Drafters that are no MTP head, in a real llama-server: with random weights, the text stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.drafters import write_drafter
from support.models import Files
from support.real_server import PROMPTS, answers, drafts_of, tokens_of

pytestmark = pytest.mark.server


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_serve_drafts_with_it(
    kind: str, patched_server: Path, files: Files, tmp_path: Path, free_port: int
) -> None:
    base = files("base", "demo")
    drafter = write_drafter(tmp_path / "drafter.gguf", kind, base)
    asked = (patched_server, base, free_port, PROMPTS)
    want = tokens_of(answers(*asked, options=["--no-draft"]))
    results = answers(*asked, options=["--head", drafter, "--spec-draft-n-max", 2])
    assert tokens_of(results) == want
    assert drafts_of(results)[0] > len(PROMPTS)
