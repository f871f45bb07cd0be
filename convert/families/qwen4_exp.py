"""Qwen3.8-Flash-Next: Qwen3.5 with hyper-connections, sparse attention and n-gram embeddings.

The GGUF side is llama.cpp's `qwen4exp` (src/models/qwen4exp.cpp), the Hugging Face side
transformers' `qwen4_exp`. Hyper-connections, which read from and add to several residual streams,
take the place of the norms before and after each block. The head reads all streams and ends with a
mixer of its own. The table of n-gram embeddings is stored in parts, and its hash constants, which
need all of their 64 bits, become metadata.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mtp_gguf.gguf_tools.files.format import Value, ValueType

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import ConfigReader, is_whole
from ..checkpoints.source_tensors import SourceTensors
from ..plans.recipe import Recipe, Target
from . import qwen
from .qwen import Dims, Entry, QwenModel, norm
from .qwen3_5 import LINEAR_ATTENTION, mrope_sections
from .target_model import HeadChoice, TargetModel, typed

ARCHITECTURES: tuple[str, ...] = ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM")

_ARCHITECTURE = "qwen4exp"
_TABLE = "per_layer_token_embd.weight"
_INDEXED = "indexed_attention"  # transformers' name of full attention with an indexer
# Of the hash of n-grams, by the keys under which llama.cpp reads them.
_CONSTANTS = {
    "ple.layer_multipliers": "ple_embedding.layer_multipliers",
    "ple.head_offsets": "ple_embedding.ngram_heads_offsets",
    "ple.head_vocab_sizes": "ple_embedding.ngram_heads_vocab_sizes",
}
_MOST_ROWS = (1 << 31) - 1  # of the table: llama.cpp's row numbers


@dataclass(frozen=True)
class _Sizes:
    """streams, rank: of the hyper-connections. The others are those of the indexer."""

    streams: int
    rank: int
    index_heads: int
    index_dim: int
    index_budget: int
    ratio: int


@dataclass(frozen=True)
class _Ngrams:
    """The n-gram embeddings. layer: the only one that has them. width: of one head's embedding."""

    layer: int
    size: int
    heads_per_size: int
    kernel: int
    parts: int
    width: int

    @property
    def heads(self) -> int:
        """Heads of all sizes of n-grams, from pairs on."""
        return (self.size - 1) * self.heads_per_size


def target_model(checkpoint: Checkpoint, head: HeadChoice) -> TargetModel:
    """Name and shape of every target; CheckpointError if the checkpoint does not fit.

    The hash constants of the n-gram embeddings are read from the checkpoint.
    """
    config = checkpoint.reader
    _check(config)
    dims = qwen.read_dims(config, checkpoint.mtp_layers(), moe=True)
    sizes = _read_sizes(config)
    ngrams = None if head in (HeadChoice.ALONE, HeadChoice.BLOCK) else _read_ngrams(config, dims)
    constants: dict[str, tuple[int, ...]] = {}

    def more(sources: SourceTensors, source: str, target: str) -> Iterator[Target]:
        if sources.has(f"{source}self_attn.indexer.index_qk_proj.weight"):
            yield from _indexer(sources, dims, sizes, source, target)
        if ngrams is not None and source == f"model.layers.{ngrams.layer}.":
            constants.update(_read_constants(sources, ngrams, f"{source}ple."))
            yield from _embeddings(sources, dims, sizes, ngrams, (source, target))
            yield _table(sources, ngrams, constants, f"{source}ple.ple_embedding.", config)

    with_head = bool(dims.n_mtp) and head is not HeadChoice.NONE
    model = QwenModel(
        *(config, dims, _ARCHITECTURE, LINEAR_ATTENTION, mrope_sections(config)),
        norms=(*_connection(sizes, "attn", "attn"), *_connection(sizes, "mlp", "ffn")),
        full_attention=(*qwen.FULL_ATTENTION, *_index_norms(sizes)),
        last=_mixer(sizes, "model.hyper_connection_mixer.", "output_hc_"),
        last_in_head=False,
        mtp=_mtp(sizes),
        joined=(("fc_embedding.weight", "fc_hidden.weight"), "nextn.eh_proj.weight"),
        more=more,
        constants=tuple(_CONSTANTS.values()),
        keys=_keys(dims, sizes, with_head),
    )
    made = qwen.target_model(checkpoint, head, model)
    if ngrams is not None:
        made.hparams.update(_ngram_keys(config, dims, ngrams, constants))
    return made


