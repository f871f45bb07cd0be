"""`serve` drafts with every architecture that llama.cpp gives a NextN block.

The files are synthetic: their heads predict nothing, but the text must be the same as without them.
One architecture is tested every day, all of them with: python -m pytest -m slow THIS_FILE
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.nextn import ARCHITECTURES, OUR_ARCHITECTURES
from support.real_server import running
from support.upstream.nextn_models import write_models

pytestmark = pytest.mark.server

IN_ONE_GRAPH = "in one graph on CPU"
PROMPT = [1, 2, 3, 4, 9, 7, 5]


@pytest.mark.parametrize(
    "name",
    [
        name if name == "glm4moe" else pytest.param(name, marks=pytest.mark.slow)
        for name in ARCHITECTURES
    ],
)
def test_the_text_is_the_same(
    name: str, patched_server: Path, free_port: int, tmp_path: Path
) -> None:
    model = write_models(tmp_path, [name])[name]
    texts, drafted = [], []
    log = tmp_path / "log"
    for options in (["--no-draft"], ["--depth", 2], ["--depth", "auto"]):
        common = ("--ctx-size", 256, "--parallel", 1, "--log-file", log, "--verbosity", 10)
        with running(patched_server, model, free_port, *common, options=options) as client:
            result = client.complete(PROMPT)
        texts.append(result["tokens"])
        drafted.append(result["timings"].get("draft_n", 0))
    assert texts[1:] == texts[:1] * 2
    assert drafted[0] == 0
    assert min(drafted[1:]) > 0
    assert (IN_ONE_GRAPH in log.read_text(errors="replace")) is (name in OUR_ARCHITECTURES)
