"""Drafters that are no MTP head, in a real llama-server: with random weights, the text stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.drafters import write_drafter
from support.models import Files
from support.real_server import PROMPTS, running

pytestmark = pytest.mark.server


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_serve_drafts_with_it(
    kind: str, patched_server: Path, files: Files, tmp_path: Path, free_port: int
) -> None:
    base = files("base", "demo")
    drafter = write_drafter(tmp_path / "drafter.gguf", kind, base)
    with running(patched_server, base, free_port, options=["--no-draft"]) as client:
        want = [client.complete(prompt)["tokens"] for prompt in PROMPTS]
    options = ["--head", drafter, "--spec-draft-n-max", 2]
    with running(patched_server, base, free_port, options=options) as client:
        results = [client.complete(prompt) for prompt in PROMPTS]
    assert [result["tokens"] for result in results] == want
    assert sum(result["timings"]["draft_n"] for result in results) > len(PROMPTS)