def _check(c: ConfigReader) -> None:
    """CheckpointError for what llama.cpp computes otherwise; names the layers as it does."""
    if c.config.get("norm_topk_prob", True) is not True:
        found = c.config["norm_topk_prob"]
        raise c.fault("norm_topk_prob", "true, as llama.cpp normalizes the experts' weights", found)
    if (gate := c.config.get("output_gate_type", "sigmoid")) != "sigmoid":
        raise c.fault("output_gate_type", "sigmoid, as in llama.cpp", gate)
    if (found := c.size("indexer_kv_heads", 1)) != 1:
        raise c.fault("indexer_kv_heads", "1, as in llama.cpp", found)
    kinds = c.config.get("layer_types")
    if isinstance(kinds, list):
        c.config["layer_types"] = ["full_attention" if k == _INDEXED else k for k in kinds]


def _read_sizes(c: ConfigReader) -> _Sizes:
    sizes = _Sizes(
        streams=c.size("hc_count", 4, least=2),
        rank=c.size("hc_lowrank", 320),
        index_heads=c.size("indexer_n_heads"),
        index_dim=c.size("indexer_head_dim"),
        index_budget=c.size("indexer_budget"),
        ratio=c.size("indexer_compress_ratio", least=2),
    )
    if sizes.index_budget % sizes.ratio:
        expected = f"a multiple of indexer_compress_ratio ({sizes.ratio})"
        raise c.fault("indexer_budget", expected, sizes.index_budget)
    return sizes


def _read_ngrams(c: ConfigReader, d: Dims) -> _Ngrams | None:
    layers = c.config.get("ple_layer_ids", [])
    if layers == []:
        return None
    whole = isinstance(layers, list) and all(map(is_whole, layers))
    if not whole or len(layers) != 1 or not 1 <= layers[0] <= d.layers:
        expected = f"a list of one layer from 1 to {d.layers}, which llama.cpp supports"
        raise c.fault("ple_layer_ids", expected, layers)
    if not d.recurrent[layers[0] - 1]:
        raise c.fault("ple_layer_ids", "a layer with linear attention", layers[0])
    size, heads = c.size("ngram_size", 3, least=2), c.size("heads_per_ngram", 8)
    width = c.size("ple_embed_dim", d.hidden)
    if width % ((size - 1) * heads):
        raise c.fault("ple_embed_dim", f"a multiple of {(size - 1) * heads} n-gram heads", width)
    return _Ngrams(
        layer=layers[0] - 1,
        size=size,
        heads_per_size=heads,
        kernel=c.size("ple_conv_kernel_size", 4),
        parts=c.size("split_ngram_parts", 512),
        width=width // ((size - 1) * heads),
    )


def _mixer(s: _Sizes, source: str, target: str) -> tuple[Entry, ...]:
    """What reads the streams: a norm and a gate of low rank."""
    return (
        norm(f"{source}hc_norm.weight", f"{target}norm.weight", lambda d: (s.streams * d.hidden,)),
        Entry(
            f"{source}input_mix_weight_down.weight",
            f"{target}down.weight",
            lambda d: (s.rank, s.streams * d.hidden),
        ),
        Entry(
            f"{source}input_mix_weight_up.weight",
            f"{target}up.weight",
            lambda d: (s.streams * d.hidden, s.rank),
        ),
    )


def _connection(s: _Sizes, half: str, name: str) -> tuple[Entry, ...]:
    """The hyper-connection of one half of a block: a mixer, and what adds to the streams."""
    return (
        *_mixer(s, f"{half}_hyper_connection.", f"hc_{name}_"),
        Entry(
            f"{half}_hyper_connection.block_inject_weight.weight",
            f"hc_{name}_inject.weight",
            lambda d: (s.streams, s.streams * d.hidden),
        ),
    )


def _index_norms(s: _Sizes) -> tuple[Entry, ...]:
    return tuple(
        norm(
            f"self_attn.indexer.{part}_layernorm.weight",
            f"indexer.{part}_norm.weight",
            lambda _: (s.index_dim,),
        )
        for part in ("q", "k")
    )


def _mtp(s: _Sizes) -> tuple[Entry, ...]:
    return (
        norm("pre_fc_norm_embedding.weight", "nextn.enorm.weight", lambda d: (d.hidden,)),
        norm("pre_fc_norm_hidden.weight", "nextn.hnorm.weight", lambda d: (s.streams * d.hidden,)),
        *_mixer(s, "hyper_connection_mixer.", "nextn.hc_head_"),
    )


