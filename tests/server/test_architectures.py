"""`serve` drafts with every architecture that llama.cpp gives a NextN block.

The files are synthetic: with random weights, whose heads predict nothing, or with a known
acceptance rate (benchmarks/dial_model.py). The text must be the same as without drafts. A few are
tested every day, all of them, and a trained Qwen3-Next, with: python -m pytest -m slow THIS_FILE
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.heads.nextn import ARCHITECTURES, BLOCKS, OUR_ARCHITECTURES
from mtp_gguf.native.head import Head
from support.commands import succeed
from support.models import ROOT, Dial, Models
from support.real_server import STEPS, TEXTS, Server, beside, counts, drafted, drafts_of, tokens_of
from support.upstream.nextn_models import write_models

pytestmark = pytest.mark.server

IN_ONE_GRAPH = "in one graph on CPU"
PROMPT = [1, 2, 3, 4, 9, 7, 5]
ALONE = ("--ctx-size", 256, "--parallel", 1)


@pytest.mark.parametrize(
    "name",
    [
        name if name == "glm4moe" else pytest.param(name, marks=pytest.mark.slow)
        for name in ARCHITECTURES
    ],
)
def test_the_text_is_the_same(name: str, server: Server, tmp_path: Path) -> None:
    model = write_models(tmp_path, [name])[name]
    texts, offered = [], []
    for options in (["--no-draft"], ["--depth", 2], ["--depth", "auto"]):
        with server.running(model, *ALONE, options=options, verbose=True) as client:
            result = client.complete(PROMPT)
        texts.append(result["tokens"])
        offered.append(result["timings"].get("draft_n", 0))
    assert texts[1:] == texts[:1] * 2
    assert offered[0] == 0
    assert min(offered[1:]) > 0
    assert (IN_ONE_GRAPH in client.log()) is (name in OUR_ARCHITECTURES)


NEWER = ("glm4moe", "qwen3next")
DEEP = ["--depth", 2]
CASES = [*itertools.product(OUR_ARCHITECTURES, ("random", "known"), (1, 2, 3))]
EVERYDAY = (("qwen3next", "known", 2), ("step35", "random", 3))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "weights", "depth"),
    [case if case in EVERYDAY else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_the_acceptance_is_llama_cpps(
    name: str, weights: str, depth: int, dial: Dial, server: Server, tmp_path: Path
) -> None:
    """Fused drafts are those of llama-server's own draft-mtp, and accepted as often."""
    model = dial.gguf(name) if weights == "known" else write_models(tmp_path, [name])[name]
    drafting = ["--depth", depth]
    results: list[dict[str, Any]] = []
    drafts: list[list[int]] = []
    for passed, options in (((), ["--no-draft"]), ((), drafting), ((STEPS,), drafting)):
        with server.running(model, *ALONE, *passed, options=options, verbose=True) as client:
            results.append(client.complete(PROMPT, n_predict=64))
        drafts.append(drafted(client.log()))
    plain, fused, steps = results
    assert fused["tokens"] == steps["tokens"] == plain["tokens"]
    assert counts(fused) == counts(steps)
    # In the last cycles, with less room than the depth, one driver makes drafts that it drops.
    before = counts(fused)[0] - depth * depth
    assert drafts[0] == []
    assert len(drafts[1]) >= before > 20
    assert drafts[1][:before] == drafts[2][:before]
    assert (counts(fused)[1] > 20) is (weights == "known")


def test_the_depth_is_limited_to_the_layers(server: Server, tmp_path: Path) -> None:
    """A larger depth is lowered, and the server says so."""
    model = write_models(tmp_path, ["step35"])["step35"]
    found = []
    for depth in (3, 5):
        with server.running(model, *ALONE, options=["--depth", depth], verbose=True) as client:
            result = client.complete(PROMPT)
        found.append((result["tokens"], counts(result)))
        said = "drafts are limited to 3 tokens, as many as the head can draft in one graph"
        assert (said in client.log()) is (depth > 3)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        case if case == ("glm4moe", "table") else pytest.param(*case, marks=pytest.mark.slow)
        for case in [*itertools.product(NEWER, ("ids", "table", "sidecar")), ("step35", "ids")]
    ],
)
def test_draft_vocabularies(
    name: str, layout: str, dial: Dial, server: Server, tmp_path: Path
) -> None:
    """Only listed tokens are drafted, by both drivers; the text does not change.

    llama.cpp's own driver ignores the list of several layers.
    """
    following, _ = dial.gguf_marks()
    listed = [*following][::2]
    model, ids = dial.gguf(name), tmp_path / "ids.json"
    ids.write_text(json.dumps(listed))
    out = tmp_path / "listed.gguf"
    succeed("fastmtp", "add", model, "--ids", ids, "--layout", layout, "-o", out)
    with Head(out) as head:
        draftable = {*head.draft_ids().tolist()}
    if layout == "sidecar":
        succeed("strip", model, "-o", tmp_path / "trunk.gguf")
        out = beside(tmp_path / "trunk.gguf", out, tmp_path)
    texts: list[list[int]] = []
    runs: list[tuple[tuple[str, ...], list[object]]] = [((), ["--no-draft"]), ((), [*DEEP])]
    if BLOCKS[name].single:
        runs.append(((STEPS,), [*DEEP]))
    for passed, options in runs:
        with server.running(out, *ALONE, *passed, options=options, verbose=True) as client:
            texts.append(client.complete(PROMPT, n_predict=64)["tokens"])
        found = {*drafted(client.log())}
        assert found <= draftable
        assert bool(found) is ("--no-draft" not in options)
    assert set(map(tuple, texts)) == {tuple(texts[0])}


RECIPE = ROOT / "benchmarks" / "demo_model"
SMALL: dict[str, tuple[object, ...]] = {
    "train.py": (
        *("--family", "qwen3_next", "--steps", 400, "--fall", 300),
        *("--batch", 8, "--length", 192, "--vocabulary", 2048),
    ),
    "polish.py": (
        *("--steps", 120, "--texts", 192, "--writers", 48),
        *("--length", 128, "--batch", 2048),
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's recipe for Qwen3-Next, cut to some minutes."""
    run, out = (tmp_path_factory.mktemp(name) for name in ("run", "trained"))
    for script, options in SMALL.items():
        recipe(script, "--out", run, *options)
    recipe("ship.py", "--run", run, "--out", out)
    return out


def recipe(script: str, *arguments: object) -> None:
    """Run a script of the demo model's recipe."""
    words = [sys.executable, script, *map(str, arguments)]
    subprocess.run(words, cwd=RECIPE, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["F16", "Q4_K_M"])
def test_a_trained_qwen3_next(quant: str, trained: Path, models: Models, server: Server) -> None:
    """The text without drafts and llama-server's own acceptance, at each depth."""
    model = models.convert(trained, "--quant", quant, "--mtp-f16")

    def run(*passed: object, options: list[Any]) -> tuple[list[Any], int, int]:
        results = server.answers(model, TEXTS, *passed, options=options, slots=1, n_predict=48)
        return tokens_of(results), *drafts_of(results)

    plain, _, _ = run(options=["--no-draft"])
    for depth in (1, 2, 3):
        fused = run(options=["--depth", depth])
        steps = run(STEPS, options=["--depth", depth])
        assert fused[0] == steps[0] == plain, depth
        assert fused[1:] == steps[1:], depth
        assert fused[2] > 0.5 * fused[1], depth
