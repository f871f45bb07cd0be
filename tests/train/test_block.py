"""The block in PyTorch computes the logits of our draft graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mtp_gguf.gguf_tools.doctor import value_findings
from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.files.format import TensorSpec, Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import TensorCopy, write
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.gguf_tools.heads.carrier import carry
from mtp_gguf.gguf_tools.heads.transplant import with_head
from mtp_gguf.gguf_tools.model import Metadata, open_model
from mtp_gguf.native.head import Head
from mtp_gguf.train.block import (
    TABLE_SUFFIXES,
    MtpBlock,
    fresh_weights,
    own_tables,
    read_tensor,
    read_weights,
    rows_of,
)
from mtp_gguf.train.chain import MtpChain, make_head, read_divisors
from mtp_gguf.train.config import BlockConfig
from mtp_gguf.train.dataset import Sample
from mtp_gguf.train.measure import measure_file
from mtp_gguf.train.trainer import Trainer, TrainSettings, read_tables
from mtp_gguf.train.write_back import head_tensors
from support.carried_models import write_model
from support.gguf_files import edited
from support.models import Models
from support.upstream.nextn_models import drafts, write_models

DEPTH = 4
TOKENS = [int(t) for t in np.random.PCG64(11).random_raw(33) % np.uint64(900)]
# Logits have a standard deviation of 1.1; a wrong norm, position or mask shows as 0.05 to 5.
# Measured: 0.003 with F32 and F16 weights, all of it from the graph's F16 keys and values.
CACHE_TOLERANCE = 0.01
# The graph rounds activations to 8 bits before each product with quantized weights. Root mean
# square; measured: up to 0.05.
QUANTIZED_RMS_TOLERANCE = 0.08


def logits_of(
    path: Path, head: MtpBlock | MtpChain, hidden: np.ndarray, tokens: list[int], row: int
) -> np.ndarray:
    """The logits of one row of each step, [steps, vocabulary]."""
    with open_model(path) as model:
        sample = Sample(np.asarray(tokens, np.int32), hidden.astype(np.float16), 0, held_out=False)
        ids = np.arange(model.vocabulary_size or 0)
        tables = read_tables(model, [sample], ids)
    places = tables.place[tokens]
    with torch.no_grad():
        embedded = [table[places][None] for table in tables.embeddings]
        steps = head.steps(torch.from_numpy(hidden)[None], embedded, DEPTH)
        outputs = tables.outputs if len(tables.outputs) > 1 else tables.outputs * DEPTH
        pairs = zip(steps, outputs, strict=False)  # a chain has fewer steps
        return np.stack([(state[0, row] @ output.T).numpy() for state, output in pairs])


def head_of(path: Path, rank: int = 0) -> MtpBlock | MtpChain:
    with open_model(path) as model:
        configs = BlockConfig.all_of(model.head)
        return make_head(configs, read_weights(model), rank, read_divisors(model))


def block_of(path: Path, rank: int = 0) -> MtpBlock:
    head = head_of(path, rank)
    assert isinstance(head, MtpBlock)
    return head


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("spec", "quant", "head"),
    [
        ("dense-tied", "F32", "F32"),
        ("dense-untied", "F32", "F16"),
        ("moe-fused", "F32", "F32"),
        ("moe-mixed", "F16", "F16"),
        ("next-unfused", "F32", "F32"),
        ("Qwen3.5-1.5M-Chat-v1.1", "F32", "F32"),  # YaRN
        ("dense-untied", "Q4_K_M", "Q4_K"),
        ("moe-mixed", "Q4_K_M", "Q8_0"),
    ],
)
def test_logits_equal_the_draft_graphs(models: Models, spec: str, quant: str, head: str) -> None:
    check_logits(models.gguf(spec, quant, head), quantized=quant == "Q4_K_M")


def check_logits(path: Path, *, quantized: bool = False) -> None:
    with Head(path, n_threads=1) as drafter:
        given = [token % drafter.n_vocab for token in TOKENS]
        n = len(given)
        hidden = np.random.default_rng(3).standard_normal((n + DEPTH - 1, drafter.n_embd))
        hidden = hidden.astype(np.float32)
        depth = min(DEPTH, drafter.max_depth)
        drafted = drafter.draft(given[1:], hidden[: n - 1], 1, depth, logits=True)
    # The graph goes on with its drafts, and the block with the same tokens.
    tokens = [*given, *drafted.tokens, *given][: len(hidden)]
    found = logits_of(path, head_of(path), hidden, tokens, n - 2)
    assert drafted.logits is not None
    difference = np.abs(found - drafted.logits)
    if quantized:
        assert np.sqrt(np.mean(difference**2)) < QUANTIZED_RMS_TOLERANCE
    else:
        assert difference.max() < CACHE_TOLERANCE
        assert found.argmax(1).tolist() == drafted.tokens


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads of other architectures with random weights and every optional tensor."""
    return write_models(tmp_path_factory.mktemp("others"), ["glm4moe", "step35"])


