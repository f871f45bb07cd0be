"""Compute what tests/kernels compares, with the libraries in FOLDER.

    cd tests; python -m support.kernels.sweep FOLDER OUT.npz [LIBRARY]

LIBRARY: our kernels, to plug into them.

Names in the file: kind / what / threads / number of columns. A column's inputs are the same in
every batch that it is in.
"""

from __future__ import annotations

import itertools
import sys
from hashlib import shake_256
from pathlib import Path
from typing import Any

import numpy as np

from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME

from .ggml_calls import TYPES, Bytes, Floats, Ggml, Products

SUPER_BLOCKS = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
PAIRS = ("NVFP4", "Q2_0")  # blocks of 64: a pair of those of the activations
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", *PAIRS)
# The types that the kernels of the patches take, and those that keep their bits in any batch there
PATCHED, PATCHED_EXACT = ("F32", "F16", "BF16", "Q8_0", *SUPER_BLOCKS), SUPER_BLOCKS
GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
# Any bytes are a block of these. ggml quantizes GRIDS slowly, and uses few scales of PAIRS.
RANDOM = (*GRIDS, *PAIRS)
EXACT = (*SUPER_BLOCKS, "Q2_K", "Q3_K", "TQ2_0", *GRIDS, *BLOCKS)  # with the plugged-in library
BATCHES = (*range(1, 10), 15)  # any number up to 15: columns of all types
LARGE = (16, 17, 33)  # more: those of EXACT keep their bits
COLUMNS = max(LARGE)
MANY = (64, 257, 512)  # more than a call of the kernels takes
THREADS = (1, 3)
LENGTHS = (64, 300, 512, 513, 1100)  # of a KV cache
CACHES = ("F16", "F32", "Q8_0", "BF16", "Q4_0", "Q5_1")
# Those of the plugged-in library, see native/kernels
OPERATIONS = (
    *("MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT", "GATED_DELTA_NET", "SSM_CONV", "CONCAT"),
    *("ARGMAX", "MUL", "RMS_NORM", "CPY", "SCALE"),
)
LONG_ROW = 16_389  # elements: our kernels copy and scale rows from 16,384 on; no slice divides it
QUERIES = 70  # of attention: more than are computed at once


def shapes(name: str) -> list[tuple[int, int]]:
    """Row lengths and numbers of rows: whole groups of four rows or blocks, parts of one, one."""
    block = BY_NAME[name].block_length
    if block == 256:
        return [(256, 1), (512, 16), (1024, 50), (2560, 21), (2816, 7)]
    if block > 1:
        return [(block, 1), (3 * block, 16), (1024, 50), (2880, 7)]
    return [(1, 1), (7, 3), (100, 16), (1024, 50)]


def weights(name: str, n: int, rows: int) -> Floats:
    """Create the inputs from the same seed wherever they are needed."""
    return np.random.default_rng([TYPES[name], n, rows]).standard_normal((rows, n), np.float32)


def encoded_weights(ggml: Products, name: str, n: int, rows: int) -> Bytes:
    """The inputs in a type; in those of RANDOM, random blocks instead."""
    if name not in RANDOM:
        return ggml.encode(TYPES[name], weights(name, n, rows))
    rng = np.random.default_rng([TYPES[name], n, rows])
    blocks = rng.integers(0, 256, (rows * BY_NAME[name].row_bytes(n)), np.uint8)
    blocks = blocks.reshape(-1, BY_NAME[name].block_bytes)
    if name != "NVFP4":  # whose scales are bytes
        blocks[:, :2] = rng.uniform(-0.05, 0.05, (len(blocks), 1)).astype("<f2").view(np.uint8)
    return blocks.reshape(-1)