def _indexer(
    sources: SourceTensors, d: Dims, s: _Sizes, source: str, target: str
) -> Iterator[Target]:
    """Queries and keys of the indexer, which are one matrix in the checkpoint."""
    queries, rows = s.index_heads * s.index_dim, (s.index_heads + 1) * s.index_dim
    name = sources.use(f"{source}self_attn.indexer.index_qk_proj.weight", (rows, d.hidden))
    for part, order in (("q", np.arange(queries)), ("k", np.arange(queries, rows))):
        recipe = Recipe((name,), row_order=order)
        yield Target(f"{target}indexer.{part}_proj.weight", (d.hidden, len(order)), recipe)


def _embeddings(
    sources: SourceTensors, d: Dims, s: _Sizes, n: _Ngrams, prefixes: tuple[str, str]
) -> Iterator[Target]:
    """The tensors of the n-gram embeddings but for their table."""
    wide, width = s.streams * d.hidden, n.heads * n.width
    entries = (
        Entry("key_proj.weight", "key.weight", lambda _: (wide, width)),
        Entry("value_proj.weight", "value.weight", lambda _: (d.hidden, width)),
        Entry("conv1d.weight", "conv1d.weight", lambda _: (wide, 1, n.kernel)),
        *(
            norm(f"norm_{part}.weight", f"norm_{part}.weight", lambda _: (wide,))
            for part in ("key", "query", "conv")
        ),
    )
    source, target = prefixes
    for entry in entries:
        yield qwen.take(sources, d, f"{source}ple.", f"{target}ple_", entry)


def _read_constants(sources: SourceTensors, n: _Ngrams, source: str) -> dict[str, tuple[int, ...]]:
    counts = (n.size, n.heads, n.heads)
    return {
        key: sources.integers(source + name, count)
        for (key, name), count in zip(_CONSTANTS.items(), counts, strict=True)
    }


def _table(
    sources: SourceTensors,
    n: _Ngrams,
    constants: dict[str, tuple[int, ...]],
    source: str,
    config: ConfigReader,
) -> Target:
    """The table of all n-gram embeddings, which the checkpoint has in parts."""
    names = [f"{source}ngram_embedding.shard_{i}.weight" for i in range(n.parts)]
    heights = [sources.rows(name, n.width) for name in names]
    ends = zip(constants["ple.head_offsets"], constants["ple.head_vocab_sizes"], strict=True)
    needed = max(first + count for first, count in ends)
    if not needed <= sum(heights) <= _MOST_ROWS:
        raise config.fault(
            "split_ngram_parts", f"parts of {needed} to {_MOST_ROWS} rows in all", sum(heights)
        )
    parts = tuple(
        sources.use(name, (height, n.width)) for name, height in zip(names, heights, strict=True)
    )
    return Target(_TABLE, (n.width, sum(heights)), Recipe(parts))


def _keys(d: Dims, s: _Sizes, with_head: bool) -> dict[str, object]:
    ratios = (*(0 if recurrent else s.ratio for recurrent in d.recurrent), *[s.ratio] * with_head)
    return {
        "hyper_connection.count": s.streams,
        "hyper_connection.low_rank": s.rank,
        "attention.indexer.head_count": s.index_heads,
        "attention.indexer.key_length": s.index_dim,
        "attention.indexer.top_k": s.index_budget,
        "attention.compress_ratios": ratios,
    }


def _ngram_keys(
    c: ConfigReader, d: Dims, n: _Ngrams, constants: dict[str, tuple[int, ...]]
) -> dict[str, Value]:
    ends = c.config.get("eos_token_id")
    last = ends[-1] if isinstance(ends, list) and ends else ends
    if not is_whole(last) or not 0 <= last < d.vocab:
        raise c.fault("eos_token_id", "a token, at which the n-grams begin anew", ends)
    pictures = c.size("image_token_id", least=0) if "image_token_id" in c.config else None
    keys = {
        "ple.layers": (n.layer,),
        "ple.ngram_size": n.size,
        "ple.heads_per_ngram": n.heads_per_size,
        "ple.conv_kernel": n.kernel,
        "ple.eos_token_id": last,
        "embedding_length_per_layer_input": n.width,
        "ple.image_token_id": pictures,
        **{key: Value(ValueType.U64, values) for key, values in constants.items()},
    }
    return typed(_ARCHITECTURE, keys)
