"""Whether a trunk's products give the same bits for one token and for several.

Kernels of ggml-cpu that depend on the number of tokens in a batch:
- repacked weights (use_extra_bufts): switched off;
- llamafile's sgemm, from two tokens on, for the types in `SGEMM_TYPES`, attention's products of
  F16 keys and values among them: weights of these types are refused, attention goes through flash
  attention;
- flash attention over F16 and F32 caches: split over threads for one token, tiled for many. A Q8_0
  cache takes the plain loop for any number;
- tiled products of k-quants, from eight tokens on (for an expert: eight rows): verification takes
  at most `MAX_ROWS` at a time;
- ARM's matrix multiply of two rows at a time (i8mm): other machines than x86-64 are refused.
"""

import platform
from pathlib import Path

from mtp_gguf.gguf_tools.format import open_gguf

from .errors import NativeError

SGEMM_TYPES = frozenset({"F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL"})
GGML_TYPE_Q8_0 = 8
MAX_ROWS = 7  # ggml-cpu/tiled/tiled.cpp: ggml_tiled_min_batch
_MACHINES = ("x86_64", "AMD64")


def variant_tensors(path: Path) -> list[str]:
    """Name the trunk's tensors whose product depends on the batch, with their types."""
    with open_gguf(path) as file:
        arch = file.scalar("general.architecture")
        blocks = file.integer(f"{arch}.block_count") or 0
        head = file.integer(f"{arch}.nextn_predict_layers") or 0
        tied = "output.weight" not in file.by_name
        skipped = tuple(f"blk.{n}." for n in range(blocks - head, blocks))
        return [
            f"{t.name} {t.type.name}"
            for t in file.tensors
            if t.type.name in SGEMM_TYPES
            and len(t.shape) == 2  # vectors are no matrices; experts have a kernel of their own
            and t.name.endswith(".weight")
            and not t.name.endswith("ssm_conv1d.weight")
            and not t.name.startswith(skipped)
            and (tied or t.name != "token_embd.weight")
        ]


def check(path: Path, *, two_phase: bool, gpu: bool) -> None:
    """Raise NativeError, naming what is in the way, unless decoding can be exact.

    two_phase: only single tokens are ever decoded after the prompt, which any kernel bears.
    """
    if two_phase:
        return
    elsewhere = "rollback='two-phase' works anywhere"
    if gpu:
        raise NativeError(
            "exact: expected n_gpu_layers=0, found layers on a GPU: no GPU backend of ggml "
            f"promises the same bits for one token and for several; {elsewhere}"
        )
    if platform.machine() not in _MACHINES:
        raise NativeError(
            f"exact: expected an x86-64 CPU, found {platform.machine()}, whose kernels take two "
            f"rows at a time; {elsewhere}"
        )
    found = variant_tensors(path)
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise NativeError(
            f"exact: {path.name}: expected k-quants in the trunk, found {', '.join(found[:3])}"
            f"{more}, whose products differ between one token and several; {elsewhere}"
        )
