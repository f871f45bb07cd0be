"""Write a synthetic model with a fixed acceptance rate, like a dial that can be set.

    python benchmarks/dial_model.py --shape 0.8b --hit 0.8 FOLDER
    python benchmarks/dial_model.py --architecture glm4moe --hit 0.8 FOLDER

The trunk repeats one fixed cycle of tokens, whatever came before; the head predicts it except
after the tokens that carry a flag. Each token costs as much as with a real model of the shape, the
text is known, and the acceptance rate is exact. Only the weights achieve this:

- embeddings are random and therefore nearly orthogonal (those of the published shapes are shifted
  parts of one stream of random values); dimension 0 is reserved for the flag;
- the row of `lm_head` for next(t) is the embedding of t without its flag;
- the layers add very little, so that the last hidden state is the normed embedding of the token;
- `mtp.fc` is [identity | 0], and turns the flag into the embedding of another token, four times as
  strong as the right one.

The checkpoint has the tokenizer of the tests (922 tokens), padded to the vocabulary's size: compare
token ids, not text.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.format import ArrayRef, Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import OutputSpec, TensorCopy, write
from mtp_gguf.gguf_tools.heads.nextn import ARCHITECTURES
from mtp_gguf.gguf_tools.model import open_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import checkpoints
from support.checkpoints import SPECS, Spec
from support.upstream import nextn_models

SEED = 20
FLAG = 4.0  # value of the flag, in standard deviations of an embedding's other values
LAYER_SCALE = 1e-3
BLOCK = 200  # tokens
# Tensors of a GGUF whose products are added to the residual stream.
_INTO_RESIDUAL = re.compile(r"\.(attn_output(_b)?|ssm_out|ffn_(latent_up|down(_exps|_shexp)?))\.")

# Acceptance rate: the share of the cycle's tokens after which the head is right. With two rates,
# blocks of BLOCK tokens alternate between them, beginning with the first.
Hit = float | tuple[float, float]

_REAL: dict[str, Any] = {
    "head_dim": 256,
    "k_heads": 16,
    "linear_dim": 128,
    "vocab_size": 248_320,
    "kv_heads": 2,
    "dtype": "BF16",
    "repeated": True,
}
# Published shapes, except that no embeddings are tied (those of 0.8B and 2B are).
SHAPES: dict[str, Spec] = {
    "tiny": replace(SPECS["dense-tied"], name="tiny", tied=False, nested=False, model_card=False),
    # Its drafts cost little beside its trunk, as those of real models do.
    "tiny-24": replace(SPECS["dense-tied"], name="tiny-24", tied=False, layers=24),
    "tiny-3v": replace(SPECS["dense-3v"], name="tiny-3v", tied=False),
    "tiny-moe": replace(SPECS["moe-fused"], name="tiny-moe"),
    "tiny-next": replace(SPECS["next-unfused"], name="tiny-next"),
    "0.8b": Spec("0.8b", hidden=1024, intermediate=3584, layers=24, heads=8, v_heads=16, **_REAL),
    "2b": Spec("2b", hidden=2048, intermediate=6144, layers=24, heads=8, v_heads=16, **_REAL),
    "4b": Spec(
        "4b",
        hidden=2560,
        intermediate=9216,
        layers=32,
        heads=16,
        v_heads=32,
        **{**_REAL, "kv_heads": 4},
    ),
    "9b": Spec(
        "9b",
        hidden=4096,
        intermediate=12288,
        layers=32,
        heads=16,
        v_heads=32,
        **{**_REAL, "kv_heads": 4},
    ),
    "27b": Spec(
        "27b",
        hidden=5120,
        intermediate=17408,
        layers=64,
        heads=24,
        v_heads=48,
        **{**_REAL, "kv_heads": 4},
    ),
    # A tenth of 35B-A3B: 4 of its 40 layers, and a tenth of the vocabulary.
    "35b-a3b": Spec(
        "35b-a3b",
        hidden=2048,
        intermediate=512,
        layers=4,
        heads=16,
        v_heads=32,
        experts=256,
        experts_per_token=8,
        **{**_REAL, "vocab_size": 24_832},
    ),
    # Likewise of Qwen3-Next 80B-A3B, which has 48 layers.
    "80b-a3b": Spec(
        "80b-a3b",
        family="qwen3_next",
        hidden=2048,
        intermediate=512,
        layers=4,
        heads=16,
        v_heads=32,
        experts=512,
        experts_per_token=10,
        **{**_REAL, "vocab_size": 15_194},
    ),
}


def cycle_of(spec: Spec) -> NDArray[np.int64]:
    """Return the cycle that the trunk repeats; even small draft vocabularies have its tokens.

    So have those that are made at load, although much of them follows the text.
    """
    usable = min(spec.vocab_size, 18_000) * 3 // 4
    return np.random.default_rng(SEED).permutation(usable)


def missed_tokens(spec: Spec, hit: Hit) -> NDArray[np.bool_]:
    """Mark the tokens after which the head is wrong."""
    cycle = cycle_of(spec)
    missed = np.zeros(spec.vocab_size, bool)
    rng = np.random.default_rng(SEED + 1)
    of_first = np.arange(len(cycle)) // BLOCK % 2 == 0
    parts = [(cycle, hit)]
    if isinstance(hit, tuple):
        parts = [(cycle[of_first], hit[0]), (cycle[~of_first], hit[1])]
    for tokens, share in parts:
        missed[rng.choice(tokens, round(len(tokens) * (1 - share)), replace=False)] = True
    return missed


def _tables(spec: Spec, hit: Hit, gain: float) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the embeddings, the output matrix and the projection of the head."""
    rng = np.random.default_rng(SEED + 2)
    width = spec.hidden
    if spec.repeated:
        stream = rng.standard_normal(checkpoints.STREAM, np.float32).astype(ml_dtypes.bfloat16)
        embedding = np.resize(stream, (spec.vocab_size, width))
    else:
        embedding = rng.standard_normal((spec.vocab_size, width), np.float32)
    embedding[:, 0] = np.where(missed_tokens(spec, hit), FLAG, 0)
    cycle = cycle_of(spec)
    # As bytes, because NumPy would write zeros of another type.
    head = np.zeros(embedding.nbytes, np.uint8).view(embedding.dtype).reshape(embedding.shape)
    head[np.roll(cycle, -1)] = embedding[cycle] * (gain / np.sqrt(width))
    head[:, 0] = 0
    projection = np.concatenate([np.eye(width), np.zeros((width, width))], axis=1)
    projection[1:, 0] = embedding[cycle[0], 1:]
    return embedding, head, projection