def with_own_tables(tensors: dict[str, TensorCopy]) -> None:
    """Embeddings and outputs of the blocks stay, which are others than the trunk's."""
    assert any(name.endswith(TABLE_SUFFIXES) for name in tensors)


def without_own_tables(tensors: dict[str, TensorCopy]) -> None:
    for name in [name for name in tensors if name.endswith(TABLE_SUFFIXES)]:
        del tensors[name]


@pytest.mark.parametrize(("used", "normed"), [(2, True), (1, True), (1, False)])
def test_logits_of_glm(used: int, normed: bool, others: dict[str, Path], tmp_path: Path) -> None:
    """Experts chosen by a sigmoid and a bias; biases and norms of queries and keys."""

    def choose(keys: Metadata) -> None:
        keys["glm4moe.expert_used_count"] = Value(ValueType.U32, used)
        keys["glm4moe.expert_weights_norm"] = Value(ValueType.BOOL, normed)

    path, tensors = tmp_path / "glm.gguf", without_own_tables if normed else with_own_tables
    check_logits(edited(others["glm4moe"], path, metadata=choose, tensors=tensors))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("windows", ["first", "second"])
@pytest.mark.parametrize("limit", [0.0, 0.125])
def test_logits_of_a_chain(
    own: bool, windows: str, limit: float, others: dict[str, Path], tmp_path: Path
) -> None:
    """Three blocks, with windows or without, experts, gates of heads and matrices of their own."""

    def choose(keys: Metadata) -> None:
        pattern = [i % 2 == (windows == "first") for i in range(5)]
        keys["step35.attention.sliding_window_pattern"] = Value(ValueType.BOOL, pattern)
        keys["step35.attention.sliding_window"] = Value(ValueType.U32, 3)
        keys["step35.swiglu_clamp_exp"] = Value(ValueType.F32, [limit] * 5)

    path, tensors = tmp_path / "chain.gguf", with_own_tables if own else without_own_tables
    made = edited(others["step35"], path, metadata=choose, tensors=tensors)
    check_logits(made)
    with open_model(made) as model:
        assert len(own_tables(model)) == (6 if own else 0)
        first, second, third = BlockConfig.all_of(model.head)
    assert bool(first.window) == bool(third.window) != bool(second.window)


@pytest.mark.parametrize("architecture", ["glm4moe", "step35"])
def test_drafts_are_counted_as_those_of_the_file(
    architecture: str, others: dict[str, Path], tmp_path: Path
) -> None:
    """With embeddings and outputs of the blocks; every third position is drafted from rightly."""
    path, steps, n = others[architecture], 3, 63
    with Head(path, n_threads=1) as head:
        hidden = np.random.default_rng(5).standard_normal((n, head.n_embd)).astype(np.float16)
        tokens = [7, 9]
        while len(tokens) + steps <= n:
            at = len(tokens) - 2
            states = hidden[: at + 1].astype(np.float32)
            head.rollback(0)
            tokens += head.draft(tokens[1:], states, 1, steps).tokens
    samples = [
        Sample(np.asarray(tokens, np.int32), hidden[: len(tokens)], 0, held_out)
        for held_out in (False, True)
    ]
    want = measure_file(path, samples[1:], steps, rows=n, threads=1)
    with open_model(path) as model:
        ids = np.arange(model.vocabulary_size or 0)
        configs, weights = BlockConfig.all_of(model.head), read_weights(model)
        tables, divisors = read_tables(model, samples, ids), read_divisors(model)
    settings, data = TrainSettings(steps=steps), (samples[:1], samples[1:])
    shared = replace(tables, outputs=(tables.output,) * len(tables.outputs))
    (found, loss), (others_found, other_loss) = (
        Trainer(configs, weights, own, *data, settings, tmp_path, divisors).evaluate()
        for own in (tables, shared)
    )
    assert found == want
    assert min(found.rates) > 0.3 > max(others_found.rates)
    assert loss != pytest.approx(other_loss, rel=1e-6)


