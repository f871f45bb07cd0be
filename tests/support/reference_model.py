"""The trunk and MTP block of Qwen3.5 and Qwen3-Next in NumPy, from a checkpoint: the oracle.

It computes what the model is defined to compute, token by token where the definition says so, in
float64 unless asked otherwise, and knows nothing of GGUF: names, norms around zero and the order
of heads are those of the checkpoint. Definitions: transformers' modeling_qwen3_5.py,
modeling_qwen3_5_moe.py and modeling_qwen3_next.py; for the MTP block its MtpModel and llama.cpp's
src/models/qwen35.cpp.

Shapes: n tokens, H hidden size, V vocabulary. Matrices are [out, in], as stored.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.checkpoints import FP8_BLOCK, NUMPY_DTYPES

Array = NDArray[Any]


def read_safetensors(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield (name, array in its stored dtype) for every tensor of one file."""
    data = np.memmap(path, np.uint8, "r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + length].tobytes())
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            raw = data[8 + length + begin : 8 + length + end]
            yield name, raw.view(NUMPY_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _sigmoid(x: Array) -> Array:
    out: Array = 1 / (1 + np.exp(-x))
    return out


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _softplus(x: Array) -> Array:
    out: Array = np.logaddexp(x, x.dtype.type(0))
    return out


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    out: Array = e / e.sum(axis=-1, keepdims=True)
    return out


class ReferenceModel:
    """One checkpoint folder, all weights in memory in `dtype` (float64: 8 bytes a weight).

    Reads dense and MoE checkpoints in all layouts, FP8 included; scaled rope is not implemented.
    Raises KeyError when a tensor that the config promises is not there.
    """

    def __init__(self, folder: Path, dtype: type[np.floating[Any]] = np.float64) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        self.config: dict[str, Any] = text
        self.dtype = dtype
        self.hidden: int = text["hidden_size"]
        self.vocab_size: int = text["vocab_size"]
        self.layers: int = text["num_hidden_layers"]
        interval = text.get("full_attention_interval", 4)
        kinds = text.get("layer_types") or [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(self.layers)
        ]
        self.is_full = [kind == "full_attention" for kind in kinds]
        self.eps: float = text["rms_norm_eps"]
        self.w = self._load(folder)
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        self.embedding = self.w["model.embed_tokens.weight"]  # [V, H]
        self.head = self.embedding if tied else self.w["lm_head.weight"]  # [V, H]

    def _load(self, folder: Path) -> dict[str, Array]:
        stored: dict[str, Array] = {}
        for path in sorted(folder.glob("*.safetensors")):
            for name, array in read_safetensors(path):
                if ".visual." not in name:
                    plain = name.replace("model.language_model.", "model.")
                    stored[plain.replace("model.mtp.", "mtp.")] = array
        weights = {}
        for name, array in stored.items():
            if name.endswith("_scale_inv"):
                continue
            values = array.astype(self.dtype)
            if (scale := stored.get(name + "_scale_inv")) is not None:
                for axis in (0, 1):
                    scale = np.repeat(scale, FP8_BLOCK, axis=axis)
                rows, cols = values.shape
                values = values * scale[:rows, :cols].astype(self.dtype)
            weights[name] = values
        return weights

    # ------------------------------------------------------------------ building blocks

    def _norm(self, x: Array, weight: str, *, centred: bool = True) -> Array:
        """RMS norm over the last axis; `centred` weights are stored minus one."""
        scale = self.w[weight] + 1 if centred else self.w[weight]
        out: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * scale
        return out

    def _linear(self, x: Array, name: str) -> Array:
        out: Array = x @ self.w[f"{name}.weight"].T
        return out

    def _rope(self, x: Array, positions: Array) -> Array:
        """Rotate the first part of each head [n, heads, head_dim] by its position.

        Pairs are (i, i + half). The three sections of M-RoPE coincide for text.
        """
        rope = self.config.get("rope_parameters") or self.config
        if rope.get("rope_type", "default") != "default":
            raise NotImplementedError(f"rope_type {rope['rope_type']}")
        dim = int(x.shape[-1] * rope.get("partial_rotary_factor", 0.25))
        half = dim // 2
        angle = positions[:, None] * float(rope["rope_theta"]) ** -(np.arange(half) * 2 / dim)
        cos, sin = (f(angle).astype(self.dtype)[:, None] for f in (np.cos, np.sin))
        a, b, rest = x[..., :half], x[..., half:dim], x[..., dim:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def _attention(self, x: Array, prefix: str, positions: Array) -> Array:
        """Gated causal attention over n rows [n, H] at the given positions."""
        c, n = self.config, len(x)
        heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q, gate = np.split(self._linear(x, f"{prefix}.q_proj").reshape(n, heads, 2 * dim), 2, -1)
        k = self._linear(x, f"{prefix}.k_proj").reshape(n, kv_heads, dim)
        v = self._linear(x, f"{prefix}.v_proj").reshape(n, kv_heads, dim)
        q = self._rope(self._norm(q, f"{prefix}.q_norm.weight"), positions)
        k = self._rope(self._norm(k, f"{prefix}.k_norm.weight"), positions)
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
        out = np.einsum("hqk,khd->qhd", _softmax(scores), v) * _sigmoid(gate)
        return self._linear(out.reshape(n, heads * dim), f"{prefix}.o_proj")

    def _projections(self, x: Array, prefix: str) -> tuple[Array, Array, Array, Array]:
        """Queries, keys and values of linear attention [n, channels], z, b and a [n, V heads]."""
        if f"{prefix}.in_proj_qkv.weight" in self.w:
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            qkv, z, b, a = (self._linear(x, f"{prefix}.{name}") for name in names)
            return qkv, z, b, a
        c, n = self.config, len(x)  # Qwen3-Next, which stores a group for each key head
        groups, key = c["linear_num_key_heads"], c["linear_key_head_dim"]
        per_group = c["linear_num_value_heads"] // groups
        values = per_group * c["linear_value_head_dim"]
        grouped = self._linear(x, f"{prefix}.in_proj_qkvz").reshape(n, groups, -1)
        parts = np.split(grouped, [key, 2 * key, 2 * key + values], axis=2)
        q, k, v, z = (part.reshape(n, -1) for part in parts)
        grouped = self._linear(x, f"{prefix}.in_proj_ba").reshape(n, groups, -1)
        b, a = (part.reshape(n, -1) for part in np.split(grouped, 2, axis=2))
        return np.concatenate([q, k, v], axis=1), z, b, a

    def _linear_attention(self, x: Array, prefix: str) -> Array:
        """Gated delta rule over n rows [n, H] from an empty state."""
        c, n = self.config, len(x)
        k_heads, v_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        k_dim, v_dim = c["linear_key_head_dim"], c["linear_value_head_dim"]

        mixed, z, b, a = self._projections(x, prefix)
        kernel = self.w[f"{prefix}.conv1d.weight"][:, 0]  # [channels, taps], the last tap is now
        taps = kernel.shape[1]
        padded = np.concatenate([np.zeros((taps - 1, mixed.shape[1]), self.dtype), mixed])
        mixed = _silu(np.sum([padded[j : j + n] * kernel[:, j] for j in range(taps)], axis=0))

        key_dim = k_heads * k_dim
        q, k, v = np.split(mixed, [key_dim, 2 * key_dim], axis=1)
        q, k = (part.reshape(n, k_heads, k_dim) for part in (q, k))
        q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        q, k = (np.repeat(part, v_heads // k_heads, axis=1) for part in (q, k))
        q = q / np.sqrt(k_dim)
        v = v.reshape(n, v_heads, v_dim)

        beta = _sigmoid(b)
        rate = np.exp(self.w[f"{prefix}.A_log"])
        decay = np.exp(-rate * _softplus(a + self.w[f"{prefix}.dt_bias"]))
        state = np.zeros((v_heads, k_dim, v_dim), self.dtype)
        out = np.empty((n, v_heads, v_dim), self.dtype)
        for t in range(n):
            state = state * decay[t][:, None, None]
            missing = v[t] - np.einsum("hkv,hk->hv", state, k[t])
            state = state + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * missing)
            out[t] = np.einsum("hkv,hk->hv", state, q[t])

        out = self._norm(out, f"{prefix}.norm.weight", centred=False)
        out = out * _silu(z.reshape(n, v_heads, v_dim))
        return self._linear(out.reshape(n, v_heads * v_dim), f"{prefix}.out_proj")

    def _feed_forward(self, x: Array, prefix: str) -> Array:
        gate = _silu(self._linear(x, f"{prefix}.gate_proj"))
        return self._linear(gate * self._linear(x, f"{prefix}.up_proj"), f"{prefix}.down_proj")

    def _expert(self, x: Array, prefix: str, e: int) -> Array:
        fused = self.w.get(f"{prefix}.experts.gate_up_proj")
        if fused is None:
            return self._feed_forward(x, f"{prefix}.experts.{e}")
        gate, up = np.split(x @ fused[e].T, 2, axis=-1)
        out: Array = (_silu(gate) * up) @ self.w[f"{prefix}.experts.down_proj"][e].T
        return out

    def _mixture(self, x: Array, prefix: str) -> Array:
        """Sum the chosen experts, weighted by their renormed probabilities, and the shared one."""
        chosen = self.config["num_experts_per_tok"]
        probabilities = _softmax(self._linear(x, f"{prefix}.gate"))
        top = np.argsort(-probabilities, axis=-1, kind="stable")[:, :chosen]
        weight = np.take_along_axis(probabilities, top, axis=-1)
        weight = weight / weight.sum(axis=-1, keepdims=True)
        out = _sigmoid(self._linear(x, f"{prefix}.shared_expert_gate")) * self._feed_forward(
            x, f"{prefix}.shared_expert"
        )
        for row in range(len(x)):
            for e, share in zip(top[row], weight[row], strict=True):
                out[row] += share * self._expert(x[row], prefix, int(e))
        return out

    def _block(self, x: Array, prefix: str, full: bool, positions: Array) -> Array:
        normed = self._norm(x, f"{prefix}.input_layernorm.weight")
        if full:
            x = x + self._attention(normed, f"{prefix}.self_attn", positions)
        else:
            x = x + self._linear_attention(normed, f"{prefix}.linear_attn")
        normed = self._norm(x, f"{prefix}.post_attention_layernorm.weight")
        mlp = self._mixture if self.config.get("num_experts") else self._feed_forward
        return x + mlp(normed, f"{prefix}.mlp")

    # ----------------------------------------------------------------------------- API

    def trunk(self, tokens: Sequence[int]) -> tuple[Array, Array]:
        """Run the trunk over a whole sequence.

        Returns (logits [n, V], h [n, H]); h is the hidden state after the final norm, which is
        what the head and the MTP block eat.
        """
        positions = np.arange(len(tokens))
        x = self.embedding[np.asarray(tokens)]
        for i, full in enumerate(self.is_full):
            x = self._block(x, f"model.layers.{i}", full, positions)
        h = self._norm(x, "model.norm.weight")
        return h @ self.head.T, h

    def mtp_rows(self, tokens: Sequence[int], h: Array, first: int = 0) -> Array:
        """Run the MTP block over rows at positions first, first + 1, ...

        Row i pairs the token at its position with h[i], the hidden state of the position before.
        Returns the block's hidden states [n, H] after its final norm (`mtp.norm`).
        """
        embedded = self._norm(
            self.embedding[np.asarray(tokens)], "mtp.pre_fc_norm_embedding.weight"
        )
        hidden = self._norm(h, "mtp.pre_fc_norm_hidden.weight")
        x = self._linear(np.concatenate([embedded, hidden], axis=-1), "mtp.fc")
        positions = first + np.arange(len(tokens))
        return self._norm(self._block(x, "mtp.layers.0", True, positions), "mtp.norm.weight")

    def draft(
        self,
        tokens: Sequence[int],
        h: Array,
        depth: int,
        *,
        follow: Sequence[int] | None = None,
        zero_row: bool = True,
    ) -> tuple[list[int], Array]:
        """Draft `depth` tokens after `tokens`, of which the trunk has not seen the last one yet.

        h [>= n - 1, H] are the trunk's hidden states (after its final norm) of tokens[:-1];
        further rows are ignored. Step 1 feeds the row (last token, h of the one before); each
        later step feeds the drafted token with the block's own hidden state after its norm. All
        earlier rows stand in the block's attention cache.

        `follow` gives the tokens to go on with instead of the drafts themselves, so that another
        implementation can be compared past a near tie. `zero_row` keeps a row at position 0 with
        a hidden state of zeros, as llama.cpp's draft-mtp has it; transformers starts at position 1.

        Returns (ids [depth], the argmax of each step; logits [depth, V]).
        """
        if len(h) < len(tokens) - 1:
            raise ValueError(f"{len(tokens)} tokens need {len(tokens) - 1} hidden states: {len(h)}")
        if zero_row:
            rows = np.concatenate([np.zeros((1, self.hidden), self.dtype), h[: len(tokens) - 1]])
        else:
            rows, tokens = h[: len(tokens) - 1], tokens[1:]
        fed = [int(t) for t in tokens]
        ids: list[int] = []
        logits = np.empty((depth, self.vocab_size), self.dtype)
        for step in range(depth):
            out = self.mtp_rows(fed, rows, first=0 if zero_row else 1)
            logits[step] = out[-1] @ self.head.T
            ids.append(int(logits[step].argmax()))
            fed.append(ids[-1] if follow is None else int(follow[step]))
            rows = np.concatenate([rows, out[-1:]])
        return ids, logits
