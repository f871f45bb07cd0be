"""The MTP block in PyTorch, as the draft graph (native/src/head/draft_graph.cpp) computes it.

Shapes: B sequences of T rows, width C, H heads of dimension D in G KV groups. Row i of the first
step pairs the trunk's hidden state at position i with the embedding of the token at position i + 1,
whose position it has. Its output predicts the token at position i + 2. In step s (from 0) the
hidden state is the block's own output of the step before, and everything else moves on by s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from mtp_gguf.gguf_tools.heads.fastmtp import SHORT_HEAD_SUFFIX, DraftLayout
from mtp_gguf.gguf_tools.heads.head import OUTPUT_NORM_TENSOR, block_of
from mtp_gguf.gguf_tools.heads.nextn import BLOCKS
from mtp_gguf.gguf_tools.model import Model
from mtp_gguf.quantize import ggml

from .config import FORMS, BlockConfig, Rope

Weights = dict[str, NDArray[np.float32]]
Cache = list[tuple[Tensor, Tensor]]  # of each step: keys and values [B, T, KV heads, D]

# Clamping the sum of the experts' shares avoids a division by zero, as in the draft graph.
_SMALLEST_SHARE = 6.103515625e-5
_INITIAL_STD = 0.02
_HEAD_NORM = "nextn.shared_head_norm.weight"
TABLE_SUFFIXES = ("nextn.embed_tokens.weight", SHORT_HEAD_SUFFIX)
_ROUTER, _CHOICE_BIAS = "ffn_gate_inp.weight", "exp_probs_b.bias"
_HEAD_GATE = "attn_gate.weight"
_LEAST_LIMIT = 1e-6  # of activations: llama.cpp's build_ffn takes less for none


class MtpBlock(nn.Module):
    """The block's weights, by their suffix in the GGUF, and its unrolled steps.

    weights: F32 arrays, matrices as [out, in]. rank: 0 trains every weight; above 0 trains only a
    product of two matrices of this rank, which is added to each matrix (LoRA), and the norms.
    divisors: of the frequencies of the rotation, [pairs].
    """

    def __init__(
        self,
        config: BlockConfig,
        weights: Mapping[str, NDArray[np.float32]],
        rank: int = 0,
        divisors: NDArray[np.float32] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.suffixes = tuple(weights)
        generator = torch.Generator().manual_seed(0)
        for suffix, array in weights.items():
            tensor = torch.from_numpy(np.ascontiguousarray(array, np.float32).copy())
            key = _key(suffix)
            # No gradient reaches the bias that chooses experts, nor the router of a single one.
            if suffix == _CHOICE_BIAS or (suffix == _ROUTER and config.experts == 1):
                self.register_buffer(key, tensor)
                continue
            if rank == 0 or array.ndim == 1:
                self.register_parameter(key, nn.Parameter(tensor))
                continue
            self.register_buffer(key, tensor)
            if array.ndim == 2:
                down = torch.randn(rank, array.shape[1], generator=generator)
                self.register_parameter(f"{key}_down", nn.Parameter(down / math.sqrt(rank)))
                self.register_parameter(f"{key}_up", nn.Parameter(torch.zeros(len(array), rank)))
        frequencies, magnitude = rope_frequencies(config.rope)
        if divisors is not None:
            frequencies = frequencies / divisors
        self.frequencies = torch.from_numpy(frequencies)
        self.magnitude = magnitude

    def weight(self, suffix: str) -> Tensor:
        """The current value of a weight."""
        key = _key(suffix)
        held: Tensor = getattr(self, key)
        if hasattr(self, f"{key}_up"):
            low: Tensor = getattr(self, f"{key}_up") @ getattr(self, f"{key}_down")
            return held + low
        return held

    def current(self) -> dict[str, Tensor]:
        """The current value of every weight, by suffix."""
        return {suffix: self.weight(suffix) for suffix in self.suffixes}

    @torch.no_grad()
    def weights(self) -> Weights:
        """The current values of all weights, by suffix."""
        return {s: w.detach().float().cpu().numpy() for s, w in self.current().items()}

    def steps(
        self,
        hidden: Tensor,
        embeddings: Sequence[Tensor],
        count: int,
        *,
        first: int = 0,
        every: int = 1,
    ) -> Iterator[Tensor]:
        """Yield the post-norm states of `count` unrolled steps.

        hidden, embeddings[0]: [B, T, C], of the trunk's state and of the token at each position. A
        step has the rows of `rows_of`; row i of step s predicts the token at position i + 2 + s.
        """
        use = self.current()
        cache: Cache = []
        state, length = hidden, hidden.shape[1]
        for step in range(min(count, length - 1)):
            rows = rows_of(step, length, first, every)
            if step == 1:
                state = state[:, first::every]
            fed = embeddings[0][:, step + 1 :][:, rows]
            places = torch.arange(length)[rows]
            x = self.project(use, state[:, : len(places)], fed)
            _, state = self.finish(use, x, step, places, cache)
            yield state

    def project(self, use: Mapping[str, Tensor], hidden: Tensor, embedding: Tensor) -> Tensor:
        """What the block takes, from hidden states and embeddings of the same rows."""
        both = torch.cat(
            (
                self._norm(embedding, use["nextn.enorm.weight"]),
                self._norm(hidden, use["nextn.hnorm.weight"]),
            ),
            dim=-1,
        )
        return functional.linear(both, use["nextn.eh_proj.weight"])

    def finish(
        self, use: Mapping[str, Tensor], x: Tensor, step: int, places: Tensor, cache: Cache
    ) -> tuple[Tensor, Tensor]:
        """The rest of the block: its state before and after the last norm. See `write`."""
        normed = self._norm(x, use["attn_norm.weight"])
        self._write(use, normed, step, places, cache)
        x = x + self._attention(use, normed, step, places, cache)
        normed = self._norm(x, use[self.config.form.ffn_norm])
        if self.config.experts:
            x = x + self._mixture(use, normed)
        else:
            names = [f"ffn_{name}.weight" for name in ("gate", "up", "down")]
            x = x + _feed_forward(normed, *(use[n] for n in names), limit=self.config.ffn_limit)
        return x, self._norm(x, use[_HEAD_NORM])

    def write(
        self, use: Mapping[str, Tensor], x: Tensor, step: int, places: Tensor, cache: Cache
    ) -> None:
        """Add the keys and values of rows that only later ones attend to.

        step: of how many later drafts than the first. places: [T], which row of the first one each
        of these rows goes on from.
        """
        self._write(use, self._norm(x, use["attn_norm.weight"]), step, places, cache)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.eps) * weight

    def _heads(
        self, use: Mapping[str, Tensor], x: Tensor, name: str, count: int
    ) -> tuple[Tensor, Tensor]:
        """Products of rows with a matrix for each head, [B, T, heads, D], and their gates."""
        out = functional.linear(x, use[f"{name}.weight"], use.get(f"{name}.bias"))
        out = out.view(*x.shape[:2], count, -1, self.config.head_dim)
        first = out[..., 0, :]
        if f"{name}_norm.weight" in use:
            first = self._norm(first, use[f"{name}_norm.weight"])
        return first, out[..., -1, :]

    def _write(
        self, use: Mapping[str, Tensor], normed: Tensor, step: int, places: Tensor, cache: Cache
    ) -> None:
        k, _ = self._heads(use, normed, "attn_k", self.config.kv_heads)
        v, _ = self._heads(use, normed, "attn_v", self.config.kv_heads)
        cache.append((self._rotate(k, step, places).to(v.dtype), v))

    def _attention(
        self, use: Mapping[str, Tensor], x: Tensor, step: int, places: Tensor, cache: Cache
    ) -> Tensor:
        """Attend to what the cache of a draft holds.

        Those are the rows of step 0 up to the row itself, and the same row of each later step.
        places: [T], which row of step 0 each of these rows goes on from.
        """
        c = self.config
        batch, rows, _ = x.shape
        groups = c.heads // c.kv_heads
        q, gate = self._heads(use, x, "attn_q", c.heads)
        q = self._rotate(q, step, places).to(cache[0][1].dtype)
        q = q.view(batch, rows, c.kv_heads, groups, c.head_dim) / math.sqrt(c.head_dim)
        n_keys = int(places[-1]) + 1
        first_k, first_v = (held[:, :n_keys] for held in cache[0])
        scores = torch.einsum("brghd,bkgd->bghrk", q, first_k).float()
        away = places[:, None] - torch.arange(n_keys)
        hidden = away < 0
        if c.window:
            hidden |= away + step >= c.window
        scores = scores.masked_fill(hidden.to(x.device), -torch.inf)
        seen = cache[max(1, step - c.window + 1) if c.window else 1 :]
        own = [
            (q * key[:, :rows, :, None]).float().sum(-1).permute(0, 2, 3, 1)[..., None]
            for key, _ in seen
        ]  # [B, G, H / G, T, 1] each
        shares = torch.cat((scores, *own), dim=-1).softmax(-1).to(first_v.dtype)
        out = torch.einsum("bghrk,bkgd->brghd", shares[..., :n_keys], first_v)
        for i, (_, value) in enumerate(seen):
            share = shares[..., n_keys + i].permute(0, 3, 1, 2)[..., None]
            out = out + share * value[:, :rows, :, None]
        out = out.reshape(batch, rows, c.heads, c.head_dim)
        if c.form.gated:
            out = out * torch.sigmoid(gate)
        if _HEAD_GATE in use:
            out = out * torch.sigmoid(functional.linear(x, use[_HEAD_GATE]))[..., None]
        return functional.linear(out.flatten(2), use["attn_output.weight"])

    def _rotate(self, x: Tensor, step: int, places: Tensor) -> Tensor:
        """Rotate the first dimensions of each head [B, T, heads, D] by its row's position."""
        angles = ((places + step + 1)[:, None] * self.frequencies).to(x.device)
        half = angles.shape[-1]
        cos = (angles.cos() * self.magnitude)[:, None]
        sin = (angles.sin() * self.magnitude)[:, None]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    def _mixture(self, use: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The selected experts, by their shares, and the shared expert."""
        c, shape = self.config, x.shape
        rows = x.reshape(-1, c.width)
        with torch.autocast(rows.device.type, enabled=False):  # the graph's router is F32
            router = functional.linear(rows, use[_ROUTER])
        if c.form.sigmoid:
            router = router.sigmoid()
            ranked = router + use[_CHOICE_BIAS] if _CHOICE_BIAS in use else router
            chosen = ranked.topk(c.experts_used, dim=-1).indices
            shares = router.gather(-1, chosen)
        else:
            shares, chosen = router.softmax(-1).topk(c.experts_used, dim=-1)
        if c.normed_shares:
            shares = shares / shares.sum(-1, keepdim=True).clamp_min(_SMALLEST_SHARE)
        shares = shares * c.expert_scale
        out = torch.zeros_like(rows)
        names = [f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")]
        for expert in torch.unique(chosen).tolist():
            at, slot = (chosen == expert).nonzero(as_tuple=True)
            own = (use[name][expert] for name in names)
            part = _feed_forward(rows[at], *own, limit=c.expert_limit)
            out = out.index_add(0, at, part.float() * shares[at, slot, None])
        if "ffn_up_shexp.weight" in use:
            names = [f"ffn_{name}_shexp.weight" for name in ("gate", "up", "down")]
            shared = _feed_forward(rows, *(use[name] for name in names), limit=c.ffn_limit)
            if "ffn_gate_inp_shexp.weight" in use:
                gate = functional.linear(rows, use["ffn_gate_inp_shexp.weight"].view(1, -1))
                shared = shared * torch.sigmoid(gate)
            out = out + shared
        return out.view(shape)


def rows_of(step: int, length: int, first: int, every: int) -> slice:
    """The rows of a step over `length` positions: all in step 0, every so many in later ones."""
    return slice(first, length - 1 - step, every) if step else slice(0, length - 1)


def _key(suffix: str) -> str:
    return suffix.removesuffix(".weight").replace(".", "_")


def _with_experts(suffix: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
    """The array with a dimension for experts, which a GGUF may lack if there is one."""
    dimensions = 3 if "_exps." in suffix else 2 if suffix == _ROUTER else array.ndim
    return array if array.ndim >= dimensions else array[None]


def _feed_forward(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, limit: float = 0.0
) -> Tensor:
    """SwiGLU. limit: of its activations; 0 for none."""
    left, right = functional.silu(functional.linear(x, gate)), functional.linear(x, up)
    if limit > _LEAST_LIMIT:
        left, right = left.clamp(max=limit), right.clamp(-limit, limit)
    return functional.linear(left * right, down)


def rope_frequencies(rope: Rope) -> tuple[NDArray[np.float32], float]:
    """The angle of each pair per position, and the factor of rotated values, as ggml's rope."""
    pairs = np.arange(rope.count // 2)
    plain = rope.base ** (-2.0 * pairs / rope.count)
    frequencies = plain * rope.scale
    if rope.yarn:
        low, high = (
            rope.count
            * math.log(rope.trained_context / (beta * 2 * math.pi))
            / (2 * math.log(rope.base))
            for beta in (rope.beta_fast, rope.beta_slow)
        )
        low, high = max(0, math.floor(low)), min(rope.count - 1, math.ceil(high))
        ramp = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
        frequencies = frequencies * (1 - ramp) + plain * ramp
    if rope.sections is not None:
        sector = pairs % sum(rope.sections)
        rotates = np.zeros(len(pairs), bool)
        for section, size in enumerate(rope.sections[:3]):
            rotates |= (sector % 3 == section) & (sector < 3 * size)
        frequencies = frequencies * rotates
    magnitude = rope.magnitude * (1 + 0.1 * math.log(1 / rope.scale) if rope.yarn else 1)
    return frequencies.astype(np.float32), magnitude


# ----------------------------------------------------------------------------- weights


def read_weights(model: Model) -> Weights:
    """The weights of a model's head by suffix, dequantized; fused tensors are split.

    Those of a chain's blocks have the block's number and a dot before the suffix. The head's own
    embeddings and outputs are left out (`own_tables`). RequestError if it is incomplete, or has
    more blocks than llama.cpp drafts with.
    """
    model.head.check_complete()
    model.head.check_layers()
    out: Weights = {}
    for name, suffix in model.head.suffixes.items():
        if suffix in TABLE_SUFFIXES:
            continue
        prefix = _prefix(model, name)
        array = read_tensor(model, name)
        if parts := model.head.fused_parts(name):
            ends = np.cumsum(list(parts.values()))[:-1]
            for part, rows in zip(parts, np.split(array, ends, axis=-2), strict=True):
                out[prefix + part.split(".", 2)[2]] = np.ascontiguousarray(rows)
        else:
            out[prefix + suffix] = _with_experts(suffix, array)
    for prefix in {_prefix(model, name) for name in model.head.suffixes}:
        if prefix + _HEAD_NORM not in out:
            out[prefix + _HEAD_NORM] = read_tensor(model, OUTPUT_NORM_TENSOR)
    return out


def _prefix(model: Model, name: str) -> str:
    """What the key of a tensor's weights has before its suffix: a chain's, the block's number."""
    block = block_of(name)
    if block is None or not FORMS[model.head.architecture].chained:
        return ""
    return f"{block - model.head.trunk_layers}."


def own_tables(model: Model) -> dict[str, str]:
    """Embeddings and outputs that blocks of the head have of their own, by name: the suffix.

    They are not trained. A short output in the layout `table` is none: it is rows of the trunk's.
    """
    draft = model.head.draft
    short = draft is not None and draft.layout is DraftLayout.TABLE
    suffixes = TABLE_SUFFIXES[:1] if short else TABLE_SUFFIXES
    return {name: suffix for name, suffix in model.head.suffixes.items() if suffix in suffixes}


def read_tensor(model: Model, name: str) -> NDArray[np.float32]:
    """A whole tensor, dequantized, in NumPy's order of dimensions."""
    tensor = model.tensors[name]
    flat = ggml.dequantize(tensor.type, bytes(model.read(name)))
    return flat.reshape(tensor.shape[::-1])


def read_rows(model: Model, name: str, rows: NDArray[Any]) -> NDArray[np.float32]:
    """The given rows of a matrix, dequantized, [len(rows), row length]."""
    tensor = model.tensors[name]
    size = tensor.type.row_bytes(tensor.shape[0])
    out = np.empty((len(rows), tensor.shape[0]), np.float32)
    for at, row in enumerate(rows.tolist()):
        out[at] = ggml.dequantize(tensor.type, bytes(model.read(name, row * size, size)))
    return out


def fresh_weights(model: Model, seed: int) -> Weights:
    """Weights to start from where there is no head: small random matrices, and norms of one.

    The head's final norm is the trunk's, whose output matrix it feeds. Starting from the trunk's
    last attention layer instead was no better: its inputs are others.
    """
    random = np.random.default_rng(seed)
    out: Weights = {}
    architecture, experts = model.head.architecture, model.head.parameter("expert_count")
    for suffix in (*BLOCKS[architecture].required, *FORMS[architecture].optional):
        shape = model.head.shapes[suffix][::-1]
        if suffix.endswith("norm.weight"):
            array = np.ones(shape, np.float32)
        elif suffix == _CHOICE_BIAS or (suffix == _ROUTER and experts == 1):
            array = np.zeros(shape, np.float32)
        else:
            array = (random.standard_normal(shape) * _INITIAL_STD).astype(np.float32)
        out[suffix] = _with_experts(suffix, array)
    return out | {_HEAD_NORM: read_tensor(model, OUTPUT_NORM_TENSOR)}