def test_logits_of_a_new_head_for_a_carrier(tmp_path: Path) -> None:
    """One expert and a shared one, without biases."""
    path = write_model(tmp_path / "model.gguf", "qwen2", biased=True)
    with open_model(path) as model:
        write(tmp_path / "carrier.gguf", carry(model))
    made = tmp_path / "made.gguf"
    with open_model(tmp_path / "carrier.gguf") as model:
        weights = fresh_weights(model, seed=1)
        spread = {s: w * (1 if w.ndim == 1 else 10) for s, w in weights.items()}
        tensors = head_tensors(spread, model.head.trunk_layers, BY_NAME["F32"])
        write(made, with_head(model, tensors, {}))
    check_logits(made)
    assert drafts([made]) != [None]  # of stock llama.cpp
    with open_model(made) as model:
        assert not list(value_findings(model))  # of a router of zeros, with nothing to choose
        assert "ffn_gate_inp" not in dict(block_of(made).named_parameters())


@pytest.mark.parametrize(("first", "every"), [(0, 2), (1, 3)])
def test_some_rows_are_those_of_all(models: Models, first: int, every: int) -> None:
    """Later steps of every so many rows compute what those rows are if all are computed."""
    block = block_of(models.gguf("moe-mixed", "F32", "F32"))
    random = torch.Generator().manual_seed(2)
    hidden, embedding = torch.randn(2, 2, 24, block.config.width, generator=random)
    with torch.no_grad():
        whole = list(block.steps(hidden, [embedding], 4))
        some = list(block.steps(hidden, [embedding], 4, first=first, every=every))
    for step, (a, b) in enumerate(zip(whole, some, strict=True)):
        rows = rows_of(step, 24, first, every)
        assert (
            torch.arange(24)[rows].tolist()
            == [*range(24)][first if step else 0 : 23 - step : every if step else 1]
        )
        assert torch.allclose(a[:, rows], b, atol=1e-5)


def test_fused_tensors_are_split(models: Models, tmp_path: Path) -> None:
    path = models.gguf("dense-untied", "F32", "F32")
    block = "blk.4."

    def fuse(tensors: dict[str, TensorCopy]) -> None:
        parts = [tensors.pop(f"{block}attn_{n}.weight") for n in "qkv"]
        shape = (parts[0].spec.shape[0], sum(p.spec.shape[1] for p in parts))
        spec = TensorSpec(f"{block}attn_qkv.weight", shape, parts[0].spec.type)
        data = b"".join(p.source.read(p.offset, p.spec.nbytes) for p in parts if p.source)
        tensors[spec.name] = TensorCopy(spec, data=data)

    fused = edited(path, tmp_path / "fused.gguf", tensors=fuse)
    with open_model(path) as apart, open_model(fused) as together:
        want, found = read_weights(apart), read_weights(together)
    assert want.keys() == found.keys()
    assert all(np.array_equal(want[suffix], found[suffix]) for suffix in want)


def test_low_rank_starts_where_the_whole_starts(models: Models) -> None:
    path = models.gguf("dense-tied", "F32", "F32")
    whole, low = block_of(path), block_of(path, rank=4)
    assert all(np.array_equal(a, low.weights()[s]) for s, a in whole.weights().items())
    count = sum(p.numel() for p in low.parameters())
    assert count < sum(p.numel() for p in whole.parameters()) / 10


@pytest.mark.parametrize("spec", ["dense-untied", "moe-mixed"])
def test_a_fresh_head_has_the_shapes_of_a_head(models: Models, spec: str) -> None:
    with open_model(models.convert(spec, "--quant", "F32", "--no-mtp")) as model:
        weights, same = fresh_weights(model, seed=1), fresh_weights(model, seed=1)
        norm = read_tensor(model, "output_norm.weight")
    assert np.array_equal(weights["nextn.shared_head_norm.weight"], norm)
    assert all(np.array_equal(weights[s], same[s]) for s in weights)
    assert {s: w.shape for s, w in weights.items()} == {
        s: w.shape for s, w in block_of(models.gguf(spec)).weights().items()
    }


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.head_count", Value(ValueType.U32, 3), "a multiple of 2 KV heads, found 3"),
        ("attention.head_count_kv", None, "expected a whole number from 1, found no such key"),
        ("rope.dimension_count", Value(ValueType.U32, 15), "an even number up to 64, found 15"),
        ("rope.scaling.type", Value(ValueType.STRING, "longrope"), "found 'longrope'"),
    ],
)
def test_wrong_metadata(
    models: Models, tmp_path: Path, key: str, value: Value | None, words: str
) -> None:
    path = models.gguf()

    def change(metadata: Metadata) -> None:
        metadata.pop(f"qwen35.{key}", None)
        if value is not None:
            metadata[f"qwen35.{key}"] = value

    broken = edited(path, tmp_path / "broken.gguf", metadata=change)
    with open_model(broken) as model, pytest.raises(FormatError, match=words):
        BlockConfig.of(model.head)
