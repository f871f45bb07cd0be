"""Heads of split models: the same drafts as from one file, and shards that do not fit, by name."""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.format import open_gguf
from mtp_gguf.native.errors import ModelRefusedError
from mtp_gguf.native.head import Head as AnyHead
from mtp_gguf.native.libraries.exact import sgemm_tensors
from support.generation import load, take
from support.gguf_files import Rewrite
from support.models import Models

if TYPE_CHECKING:
    from pathlib import Path

Head = partial(AnyHead, n_threads=1)
TOKENS = [5, 9, 400, 2, 77]


@pytest.fixture(scope="module")
def shards(models: Models) -> list[Path]:
    """The model of models.gguf(layout="ids"), in shards that part the head's tensors."""
    first = models.convert(
        *("dense-tied", "--quant", "F32", "--mtp-type", "F32", "--split-max-size", "2500K"),
        *("--fastmtp-layout", "ids", "--fastmtp-ids", models.ids_file()),
    )
    return sorted(first.parent.iterdir())


def test_drafts_are_those_of_one_file(models: Models, shards: list[Path]) -> None:
    holders = set()
    for path in shards:
        with open_gguf(path) as file:
            holders |= {path for t in file.tensors if t.name.startswith("blk.4.")}
    assert len(holders) > 1
    rows = np.random.default_rng(1).normal(size=(len(TOKENS), 256)).astype(np.float32)
    drafts = []
    for path in (models.gguf(layout="ids"), shards[0]):
        with Head(path) as head:
            assert head.layout == "ids"
            drafts.append(head.draft(TOKENS, rows, 0, 4, logits=True))
    assert drafts[0].tokens == drafts[1].tokens
    first, second = (draft.logits for draft in drafts)
    assert first is not None
    assert second is not None
    assert np.array_equal(first, second)


def test_a_head_of_its_own_finds_its_trunk_in_shards(models: Models, shards: list[Path]) -> None:
    rows = np.random.default_rng(1).normal(size=(len(TOKENS), 256)).astype(np.float32)
    path = models.gguf(layout="ids")
    with Head(path) as whole, Head(path, trunk=shards[0]) as beside:
        assert whole.draft(TOKENS, rows, 0, 3).tokens == beside.draft(TOKENS, rows, 0, 3).tokens


def test_the_model_is_run_from_its_first_shard(models: Models, shards: list[Path]) -> None:
    texts = []
    for path in (models.gguf(layout="ids"), shards[0]):
        with load(path, depth=2) as llm:
            texts.append(take(llm, 8, TOKENS))
    assert texts[0] == texts[1]


def test_exact_looks_into_all_shards(models: Models, shards: list[Path]) -> None:
    """The kernels to avoid depend on types that any shard may hold."""
    whole = models.gguf(layout="ids")
    assert sorted(sgemm_tensors(shards[0])) == sorted(sgemm_tensors(whole))
    texts, logits = [], []
    for path, depth in ((whole, 0), (shards[0], 0), (shards[0], 3)):
        with load(path, depth=depth, logits_all=True, exact=True) as llm:
            texts.append(take(llm, 24, TOKENS))
            logits.append(llm.scores[: len(TOKENS) + 23].copy())
    assert texts[0] == texts[1] == texts[2]
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[1], logits[2])


def test_shards_that_do_not_fit_are_named(shards: list[Path], tmp_path: Path) -> None:
    n = len(shards)
    with pytest.raises(ModelRefusedError, match=f"expected the first shard, found number 2 of {n}"):
        Head(shards[1])
    for path in shards:
        shutil.copy(path, tmp_path)
    first, second, third = (tmp_path / path.name for path in shards[:3])
    other = tmp_path / "other.gguf"
    shutil.copy(first, other)
    with pytest.raises(ModelRefusedError, match=rf"name that ends in -00001-of-0000{n}\.gguf"):
        Head(other)
    shutil.copy(third, second)
    with pytest.raises(ModelRefusedError, match=f"{second.name}: expected shard 2 of {n}, found 3"):
        Head(first)
    second.unlink()
    with pytest.raises(ModelRefusedError, match=f"{second.name}: cannot be opened: No such file"):
        Head(first)
    shutil.copy(shards[1], second)
    last = tmp_path / shards[-1].name  # where the head's tensors end
    last.write_bytes(last.read_bytes()[:-100_000])
    with pytest.raises(ModelRefusedError, match=f"{last.name}: blk.*found the end of the file"):
        Head(first)


def test_a_tensor_in_two_shards_is_refused(
    shards: list[Path], tmp_path: Path, rewrite: Rewrite
) -> None:
    for path in shards:
        shutil.copy(path, tmp_path)
    with open_gguf(shards[0]) as file:
        t = file.tensors[0]
        twice = {t.name: (t.shape, t.type, bytes(file.source.read(t.offset, t.nbytes)))}
    shutil.move(rewrite(shards[1], tensors=twice), tmp_path / shards[1].name)
    with pytest.raises(ModelRefusedError, match=f"{t.name}: expected each tensor in one shard"):
        Head(tmp_path / shards[0].name)
