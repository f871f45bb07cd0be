"""Measure one shape on the first GPU, for gpu.py; the last line printed is JSON.

python benchmarks/gpu_table.py SHAPE --work FOLDER [--depths 1,2,3,auto] [--tokens 256] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from decode import PROMPT_TOKENS, dial_file, one_round, prefill_ms, server, server_round
from dial_model import SHAPES

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import OutputSpec, TensorCopy, write
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native import MTPLlama, devices
from mtp_gguf.native.libraries import device_name
from mtp_gguf.server.build import find_build

HIT = 0.8
PERIOD = 4  # three linear attention layers and one of full attention
CPU_MOE = "-cpu-moe"  # of a shape's name: the experts are on the CPU
LONG_PROMPT = 512
ALL = 999
# Models whose checkpoint would not fit into memory: their first PERIOD layers are repeated.
STRETCHED = {"27b": 64, "35b-a3b": 40}


def stretched(source: Path, target: Path, layers: int) -> None:
    """A copy with the trunk's layers repeated up to `layers`, and the head after them.

    The text stays the same, since layers add very little; the time of a layer does not depend on
    its weights.
    """
    with open_model(source) as model:
        arch, old = model.architecture, model.head.trunk_layers
        metadata = dict(model.metadata())
        recurrent = model.first.array(f"{arch}.attention.recurrent_layers")
        metadata[f"{arch}.block_count"] = Value(ValueType.U32, layers + 1)
        if recurrent is not None:
            repeated = [bool(recurrent[i % old]) for i in range(layers)] + [False]
            key = f"{arch}.attention.recurrent_layers"
            metadata[key] = Value(ValueType.BOOL, repeated)
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
        write(target, OutputSpec(metadata, tuple(copies)))


def model_file(shape: str, work: Path) -> Path:
    """The GGUF of a shape, made once."""
    layers = STRETCHED.get(shape)
    if layers is None:
        return dial_file(shape, HIT, work)
    target = work / f"{shape}-{layers}-layers.gguf"
    if not target.exists():
        short = f"{shape}-{PERIOD}"
        spec = replace(SHAPES[shape], name=short, layers=PERIOD, vocab_size=248_320)
        SHAPES[short] = spec
        small = dial_file(short, HIT, work)
        stretched(small, target, layers)
        small.unlink()
    return target


def measure(path: Path, depth: int | str, arguments: argparse.Namespace, cpu_moe: int) -> Any:
    """Our session at one depth: medians of the rounds."""
    device = device_name(ALL)
    before = devices.device_memory(device)[0]
    with MTPLlama(
        str(path),
        depth=depth,
        max_depth=6,
        n_ctx=2048,
        n_gpu_layers=-1,
        n_cpu_moe=cpu_moe,
        profile=False,
    ) as llm:
        usable = min(20_000, llm.n_vocab() * 2 // 3)  # no padding, no control tokens
        rng = np.random.default_rng(1)
        prompt = rng.integers(0, usable, PROMPT_TOKENS).tolist()
        long_prompt = rng.integers(0, usable, LONG_PROMPT).tolist()
        one_round(llm, prompt, arguments.tokens)  # compiles and warms up
        rounds = [one_round(llm, prompt, arguments.tokens) for _ in range(arguments.rounds)]
        prefill_ms(llm, long_prompt)
        trunk_ms, head_ms = prefill_ms(llm, long_prompt)
        used = before - devices.device_memory(device)[0]
    row: dict[str, Any] = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    parts = sum(row[part] for part in ("draft_ms", "verify_ms", "sample_ms", "rollback_ms"))
    return row | {
        "what": "plain" if depth == 0 else f"ours, depth {depth}",
        "rest_ms": row["cycle_ms"] - parts,
        "prompt_tok_s": LONG_PROMPT * 1e3 / (trunk_ms + head_ms),
        "vram": used,
    }


def measure_server(
    binary: Path, path: Path, depth: int, arguments: argparse.Namespace, cpu_moe: int
) -> dict[str, Any]:
    """llama-server with its own steps of draft-mtp."""
    options = ["-ngl", str(ALL), "--n-cpu-moe", str(cpu_moe)]
    options += ["--no-spec-draft-fused"] if depth else []
    prompt = np.random.default_rng(1).integers(0, 700, PROMPT_TOKENS).tolist()
    with server(str(binary), str(path), depth, 4, *options) as url:
        speeds = [server_round(url, prompt, arguments.tokens) for _ in range(arguments.rounds + 1)]
    what = f"llama-server's draft-mtp, depth {depth}" if depth else "llama-server, plain"
    return {"what": what, "tok_s": statistics.median(speeds[1:])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("shape")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--depths", default="1,2,3,4,5,6,auto")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", choices=["yes", "no"], default="yes")
    arguments = parser.parse_args()
    shape = arguments.shape.removesuffix(CPU_MOE)
    cpu_moe = ALL if arguments.shape.endswith(CPU_MOE) else 0
    if shape not in SHAPES:
        parser.error(f"expected one of {', '.join(SHAPES)}, found {shape}")
    if device_name(ALL) == "CPU":
        parser.error("ggml finds no GPU")
    arguments.work.mkdir(parents=True, exist_ok=True)
    path = model_file(shape, arguments.work)
    depths = [d if d == "auto" else int(d) for d in arguments.depths.split(",")]
    rows = [measure(path, depth, arguments, cpu_moe) for depth in (0, *depths)]
    build = find_build()
    for depth in [0, *(d for d in depths if isinstance(d, int))] if build else []:
        rows.append(measure_server(build.server, path, depth, arguments, cpu_moe))
    device = next(d for d in devices.devices() if d.name == device_name(ALL))
    size = path.stat().st_size
    if arguments.keep == "no":
        path.unlink()
    print(
        json.dumps(
            {"shape": arguments.shape, "device": device.description, "bytes": size, "rows": rows}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
