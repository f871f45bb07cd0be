"""llama-server remembers what depth "auto" has learned, in a file that `serve` chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.depth_file import VARIABLE
from support.models import Dial
from support.real_server import Server

pytestmark = pytest.mark.server


def test_a_server_goes_on_as_the_last_one_ended(
    server: Server, dial: Dial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = dial("tiny", hit=0.0)
    drafts, texts = [], []
    for depth in ("auto", "auto", "2"):
        with server.running(model, options=("--depth", depth)) as client:
            result = client.complete([5, 6, 7, 8], n_predict=120)
        texts.append(result["tokens"])
        drafts.append(result["timings"].get("draft_n", 0))
    assert texts[0] == texts[1] == texts[2]
    assert drafts[1] <= 2 < drafts[0]
    files = list((tmp_path / "mtp-gguf" / "depth").iterdir())
    assert [file.suffix for file in files] == [".depth"]  # a fixed depth learns nothing