def _tensors(spec: Spec, hit: Hit, layer_scale: float, gain: float) -> dict[str, NDArray[Any]]:
    embedding, head, projection = _tables(spec, hit, gain)
    out: dict[str, NDArray[Any]] = {}
    # The two tables were computed above; drawing random ones would take most of the memory.
    for name, drawn in checkpoints.weights(replace(spec, vocab_size=1)):
        array = drawn
        if name == "model.embed_tokens.weight":
            array = embedding
        elif name == "lm_head.weight":
            array = head
        elif name == "mtp.fc.weight":
            array = projection
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            array = array * np.float32(layer_scale)
        elif name.endswith("norm.weight") or ".pre_fc_norm" in name:
            # Norms are stored minus one, except the gated norm of linear attention.
            array = np.full_like(array, 1.0 if ".linear_attn.norm" in name else 0.0)
        kept = name.endswith(("A_log", "linear_attn.norm.weight"))
        out[name] = array.astype(np.float32 if kept else ml_dtypes.bfloat16, copy=False)
    return out


def write_dial_model(
    folder: Path, shape: str | Spec, hit: Hit, layer_scale: float = LAYER_SCALE, gain: float = 1.0
) -> Path:
    """Write the checkpoint into a new folder.

    hit: see Hit. layer_scale: factor on what the layers add. With 0.03 the text is still the cycle,
    but the logits of the other tokens depend on all previous tokens. gain: factor on all logits.
    With 0.15 the cycle is likely but not certain, for tests of sampling.
    """
    spec = SHAPES[shape] if isinstance(shape, str) else shape
    if spec.experts:
        spec = replace(spec, fused_experts=False, fused_mtp_experts=False)
    stored = _tensors(spec, hit, layer_scale, gain)
    original = checkpoints.stored_tensors
    try:  # everything but the weights is as in the tests' checkpoints
        checkpoints.stored_tensors = lambda _: iter(stored.items())
        return checkpoints.write_checkpoint(folder, spec)
    finally:
        checkpoints.stored_tensors = original


