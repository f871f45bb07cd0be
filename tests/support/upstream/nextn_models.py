"""Small synthetic GGUF files of every architecture that llama.cpp gives a NextN block.

No converter is needed: `llama_model_init_from_user` makes a model from metadata alone, and so says
which tensors, optional ones included, the architecture has and in which shapes. The files get
random weights and a tokenizer of 128 tokens.

    cd tests; python -m support.upstream.nextn_models write FOLDER TRUNK WIDTH ARCHITECTURE...

writes FOLDER/ARCHITECTURE.gguf in the `Size` TRUNK, WIDTH, and

    cd tests; python -m support.upstream.nextn_models draft FILE...

prints for each file what its head drafts, as JSON. Each is done in a process of its own, which may
abort.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtp_gguf.gguf_tools.files.format import TensorSpec, Value, ValueType, lay_out
from mtp_gguf.gguf_tools.files.tensor_types import F32

TESTS = Path(__file__).parents[2]
TRUNK = 2  # layers
WIDTH, HEADS, FFN, TOKENS, EXPERTS = 64, 2, 96, 128, 2
SEED = 3
_SECONDS = 60  # for a file of a few megabytes

_U32, _F32, _BOOL = ValueType.U32, ValueType.F32, ValueType.BOOL
_MLA = ("deepseek2", "deepseek32", "glm-dsa", "bailingmoe3", "dots3note", "glm5-next")
# Layers of the block: llama.cpp chains three heads of Step 3.5.
LAYERS = {"step35": 3}
_SCALES = (".scale", ".input_scale")  # of NVFP4
_TRUNK_LAYERS = {"nemotron_h_moe": 3, "deepseek4": 4}


class Size(NamedTuple):
    """Factors on the number of trunk layers and on the width, with its heads."""

    trunk: int = 1
    width: int = 1


SMALLEST = Size()


def trunk_layers(architecture: str, size: Size = SMALLEST) -> int:
    """Number of trunk layers of the files."""
    return _TRUNK_LAYERS.get(architecture, TRUNK) * size.trunk


def hparams(
    architecture: str, layers: int | None = None, size: Size = SMALLEST
) -> dict[str, Value]:
    """The architecture's metadata, with keys that it may not read.

    layers: number of NextN layers.
    """
    layers = LAYERS.get(architecture, 1) if layers is None else layers
    blocks = trunk_layers(architecture, size) + layers
    mla = architecture in _MLA
    width, heads = (128, 1) if mla else (WIDTH, HEADS)
    if architecture == "deepseek4":
        width, heads = 512, 8
    else:
        width, heads = width * size.width, heads * size.width
    ffn = FFN * size.width
    head = width // heads
    kv_heads = 1 if mla else heads  # the heads share their compressed keys
    u32: dict[str, Any] = {
        "vocab_size": TOKENS,
        "context_length": 256,
        "embedding_length": width,
        "block_count": blocks,
        "nextn_predict_layers": layers,
        "leading_dense_block_count": 1,
        "feed_forward_length": ffn,
        "full_attention_interval": 2,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 512,
        "attention.sliding_window": 32,
        "attention.indexer.head_count": 8,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 131072,
        "attention.indexer.block_size": 4,
        "attention.indexer.kpool": 4,
        "expert_feed_forward_length": ffn,
        "expert_shared_feed_forward_length": ffn // 2,
        "expert_count": EXPERTS,
        "expert_used_count": EXPERTS,
        "expert_shared_count": 1,
        "expert_gating_func": 4 if architecture == "deepseek4" else 2,
        "ssm.inner_size": 256,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 2,
        "ssm.group_count": 2,
        "kda.head_dim": 128,
    }
    f32: dict[str, Any] = {
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "logit_scale": 1.0,
        "rope.freq_base_swa": 10000.0,
        "expert_weights_scale": 1.0,
        "kda.gate_lower_bound": -5.0,
    }
    flags: dict[str, Any] = {"expert_weights_norm": True, "kda.safe_gate": True}
    if mla:
        u32 |= {
            "attention.key_length": 576,
            "attention.value_length": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "rope.dimension_count": 64,
        }
        u32["attention.q_lora_rank"] = 512
    else:
        u32 |= {"attention.key_length": head, "attention.value_length": head}
    if architecture == "bailingmoe3":
        u32["attention.head_count_kv"] = [*[kv_heads, 0] * size.trunk, *[kv_heads] * layers]
        u32["rope.dimension_sections"] = [8, 12, 12, 0]
    elif architecture == "nemotron_h_moe":
        of_heads = [*[heads, 0, heads] * size.trunk, *[heads] * layers]
        u32 |= {"attention.head_count": of_heads, "attention.head_count_kv": of_heads}
        u32["feed_forward_length"] = [*[0, 0, ffn] * size.trunk, *[ffn] * layers]
    elif architecture == "glm4moe":
        u32["rope.dimension_count"] = head // 2
    elif architecture.startswith("qwen"):
        u32["rope.dimension_sections"] = [head // 4] * 4
    if architecture == "deepseek4":
        u32 |= {
            "attention.head_count_kv": 1,
            "rope.dimension_count": head // 2,
            "attention.output_group_count": 8,
            "attention.output_lora_rank": 32,
            "attention.compress_ratios": [*[0, 0, 4, 128] * size.trunk, *[0] * layers],
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 2,
            "hash_layer_count": 0,
        }
        f32 |= {
            "attention.compress_rope_freq_base": 160000.0,
            "hyper_connection.epsilon": 1e-6,
            "swiglu_clamp_exp": 10.0,
        }
    if architecture in ("cohere2moe", "mimo2", "step35"):
        u32["attention.sliding_window_pattern"] = [i % 2 for i in range(blocks)]
    if architecture == "step35":  # layers with a window have heads and a rotation of their own
        windows = u32["attention.sliding_window_pattern"]
        u32["attention.head_count"] = [heads * (1 + window) for window in windows]
        u32["attention.head_count_kv"] = [heads // (1 + window) for window in windows]
        u32["attention.sliding_window"] = 8
        f32["rope.freq_base"] = 500000.0
        f32["swiglu_clamp_exp"] = f32["swiglu_clamp_shexp"] = [0.0, *[0.125] * (blocks - 1)]
    keys = {key: Value(_U32, _list(value)) for key, value in u32.items()}
    keys |= {key: Value(_F32, _list(value)) for key, value in f32.items()}
    keys |= {key: Value(_BOOL, value) for key, value in flags.items()}
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def metadata(
    architecture: str, layers: int | None = None, size: Size = SMALLEST
) -> dict[str, Value]:
    """All keys of a file."""
    tokens = tuple(f"<{i}>" for i in range(TOKENS))
    return {
        "general.architecture": Value(ValueType.STRING, architecture),
        **hparams(architecture, layers, size),
        "tokenizer.ggml.model": Value(ValueType.STRING, "gpt2"),
        "tokenizer.ggml.pre": Value(ValueType.STRING, "default"),
        "tokenizer.ggml.tokens": Value(ValueType.STRING, tokens),
        "tokenizer.ggml.token_type": Value(ValueType.I32, (1,) * TOKENS),
        "tokenizer.ggml.merges": Value(ValueType.STRING, ("< 1",)),
    }


def write_models(
    folder: Path, architectures: Sequence[str], size: Size = SMALLEST
) -> dict[str, Path]:
    """Write a file for each architecture with the stock libraries; raises if one fails."""
    _run("write", str(folder.resolve()), *map(str, size), *architectures)
    return {name: folder / f"{name}.gguf" for name in architectures}


def drafts(paths: Sequence[Path]) -> list[list[int] | None]:
    """What llama.cpp drafts with each file; None if it does not load it or does not draft."""
    found: list[list[int] | None] = json.loads(_run("draft", *map(str, paths)))
    return found


def trunk_tokens(paths: Sequence[Path]) -> list[list[int] | None]:
    """What llama.cpp predicts with the trunk of each file; None if it does not load it."""
    found: list[list[int] | None] = json.loads(_run("trunk", *map(str, paths)))
    return found


def _run(*arguments: str) -> str:
    env = os.environ | {"PYTHONPATH": str(TESTS), "MTP_GGUF_LIBS": "stock"}
    command = [sys.executable, "-m", "support.upstream.nextn_models", *arguments]
    done = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return done.stdout


# ------------------------------------------------------------------------- in the child process


class _Tensor(ctypes.Structure):
    """The first members of struct ggml_tensor."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


