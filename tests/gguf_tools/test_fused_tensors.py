"""Heads with fused tensors, as upstream's converter writes them, work like any other.

`--fuse-qkv --fuse-gate-up-exps` of convert_hf_to_gguf.py stores query, key and value, and the gates
and ups of the experts, in one tensor each. Stock llama.cpp drafts with such files.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mtp_gguf.gguf_tools.model import list_tensors, open_model
from mtp_gguf.native import MTPLlama
from mtp_gguf.native.errors import NativeError
from mtp_gguf.native.head import Draft, Head
from mtp_gguf.server.model import open_model as open_served_model
from support.checkpoints import SPECS
from support.commands import invoke, refused, succeed
from support.gguf_files import edited, reshape
from support.models import DEMO, Models
from support.upstream.convert_upstream import convert, quantize
from support.upstream.llama_mtp import LlamaMtp

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra"),
]

FLAGS = ("--fuse-qkv", "--fuse-gate-up-exps")
DEPTH = 4
TOKENS = [int(t) for t in np.random.PCG64(11).random_raw(33) % np.uint64(900)]
# As in tests/native/test_head.py: activations are rounded to 8 bits before each product.
QUANTIZED_RMS_TOLERANCE = 0.08


@dataclass(frozen=True)
class Pair:
    """A checkpoint and its GGUFs by upstream: `fused` and `plain` in Q8_0, `wide` in BF16."""

    checkpoint: Path
    wide: Path
    fused: Path
    plain: Path
    parts: set[str]  # the fused tensors' suffixes in the MTP block


@pytest.fixture(scope="module", params=["demo", "moe-mixed"])
def pair(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    """The plain file in 16 bits is ours, which test_goldens.py holds to upstream's bytes."""
    folder = tmp_path_factory.mktemp("fused")
    moe = request.param != "demo"
    checkpoint = models.checkpoint(SPECS[request.param]) if moe else DEMO
    wide = convert(checkpoint, folder / "wide.gguf", "bf16", FLAGS)
    succeed("convert", checkpoint, "-o", folder / "w.gguf", "--quant", "BF16", "--mtp-type", "BF16")
    return Pair(
        checkpoint,
        wide,
        quantize(wide, folder / "fused.gguf", "Q8_0"),
        quantize(folder / "w.gguf", folder / "plain.gguf", "Q8_0"),
        {"attn_qkv.weight", "ffn_gate_up_exps.weight"} if moe else {"attn_qkv.weight"},
    )


def drafted(path: Path, hidden: np.ndarray) -> Draft:
    rows = np.concatenate([np.zeros((1, hidden.shape[1])), hidden]).astype(np.float32)
    with Head(path, n_threads=1) as head:
        return head.draft(TOKENS, rows, 0, DEPTH, logits=True)


def test_drafts_are_those_of_the_plain_file(pair: Pair) -> None:
    """Bit for bit, and llama.cpp's own graph agrees on the same file."""
    with open_model(pair.fused) as model:
        assert pair.parts <= set(model.head.suffixes.values())
    with LlamaMtp(pair.fused) as upstream:
        hidden = upstream.trunk(TOKENS[:-1])[1]
        ours, plain = drafted(pair.fused, hidden), drafted(pair.plain, hidden)
        want = upstream.draft(TOKENS, hidden, DEPTH, follow=ours.tokens)[1]
    assert ours.logits is not None
    assert plain.logits is not None
    assert np.array_equal(ours.logits, plain.logits)
    assert ours.tokens == plain.tokens
    assert np.sqrt(np.mean((ours.logits - want) ** 2)) < QUANTIZED_RMS_TOLERANCE


def test_text_and_acceptance_are_those_of_the_plain_file(pair: Pair) -> None:
    def written(path: Path, depth: int) -> tuple[list[int], tuple[int, ...]]:
        # One thread: tiny products gain nothing from more, and lose much on a busy machine.
        threads = {"n_threads": 1, "n_threads_batch": 1}
        with closing(MTPLlama(str(path), n_ctx=128, depth=depth, verbose=False, **threads)) as llm:
            tokens = llm.generate(TOKENS, temp=0.0)
            text = [int(next(tokens)) for _ in range(32)]
            return text, llm.mtp_stats.accepted

    fused = written(pair.fused, 3)
    assert fused == written(pair.plain, 3)
    assert fused[0] == written(pair.fused, 0)[0]


def test_every_command_takes_it(pair: Pair, tmp_path: Path) -> None:
    listing = list_tensors(pair.fused)
    assert listing.head is not None
    assert listing.head.ready
    assert open_served_model(pair.fused).head.ready
    assert "cannot" not in succeed("doctor", pair.fused, "--source", pair.checkpoint)
    for other in (pair.plain, pair.checkpoint):
        assert "only in" not in succeed("compare", pair.fused, other)
    succeed("strip", pair.fused, "-o", tmp_path / "trunk.gguf")
    succeed("extract", pair.fused, "-o", tmp_path / "head.gguf")
    for donor in (pair.fused, tmp_path / "head.gguf"):
        made = tmp_path / "made.gguf"
        graft = ("graft", tmp_path / "trunk.gguf", "--from", donor, "-o", made, "--overwrite")
        succeed(*graft, "--no-check")
        assert made.read_bytes() == pair.fused.read_bytes()
    for layout in ("ids", "table", "sidecar"):
        made = tmp_path / f"{layout}.gguf"
        succeed("fastmtp", "add", pair.fused, "-n", 400, "--layout", layout, "-o", made)
        with open_model(made) as model:
            assert model.head.report.ready


def test_requantized_as_llama_quantize_does(pair: Pair, tmp_path: Path) -> None:
    with open_model(pair.wide) as model:
        head = [(rf"blk\.{model.head.trunk_layers}\..*", "Q4_K")]
    theirs = quantize(pair.wide, tmp_path / "theirs.gguf", "Q4_K_M", head)
    ours = tmp_path / "ours.gguf"
    succeed("convert", pair.wide, "-o", ours, "--quant", "Q4_K_M", "--mtp-type", "Q4_K")
    assert ours.read_bytes() == theirs.read_bytes()


def test_heads_of_the_wrong_height_are_refused(pair: Pair, tmp_path: Path) -> None:
    with open_model(pair.fused) as model:
        names = {s: n for n, s in model.head.suffixes.items()}
    for suffix in pair.parts:
        shorten = reshape(names[suffix], lambda shape: (shape[0], shape[1] - 64, *shape[2:]))
        broken = edited(pair.fused, tmp_path / "broken.gguf", tensors=shorten)
        result = invoke("doctor", broken)
        assert result.exit_code == 1
        assert f"{names[suffix]}: expected shape" in result.stdout
        with pytest.raises(NativeError, match=f"{names[suffix]}: expected"):
            Head(broken)
        out = tmp_path / "x.gguf"
        words = (names[suffix], "does not fit")
        succeed("strip", pair.fused, "-o", tmp_path / "trunk.gguf", "--overwrite")
        refused(
            tmp_path, "graft", tmp_path / "trunk.gguf", "--from", broken, "-o", out, words=words
        )