def write_dial_gguf(
    folder: Path,
    architecture: str,
    hit: Hit,
    layer_scale: float = LAYER_SCALE,
    gain: float = 1.0,
    size: nextn_models.Size = nextn_models.SMALLEST,
) -> Path:
    """Write the GGUF of an architecture that llama.cpp drafts with, of a small shape, in F32.

    The other arguments are those of `write_dial_model`.
    """
    path = nextn_models.write_models(folder, [architecture], size)[architecture]
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(path, "r+").tensors}
    vocabulary, width = tensors["token_embd.weight"].shape
    spec = Spec(architecture, vocab_size=vocabulary, hidden=width)
    embedding, head, projection = _tables(spec, hit, gain)
    for name, data in tensors.items():
        if name.endswith(("token_embd.weight", "embed_tokens.weight")):
            data[:] = embedding
        elif name.endswith(("output.weight", "shared_head_head.weight")) and ".attn_" not in name:
            data[:] = head
        elif name.endswith("eh_proj.weight"):
            data[:] = projection
        elif "norm" in name:
            data[:] = 0 if name.endswith("bias") else 1
        elif _INTO_RESIDUAL.search(name):
            data[:] = data * layer_scale
    return path


def stretched(source: Path, target: Path, layers: int) -> None:
    """Write a copy with the trunk's layers repeated up to `layers`, and the head after them.

    The text stays the same, since layers add very little; the time of a layer does not depend on
    its weights.
    """
    with open_model(source) as model:
        old, keys = model.head.trunk_layers, dict(model.metadata())
        keys[f"{model.architecture}.block_count"] = Value(ValueType.U32, layers + 1)
        for name, value in model.first.keys.items():
            if isinstance(value, ArrayRef) and value.count == old + 1:  # of each layer
                each = list(model.first.array(name) or ())
                repeated = (*(each[i % old] for i in range(layers)), each[old])
                keys[name] = Value(value.type, repeated)
        copies = []
        for name in model.tensors:
            part = TensorCopy.of(model, name)
            block, _, rest = name.removeprefix("blk.").partition(".")
            if not name.startswith("blk."):
                targets = [name]
            elif int(block) == old:
                targets = [f"blk.{layers}.{rest}"]
            else:
                targets = [f"blk.{i}.{rest}" for i in range(int(block), layers, old)]
            copies += [replace(part, spec=replace(part.spec, name=to)) for to in targets]
        write(target, OutputSpec(keys, tuple(copies)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="0.8b")
    parser.add_argument(
        "--architecture",
        choices=ARCHITECTURES,
        help="write a GGUF of this architecture in a small shape instead of a checkpoint",
    )
    parser.add_argument("--hit", type=float, default=0.8, help="acceptance rate [0.8]")
    arguments = parser.parse_args()
    if arguments.architecture:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        print(write_dial_gguf(arguments.folder, arguments.architecture, arguments.hit))
    else:
        write_dial_model(arguments.folder, arguments.shape, arguments.hit)


if __name__ == "__main__":
    main()