def _shapes(architecture: str, header: Path) -> dict[str, tuple[int, ...]]:
    """Every tensor that llama.cpp makes for the metadata in a file."""
    from mtp_gguf.native.runtime import llama_cpp  # noqa: PLC0415
    from support.ggml_reader import ggml_base  # noqa: PLC0415

    found: dict[str, tuple[int, ...]] = {}
    base = ggml_base()
    base.ggml_get_name.argtypes, base.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p

    @llama_cpp.llama_model_set_tensor_data_t  # type: ignore[untyped-decorator]
    def note(tensor: int, _: Any) -> None:
        held = _Tensor.from_address(tensor)
        name = base.ggml_get_name(tensor).decode()
        shape = list(held.ne)
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        found[name] = tuple(shape)

    class Params(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, Params]
    base.gguf_init_from_file.restype = ctypes.c_void_p
    context = base.gguf_init_from_file(str(header).encode(), Params(True, None))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.load_mtp, params.use_extra_bufts, params.n_gpu_layers = True, False, 0
    make = llama_cpp.llama_model_init_from_user
    if not make(context, note, ctypes.c_void_p(0), params):
        raise RuntimeError(f"llama.cpp does not make a model of {architecture}")
    return found


def _with_head(
    architecture: str, shapes: dict[str, tuple[int, ...]], size: Size
) -> dict[str, tuple[int, ...]]:
    """The shapes with what llama.cpp only makes for a file that has the block, and no scales."""
    block = f"blk.{trunk_layers(architecture, size)}."
    (width,) = shapes["output_norm.weight"]
    if architecture == "deepseek4":
        shapes |= {
            f"{block}nextn.eh_proj.weight": (2 * width, width),
            **{f"{block}nextn.{n}.weight": (width,) for n in ("enorm", "hnorm")},
            f"{block}nextn.shared_head_norm.weight": (width,),
        }
    if architecture in ("step35", "hy_v3"):  # their blocks are dense or mixed: mixed, dense, mixed
        dense = tuple(f"ffn_{part}.weight" for part in ("gate", "up", "down"))
        for i in range(LAYERS.get(architecture, 1)):
            prefix = f"blk.{trunk_layers(architecture, size) + i}."
            for name in [name for name in shapes if name.startswith(prefix)]:
                mixed = "exp" in name or name.endswith("ffn_gate_inp.weight")
                if name.endswith(dense) if i % 2 == 0 else mixed:
                    del shapes[name]
    if architecture == "mimo2":  # its draft graph reads fused tensors only
        parts = [shapes.pop(f"{block}attn_{part}.weight")[1] for part in "qkv"]
        for part in "qkv":
            shapes.pop(f"{block}attn_{part}.bias")
        shapes[f"{block}attn_qkv.weight"] = (width, sum(parts))
    return {name: shape for name, shape in shapes.items() if not name.endswith(_SCALES)}


