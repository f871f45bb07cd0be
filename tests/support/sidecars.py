"""Head-only files as publishers ship them, made by hand with upstream's `gguf` package.

The lists are those of published files: `mtp-Qwen3.8-27B-Q4_0.gguf` of ggml-org has 18 tensors, and
Unsloth's `MTP/mtp-…-shared-Q8_0.gguf` have the block only, and the key that says so.
"""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from support.gguf_files import finish

OUTSIDE = ("token_embd.weight", "output_norm.weight", "output.weight")
BLOCK = (
    *(f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")),
    *(f"attn_{name}.weight" for name in ("norm", "q", "k", "v", "output", "q_norm", "k_norm")),
    "post_attention_norm.weight",
    *(f"ffn_{name}.weight" for name in ("gate", "up", "down")),
)
SHARED_KEY = "nextn_shared_target_tensors"


def write_sidecar(whole: Path, path: Path, *, shared: bool, flag: bool = True) -> Path:
    """The head of a `qwen35` model, with Unsloth's tensors and keys if `shared`, else ggml-org's.

    flag: write the key that announces the shared tensors, too.
    """
    reader = GGUFReader(whole)
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith(("GGUF.", "mtp_gguf."))
    }
    architecture = fields.pop("general.architecture")
    block = fields[f"{architecture}.block_count"] - 1
    names = {f"blk.{block}.{suffix}" for suffix in BLOCK} | (set() if shared else {*OUTSIDE})
    writer = GGUFWriter(path, architecture)
    for name, value in fields.items():
        kind, *inner = reader.fields[name].types[:2]
        sub = inner[0] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub)
    if shared and flag:
        writer.add_bool(f"{architecture}.{SHARED_KEY}", True)
    for tensor in reader.tensors:
        if tensor.name in names:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return path