def columns(n: int) -> Floats:
    """Inputs of all batches, of very different sizes; the last is zero."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((COLUMNS, n), np.float32)
    x *= (10.0 ** rng.uniform(-3, 3, (COLUMNS, 1))).astype(np.float32)
    x[-1] = 0
    return x


def products(ggml: Products, names: tuple[str, ...]) -> dict[str, Any]:
    """Every type and shape in batches of every size."""
    found: dict[str, Any] = {}
    for name in names:
        type_ = TYPES[name]
        for n, rows in shapes(name):
            encoded = encoded_weights(ggml, name, n, rows)
            found[f"weights/{name} {n}x{rows}"] = encoded
            x = columns(n)
            each = [ggml.product(type_, encoded, rows, x[c : c + 1], 1) for c in range(COLUMNS)]
            for batch in (*BATCHES, *LARGE):
                for threads in THREADS:
                    y = ggml.product(type_, encoded, rows, x[:batch], threads)
                    found[f"product/{name} {n}x{rows}/{threads}/{batch}"] = y
            found[f"product/{name} {n}x{rows}/1/1"] = np.concatenate(each)
            half = rows // 2
            if half:
                for batch in (1, 4):
                    y = ggml.strided_product(type_, encoded, half, x[:batch], 2)
                    found[f"apart/{name} {n}x{rows}/2/{batch}"] = y
    return found


def unit_columns(ggml: Products, names: tuple[str, ...]) -> dict[str, Any]:
    """Rows of a random block times unit vectors, one by one and in a batch: their elements."""
    found: dict[str, Any] = {}
    rows = 2000  # every code and every byte of a scale
    for name in names:
        n = BY_NAME[name].block_length
        encoded = encoded_weights(ggml, name, n, rows)
        x = 127 * np.eye(n, dtype=np.float32)  # as which they are quantized, with a scale of 1
        each = [ggml.product(TYPES[name], encoded, rows, x[c : c + 1], 1) for c in range(n)]
        batch = ggml.product(TYPES[name], encoded, rows, x, 1)
        found[f"units/{name}"] = np.stack([np.concatenate(each), batch])
        found[f"blocks/{name}"] = encoded
    return found


def many_columns(ggml: Ggml, names: tuple[str, ...]) -> dict[str, Floats]:
    """Quants in prompts, with rows that fill no panel; the same columns five at a time."""
    found = {}
    n = 768
    x = np.random.default_rng(9).standard_normal((max(MANY), n), np.float32)
    for name in names:
        for rows in (16, 75):
            encoded = encoded_weights(ggml, name, n, rows)
            few = [
                ggml.product(TYPES[name], encoded, rows, x[c : c + 5], 1)
                for c in range(0, len(x), 5)
            ]
            found[f"many/{name} {n}x{rows}/1/1"] = np.concatenate(few)
            for batch in MANY:
                for threads in (1, 2, 3, 4):
                    y = ggml.product(TYPES[name], encoded, rows, x[:batch], threads)
                    found[f"many/{name} {n}x{rows}/{threads}/{batch}"] = y
    return found


def expert_products(
    ggml: Products, names: tuple[str, ...], exact: tuple[str, ...]
) -> dict[str, Floats]:
    """Four experts, two per token: one is used by all tokens, another by none."""
    found = {}
    n, experts = 512, 4
    ids = np.array([[1, 0], [1, 3], [1, 0]] * (COLUMNS // 3), np.int32)
    for name in names:
        type_ = TYPES[name]
        rows = 148 if name == "F32" else 20  # more pieces of 128 KB than threads
        encoded = encoded_weights(ggml, name, n, rows * experts)
        x = columns(n)
        most = COLUMNS if name in exact else 15
        for batch in {1, 2, 3, 7, 8, 15, most}:
            for threads in THREADS:
                y = ggml.expert_product(type_, encoded, rows, x[:batch], ids[:batch], threads)
                found[f"experts/{name}/{threads}/{batch}"] = y
        each = [
            ggml.expert_product(type_, encoded, rows, x[c : c + 1], ids[c : c + 1], 1)
            for c in range(most)
        ]
        found[f"experts/{name}/1/1"] = np.concatenate(each)
    return found


def products_of_no_expert(ggml: Products) -> None:
    """Ids of no expert, which our kernels must survive. Where ggml computes, it reads outside of
    the weights. The results are undefined.
    """
    n, rows, experts = 512, 20, 4
    encoded = encoded_weights(ggml, "Q4_K", n, rows * experts)
    ids = np.array([[-1, experts]], np.int32)
    for threads in THREADS:
        ggml.expert_product(TYPES["Q4_K"], encoded, rows, columns(n)[:1], ids, threads)


def golden_weights(name: str, blocks: int) -> Bytes:
    """Reproducible blocks of random codes and scales, with d and dmin from 2^-7 to 2^-4."""
    size = BY_NAME[name].block_bytes
    raw = np.frombuffer(shake_256(name.encode()).digest(blocks * size), np.uint8)
    raw = raw.reshape(blocks, size).copy()
    halves = raw.view(np.uint16)
    for i in {"Q4_K": (0, 1), "Q5_K": (0, 1), "Q6_K": (-1,), "NVFP4": ()}.get(name, (0,)):
        halves[:, i] = 0x2000 + halves[:, i] % 0x0C00
    return raw.reshape(-1)


def golden_columns(n: int, block: int) -> Floats:
    """Multiples of a power of two that quantizing in blocks leaves as they are."""
    raw = shake_256(b"columns").digest(9 * n)
    x = np.frombuffer(raw, np.int8).astype(np.float32).clip(-126, 126).reshape(9, n // block, block)
    x[:, :, 100 % block] = 127
    return (x / np.float32(64)).reshape(9, n)


def golden(ggml: Products, names: tuple[str, ...] = SUPER_BLOCKS) -> dict[str, Floats]:
    """Quants of 256, whose bits are the same on every CPU that has the kernels, and PAIRS, whose
    bits are the same on every x86-64."""
    n, rows = 768, 21
    found = {}
    for name in names:
        blocks = golden_weights(name, n // BY_NAME[name].block_length * rows)
        x = golden_columns(n, 32 if name in PAIRS else 256)
        found[f"golden/{name}"] = ggml.product(TYPES[name], blocks, rows, x, 1)
    return found


def queries(length: int) -> tuple[Floats, Floats, Floats, dict[str, Floats]]:
    """q, k, v and masks [query, position] over a cache of `length` positions.

    "prompt": queries that see ever more of it, the first ones nothing of a short cache. "two":
    those of two sequences in one cache, which see every other position.
    """
    rng = np.random.default_rng(5)
    heads, kv_heads, d = 4, 2, 64
    q = rng.standard_normal((heads, QUERIES, d), np.float32)
    k, v = rng.standard_normal((2, kv_heads, length, d), np.float32)
    query, position = np.arange(QUERIES)[:, None], np.arange(length)[None]
    seen = position <= length - QUERIES - 5 + query
    masks = {"prompt": seen, "two": seen & (position % 2 == query % 2)}
    hide = np.float32(-np.inf)
    return q, k, v, {name: np.where(mask, np.float32(0), hide) for name, mask in masks.items()}


def attention(ggml: Ggml) -> dict[str, Floats]:
    """Queries one by one and in a batch."""
    found = {}
    for cache, length in itertools.product(CACHES, LENGTHS):
        q, k, v, masks = queries(length)
        batches = (*range(1, 9), 15, 16, 33, QUERIES) if cache == "F16" else (5, 15, QUERIES)
        for name, mask in masks.items():
            what = f"attention/{cache} {name} {length}"
            for batch in batches:
                for threads in THREADS:
                    y = ggml.attention(q[:, :batch], k, v, mask[:batch], threads, TYPES[cache])
                    found[f"{what}/{threads}/{batch}"] = y
            each = [
                ggml.attention(q[:, c : c + 1], k, v, mask[c : c + 1], 1, TYPES[cache])
                for c in range(QUERIES)
            ]
            found[f"{what}/1/1"] = np.concatenate(each)
        # a cache that has room behind: the queries do not see it
        room = [(0, 0), (0, 700), (0, 0)]
        wide = np.pad(masks["prompt"], [(0, 0), (0, 700)], constant_values=-np.inf)
        for batch in (15, QUERIES):
            padded = q[:, :batch], np.pad(k, room), np.pad(v, room), wide[:batch]
            y = ggml.attention(*padded, 2, TYPES[cache])
            found[f"attention/{cache} prompt {length}/2/{batch}"] = y
    return found


def delta_rows(tokens: int, heads: int, d: int) -> tuple[dict[str, Floats], Floats]:
    """Inputs of a recurrence, and its first state."""
    rng = np.random.default_rng(d)
    rows = {name: rng.standard_normal((tokens, heads, d), np.float32) for name in "qkv"}
    rows["k"] /= np.linalg.norm(rows["k"], axis=-1, keepdims=True)
    rows["g"] = -rng.random((tokens, heads), np.float32)
    rows["beta"] = rng.random((tokens, heads), np.float32)
    return rows, rng.standard_normal((heads, d, d), np.float32)


def recurrence(ggml: Ggml) -> dict[str, Floats]:
    """Tokens one by one, and in batches that end in a tile of tokens, at its end, and behind it."""
    found = {}
    tokens, heads, snapshots = 40, 3, 4
    for d in (64, 128):
        rows, first = delta_rows(tokens, heads, d)
        state, outputs, states = first, [], []
        for t in range(tokens):
            token = {name: values[t : t + 1] for name, values in rows.items()}
            output, after = ggml.recurrence(token, state, 1, 1)
            state = after[0]
            outputs.append(output)
            states.append(state)
        found[f"recurrence/{d}/1/1"] = np.concatenate(outputs)
        for batch in (2, 3, 4, 5, 8, 15, 16, 17, 32, 40):
            some = {name: values[:batch] for name, values in rows.items()}
            for threads in THREADS:
                output, after = ggml.recurrence(some, first, snapshots, threads)
                found[f"recurrence/{d}/{threads}/{batch}"] = output
                kept = min(batch, snapshots)
                found[f"states/{d}/{threads}/{batch}"] = after[:kept]
                found[f"states alone/{d}/{threads}/{batch}"] = np.stack(
                    [states[batch - 1 - back] for back in range(kept)]
                )
    return found


def joins(ggml: Ggml) -> dict[str, Floats]:
    """Rows joined along each axis, as they lie and with the second array across; long and short."""
    found = {}
    rng = np.random.default_rng(6)
    for axis in range(4):
        for n in (3, 40, 150):
            a = rng.standard_normal((2, 3, 37, n), np.float32)
            shape = list(a.shape)
            shape[axis] = 20
            b = rng.standard_normal(tuple(shape), np.float32)
            swapped = np.ascontiguousarray(b.swapaxes(2, 3))
            expected = np.concatenate([a, b], axis)
            for threads in (1, 2, 3, 7):
                found[f"join/{axis} {n}/{threads}"] = np.stack(
                    [
                        ggml.joined(a, b, axis, threads, across=False),
                        ggml.joined(a, swapped, axis, threads, across=True),
                    ]
                )
                found[f"joined/{axis} {n}/{threads}"] = expected.reshape(-1)
    return found


def convolutions(ggml: Ggml) -> dict[str, Floats]:
    """Windows of four taps, which have a loop of their own, and of three; each token alone, too."""
    found = {}
    rng = np.random.default_rng(7)
    for taps in (3, 4):
        for channels in (1, 50, 1003):
            x = rng.standard_normal((2, channels, 40 + taps - 1), np.float32)
            weights = rng.standard_normal((channels, taps), np.float32)
            name = f"{taps} {channels}"
            windows = [x[:, :, i : i + 40].astype(np.float64) for i in range(taps)]
            products = [window * weights[:, i, None] for i, window in enumerate(windows)]
            found[f"convolved/{name}"] = sum(products[1:], products[0]).swapaxes(1, 2)
            each = [ggml.convolution(x[:, :, t : t + taps], weights, 1) for t in range(40)]
            found[f"convolution/{name}/1/1"] = np.concatenate(each, axis=1)
            for batch in (2, 3, 4, 7, 8, 9, 16, 40):
                for threads in THREADS:
                    y = ggml.convolution(x[:, :, : batch + taps - 1], weights, threads)
                    found[f"convolution/{name}/{threads}/{batch}"] = y
    return found


def gated_convolutions(ggml: Ggml) -> dict[str, Floats]:
    """As one operation and as three; channels that fill no block, more sequences than are fused."""
    found = {}
    rng = np.random.default_rng(9)
    for sequences, channels in ((1, 50), (1, 1003), (3, 384), (17, 40)):
        weights = rng.standard_normal((channels, 4), np.float32)
        past = rng.standard_normal((sequences, 3, channels), np.float32)
        x = rng.standard_normal((sequences, 40, channels), np.float32)
        for batch in (1, 2, 3, 4, 5, 9, 40):
            tokens = np.ascontiguousarray(x[:, :batch])
            name = f"{sequences} {channels} {batch}"
            found[f"gated apart/{name}"] = ggml.gated_convolution(
                past, tokens, weights, 1, apart=True
            )
            for threads in (1, 2, 3, 4):
                found[f"gated/{name}/{threads}"] = ggml.gated_convolution(
                    past, tokens, weights, threads, apart=False
                )
    return found


def weighted_sums(ggml: Ggml) -> dict[str, Floats]:
    """The weighted sum of each token's experts, fused and as separate operations; rows shorter than
    a vector and longer than a block, and more experts than are fused.
    """
    found = {}
    rng = np.random.default_rng(11)
    for experts, n in ((2, 5), (8, 64), (8, 259), (3, 1000), (32, 100), (33, 100)):
        for tokens in (1, 2, 7):
            x = rng.standard_normal((tokens, experts, n), np.float32)
            weights = rng.standard_normal((tokens, experts), np.float32)
            name = f"{experts} {n} {tokens}"
            expected = x[:, 0] * weights[:, 0, None]
            for e in range(1, experts):
                expected = expected + x[:, e] * weights[:, e, None]
            found[f"sum of experts/{name}"] = expected
            for threads in (1, 2, 3):
                for apart, in_place in ((False, True), (False, False), (True, True)):
                    y = ggml.weighted_sum(x, weights, threads, apart=apart, in_place=in_place)
                    found[f"weighted sum/{name}/{threads} {apart} {in_place}"] = y
    return found


def maxima(ggml: Ggml) -> dict[str, Any]:
    """Rows whose maximum is anywhere, or stands there twice, or is -inf, of lengths that fill no
    vector and several parts.
    """
    found: dict[str, Any] = {}
    rng = np.random.default_rng(10)
    for n in (1, 5, 31, 32, 33, 255, 256, 257, 700, 32_768):
        rows = rng.standard_normal((24, n), np.float32)
        for row in rows[:12]:
            row[rng.integers(0, n, 2)] = 9
        rows[12] = 1
        rows[13, n // 2 :] = -np.inf
        found[f"rows/{n}"] = rows
        found[f"softmax/{n}"] = ggml.soft_max(rows)
        rows[14] = -np.inf
        found[f"likeliest/{n}"] = ggml.likeliest(rows)
        found[f"last largest/{n}"] = n - 1 - rows[:, ::-1].argmax(axis=1)
    return found


def copies(ggml: Ggml) -> dict[str, Floats]:
    """Rows fewer and more than threads."""
    found = {}
    for n in (1, 2, 4):
        rows = np.arange(n * LONG_ROW, dtype=np.float32).reshape(n, LONG_ROW)
        for threads in (1, 2, 3, 5):
            found[f"copy/{n}/{threads}"] = ggml.copy_strided(rows, threads)
    return found


def scaled_rows(ggml: Ggml) -> dict[str, Floats]:
    """Rows times numbers, in place and beside."""
    found = {}
    for n in (1, 3):
        rows = np.random.default_rng(n).standard_normal((n, LONG_ROW), np.float32)
        for by in (0.0, -0.37):
            found[f"times/{n} {by}"] = rows * np.float32(by)
            for threads in (1, 2, 3, 5):
                for in_place in (False, True):
                    y = ggml.scaled(rows, by, threads, in_place=in_place)
                    found[f"scaled/{n} {by}/{threads} {in_place}"] = y
    return found


def activations(ggml: Ggml) -> dict[str, Floats]:
    """Blocks that quantizing takes differently, and what the reference makes of them.

    Ordinary, zero, tiny and huge ones, and such with two largest. Products with unit vectors show
    each element; the sums of a block are needed because codes of Q6_K have a bias.
    """
    blocks = np.random.default_rng(8).standard_normal((64, 256), np.float32)
    blocks[0] = 0
    blocks[1] *= 1e-30
    blocks[2] *= 1e30
    for i in range(3, 32):
        blocks[i, [3 * i, 255 - 3 * i]] = (9, -9) if i % 2 else (-9, 9)
    blocks[32, 255] = 50
    blocks[33, 0] = -50
    units = ggml.encode(TYPES["Q6_K"], np.eye(256, dtype=np.float32))
    reference = ggml.quantized(blocks)
    return {
        "q8_K": ggml.product(TYPES["Q6_K"], units, 256, blocks, 3),
        "q8_K reference": reference["quants"] * reference["scale"][:, None],
    }


def main() -> None:
    ggml = Ggml(Path(sys.argv[1]), *map(Path, sys.argv[3:]))
    plugged_in = len(sys.argv) > 3
    names = ggml.types() if plugged_in else PATCHED
    exact = tuple(name for name in names if name in (EXACT if plugged_in else PATCHED_EXACT))
    found: dict[str, Any] = {"types": np.array(names), "exact": np.array(exact)}
    pairs = tuple(name for name in PAIRS if name in names)
    found |= {**products(ggml, names), **expert_products(ggml, names, exact)}
    found |= {**golden(ggml, (*SUPER_BLOCKS, *pairs)), **unit_columns(ggml, pairs)}
    found |= {**many_columns(ggml, exact), **joins(ggml), **convolutions(ggml), **maxima(ggml)}
    found |= {**copies(ggml), **scaled_rows(ggml), **activations(ggml), **weighted_sums(ggml)}
    if ggml.kernels():
        products_of_no_expert(ggml)
    if ggml.has("ggml_gated_delta_net"):  # older versions want other masks, too
        found |= {**attention(ggml), **recurrence(ggml), **gated_convolutions(ggml)}
    found["lanes"] = np.array(ggml.kernels())
    found["computed"] = np.array([ggml.plugged.computed(name) for name in OPERATIONS])
    found["left to ggml"] = np.array(ggml.plugged.left_to_ggml(), str)
    np.savez(sys.argv[2], **found)


if __name__ == "__main__":
    main()