def _write(path: Path, architecture: str, size: Size) -> bool:
    keys = metadata(architecture, size=size)
    header = path.with_suffix(".header")
    header.write_bytes(lay_out(keys, []).header)
    shapes = _with_head(architecture, _shapes(architecture, header), size)
    header.unlink()
    specs = [TensorSpec(name, shape, F32) for name, shape in shapes.items()]
    layout = lay_out(keys, specs)
    noise = np.random.default_rng(SEED)
    with path.open("wb") as file:
        file.write(layout.header)
        for spec, offset in zip(specs, layout.offsets, strict=True):
            file.seek(offset)
            values = noise.standard_normal(spec.nbytes // 4, np.float32) / 8
            if "norm" in spec.name:
                values += 1
            elif ".ssm_a" in spec.name:
                values = -np.abs(values)
            file.write(values.tobytes())
        file.truncate(layout.size)
    return True


def _draft(path: Path) -> list[int]:
    """What llama.cpp drafts after a few tokens.

    The hidden states do not come from the trunk, so that a head alone drafts the same.
    """
    from . import llama_mtp  # noqa: PLC0415

    llama_mtp.THREADS = 1
    tokens = [1, 2, 3, 4]
    with llama_mtp.LlamaMtp(path) as model:
        hidden = np.random.default_rng(SEED).standard_normal((3, model.hidden), np.float32)
        return model.draft(tokens, hidden, 2)[0]


def _trunk(path: Path) -> list[int]:
    """The most likely tokens after each of a few."""
    from . import llama_mtp  # noqa: PLC0415

    llama_mtp.THREADS = 1
    with llama_mtp.LlamaMtp(path) as model:
        return [int(row.argmax()) for row in model.trunk([1, 2, 3])[0]]


def _in_child(job: Callable[[], object]) -> object:
    """The JSON value of a job that may abort; None if it did or raised."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(_SECONDS)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            os.write(sink, json.dumps(job()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return None if status else json.loads(said)


def main() -> None:
    """Fork for each architecture or file."""
    from mtp_gguf.native import runtime  # noqa: F401, PLC0415  (once, for all forks)

    verb, *arguments = sys.argv[1:]
    if verb == "write":
        folder, trunk, width, *names = arguments
        size = Size(int(trunk), int(width))
        done = [
            _in_child(partial(_write, Path(folder) / f"{name}.gguf", name, size)) for name in names
        ]
        failed = [name for name, result in zip(names, done, strict=True) if result is None]
        if failed:
            sys.exit(f"llama.cpp makes no model of {' '.join(failed)}")
        return
    job = _trunk if verb == "trunk" else _draft
    print(json.dumps([_in_child(partial(job, Path(path))) for path in arguments]))


if __name__ == "__main__":
    main()
