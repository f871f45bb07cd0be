"""Drafters that are no MTP head, in a real llama-server: with random weights, the text stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.drafters import write_drafter
from support.models import Files
from support.real_server import PROMPTS, Server, drafts_of, tokens_of

pytestmark = pytest.mark.server


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_serve_drafts_with_it(kind: str, server: Server, files: Files, tmp_path: Path) -> None:
    base = files("base", "demo")
    drafter = write_drafter(tmp_path / "drafter.gguf", kind, base)
    want = tokens_of(server.answers(base, PROMPTS, options=["--no-draft"]))
    results = server.answers(base, PROMPTS, options=["--head", drafter, "--spec-draft-n-max", 2])
    assert tokens_of(results) == want
    assert drafts_of(results)[0] > len(PROMPTS)
