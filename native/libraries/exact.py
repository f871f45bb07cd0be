"""The batch sizes that `exact` needs: those for which a row's result does not depend on the size.

In ggml-cpu the following depends on the number of rows in a batch (tests/native/test_kernels.py
checks this list against the loaded library):
- repacked weights (use_extra_bufts), which exact switches off;
- llamafile's sgemm for weights of `SGEMM_TYPES`, used from two rows on (MoE routers are F32);
- flash attention over a cache of `SPLIT_CACHE_TYPES`: a single row is split over the threads, and
  from 64 rows on the kernel is tiled;
- attention without flash attention, which uses sgemm on the cache; so flash attention is required;
- tiled products of k-quants, used from `MAX_ROWS` + 1 rows on, for a matrix or an expert.
Results are therefore the same for two to `MAX_ROWS` rows. With k-quants and a Q8_0 cache they are
the same for one row, too.

Our kernels (native/kernels) have the same result for 1 to `LANES_ROWS` rows, for weights of their
types in matrices and experts, and in attention over any cache. Where they run, exact needs nothing
else.

Other backends are rejected: ARM's products process rows in pairs (i8mm), and GPUs choose kernels by
batch size.
"""

import platform
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.files.format import TensorInfo, open_gguf
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.gguf_tools.machine.system import PATCHED, PLUGGED_IN, STOCK
from mtp_gguf.gguf_tools.model import shard_paths

from ..errors import NativeError
from ..runtime import plugged_kernels
from .kernel_share import weight_matrices

SGEMM_TYPES = frozenset({"F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL"})
SPLIT_CACHE_TYPES = frozenset({"F32", "F16"})
MAX_ROWS = 7  # ggml-cpu/tiled/tiled.cpp: ggml_tiled_min_batch
LANES_ROWS = 15  # native/kernels/src/columns.cpp, most_columns
_MACHINES = ("x86_64", "AMD64")


@dataclass(frozen=True)
class Batches:
    """The rows that a batch of a cycle may have (max_rows 0: no limit), and whether to repack."""

    min_rows: int = 1
    max_rows: int = 0
    repacked: bool = True


def has_product_kernels() -> bool:
    """Whether products on this CPU are computed by our kernels."""
    return "MUL_MAT" in plugged_kernels.operations()


def has_attention() -> bool:
    """Whether flash attention is computed by our kernels, which are only for x86-64."""
    return platform.machine() in _MACHINES and "FLASH_ATTN_EXT" in plugged_kernels.operations()


def kernels() -> str:
    """Return which kernels the loaded libraries use here, as in Machine.kernels."""
    if not plugged_kernels.instructions:
        return STOCK
    return PATCHED if plugged_kernels.patched else PLUGGED_IN


def trunk_matrices(path: Path) -> list[TensorInfo]:
    """Return the trunk's weight matrices from all shards, including experts."""
    with ExitStack() as stack:
        files = [stack.enter_context(open_gguf(shard)) for shard in shard_paths(path)]
        arch = files[0].scalar("general.architecture")
        blocks = files[0].integer(f"{arch}.block_count") or 0
        head = files[0].integer(f"{arch}.nextn_predict_layers") or 0
        tensors = [tensor for file in files for tensor in file.tensors]
    skipped = tuple(f"blk.{n}." for n in range(blocks - head, blocks))
    return [t for t in weight_matrices(tensors) if not t.name.startswith(skipped)]


def sgemm_tensors(path: Path) -> list[str]:
    """Return the names of the trunk's matrices whose kernel changes from two rows on."""
    return [
        t.name
        for t in trunk_matrices(path)
        if t.type.name in SGEMM_TYPES and len(t.shape) == 2  # experts use another kernel
    ]


def exact_batches(path: Path, options: dict[str, Any], *, two_phase: bool) -> Batches:
    """Return the batch sizes that are exact for a trunk with these llama_cpp.Llama options.

    Sets the options that exact needs and the caller has not set. two_phase: after the prompt only
    single tokens are decoded. Raises NativeError, naming the cause, if exactness is impossible.
    """
    if two_phase:
        return Batches(max_rows=1)
    elsewhere = "MTPLlama(rollback='two-phase') works on every backend"
    if options.get("n_gpu_layers", 0):
        raise NativeError(
            "exact: expected n_gpu_layers=0, found layers on a GPU: no GPU backend of ggml "
            f"gives the same bits for one token and for several; {elsewhere}"
        )
    if platform.machine() not in _MACHINES:
        raise NativeError(
            f"exact: expected an x86-64 CPU, found {platform.machine()}, whose kernels process two "
            f"rows at a time; {elsewhere}"
        )
    for name, value in (("flash_attn", True), ("op_offload", False)):
        if (found := options.setdefault(name, value)) != value:
            raise NativeError(f"exact: expected {name}={value}, found {found}; {elsewhere}")
    adapter = bool(options.get("lora_path"))
    if has_product_kernels() and not adapter:
        types = {t.type.name for t in trunk_matrices(path)}
        if types <= plugged_kernels.types():
            return Batches(max_rows=LANES_ROWS, repacked=False)
    # An adapter's matrices may have any type. If at least two rows are computed anyway, llama.cpp's
    # default cache type is fine.
    two = adapter or bool(sgemm_tensors(path))
    for name in ("type_k", "type_v"):
        if options.get(name) is None:
            options[name] = BY_NAME["F16" if two else "Q8_0"].id
    cache = {options["type_k"], options["type_v"]}
    two = two or any(cache == {BY_NAME[name].id} for name in SPLIT_CACHE_TYPES)
    return Batches(2 if two else 1, MAX_ROWS, repacked=False)
