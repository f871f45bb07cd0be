"""What exact needs: batches whose rows the loaded kernels compute alike, be it one row or several.

What in ggml-cpu depends on the number of rows (tests/native/test_kernels.py holds this list against
the loaded library):
- repacked weights (use_extra_bufts): switched off;
- llamafile's sgemm, for weights of `SGEMM_TYPES`: from two rows on. MoE routers are F32;
- flash attention over a cache of `SPLIT_CACHE_TYPES`: one row is split over the threads, 64 and
  more are tiled;
- attention without flash attention: products of the cache, as sgemm; so flash attention is on;
- tiled products of k-quants: from `MAX_ROWS` + 1 rows on, of a matrix or of an expert.
So rows are alike from two to `MAX_ROWS`, and k-quants over a Q8_0 cache are with one row, too.

Patch 0004 has kernels that compute 1 to `LANES_ROWS` rows alike, for weights of `LANES_TYPES` in
matrices and experts, and with patch 0005 attention does so over any cache: where they run, exact
asks for no more than that.

ARM's products take rows in pairs (i8mm), and GPUs choose kernels by the size of a batch: refused.
"""

import platform
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.format import TensorInfo, open_gguf
from mtp_gguf.gguf_tools.model import shard_paths
from mtp_gguf.gguf_tools.system import PATCHED, STOCK
from mtp_gguf.gguf_tools.tensor_types import BY_NAME

from .errors import NativeError
from .runtime import llama_cpp

SGEMM_TYPES = frozenset({"F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL"})
SPLIT_CACHE_TYPES = frozenset({"F32", "F16"})
MAX_ROWS = 7  # ggml-cpu/tiled/tiled.cpp: ggml_tiled_min_batch
# ggml-cpu/lanes of patch 0004
LANES_TYPES = frozenset({"Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q8_0", "F16", "BF16", "F32"})
LANES_ROWS = 15
_MACHINES = ("x86_64", "AMD64")


@dataclass(frozen=True)
class Batches:
    """How many rows a batch of a cycle may have, 0 for any number; over repacked weights or not."""

    min_rows: int = 1
    max_rows: int = 0
    repacked: bool = True


def has_lanes() -> bool:
    """Whether the kernels of patch 0004 run in the loaded ggml-cpu, on this CPU."""
    return b"LANES = " in llama_cpp.llama_print_system_info()


def has_attention() -> bool:
    """Whether flash attention is that of patch 0005: its kernels are for x86-64 alone."""
    return has_lanes() and platform.machine() in _MACHINES


def kernels() -> str:
    """What multiplies a few rows on this CPU with the loaded libraries, as in Machine.kernels."""
    return PATCHED if has_lanes() else STOCK


def trunk_matrices(path: Path) -> list[TensorInfo]:
    """The trunk's tensors, of all shards, that are multiplied with a token's rows, experts too."""
    with ExitStack() as stack:
        files = [stack.enter_context(open_gguf(shard)) for shard in shard_paths(path)]
        arch = files[0].scalar("general.architecture")
        blocks = files[0].integer(f"{arch}.block_count") or 0
        head = files[0].integer(f"{arch}.nextn_predict_layers") or 0
        tensors = [tensor for file in files for tensor in file.tensors]
    tied = all(t.name != "output.weight" for t in tensors)
    skipped = tuple(f"blk.{n}." for n in range(blocks - head, blocks))
    return [
        t
        for t in tensors
        if len(t.shape) > 1  # vectors are no matrices
        and t.name.endswith(".weight")
        and not t.name.endswith("ssm_conv1d.weight")
        and not t.name.startswith(skipped)
        and (tied or t.name != "token_embd.weight")
    ]


def sgemm_tensors(path: Path) -> list[str]:
    """Name the trunk's matrices whose product is another one from two rows on."""
    return [
        t.name
        for t in trunk_matrices(path)
        if t.type.name in SGEMM_TYPES and len(t.shape) == 2  # experts have a kernel of their own
    ]


def exact_batches(path: Path, options: dict[str, Any], *, two_phase: bool) -> Batches:
    """The batches of a cycle that are exact for a trunk and these options of llama_cpp.Llama.

    Fills in the options that exact needs and the caller left open. two_phase: only single tokens
    are ever decoded after the prompt. Raises NativeError, naming what is in the way.
    """
    if two_phase:
        return Batches(max_rows=1)
    elsewhere = "rollback='two-phase' works anywhere"
    if options.get("n_gpu_layers", 0):
        raise NativeError(
            "exact: expected n_gpu_layers=0, found layers on a GPU: no GPU backend of ggml "
            f"promises the same bits for one token and for several; {elsewhere}"
        )
    if platform.machine() not in _MACHINES:
        raise NativeError(
            f"exact: expected an x86-64 CPU, found {platform.machine()}, whose kernels take two "
            f"rows at a time; {elsewhere}"
        )
    for name, value in (("flash_attn", True), ("op_offload", False)):
        if (found := options.setdefault(name, value)) != value:
            raise NativeError(f"exact: expected {name}={value}, found {found}; {elsewhere}")
    adapter = bool(options.get("lora_path"))
    if has_lanes() and not adapter:
        types = {t.type.name for t in trunk_matrices(path)}
        if types <= LANES_TYPES:
            return Batches(max_rows=LANES_ROWS, repacked=False)
    # An adapter's matrices may be of any type. Where a second row is computed anyway, llama.cpp's
    # own cache type will do.
    two = adapter or bool(sgemm_tensors(path))
    for name in ("type_k", "type_v"):
        if options.get(name) is None:
            options[name] = BY_NAME["F16" if two else "Q8_0"].id
    cache = {options["type_k"], options["type_v"]}
    two = two or any(cache == {BY_NAME[name].id} for name in SPLIT_CACHE_TYPES)
    return Batches(2 if two else 1, MAX_ROWS, repacked=False)
