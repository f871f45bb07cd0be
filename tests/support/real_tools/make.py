"""Write one checkpoint with another tool, such as PEFT or GPTQModel.

    cd tests; python -m support.real_tools.make ROW SOURCE TARGET

SOURCE is a tiny checkpoint of `checkpoints.py` that has no head (transformers keeps none). Each row
is a process of its own: the tools change one another's libraries while they are imported. The exit
code is 77 where a package is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

MISSING = 77
SEED = 5

Maker = Callable[[Path, Path], None]
MAKERS: dict[str, Maker] = {}


def row(name: str) -> Callable[[Maker], Maker]:
    def register(make: Maker) -> Maker:
        MAKERS[name] = make
        return make

    return register


def load(source: Path, dtype: str = "bfloat16", **options: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)


def save(model: Any, source: Path, target: Path, **options: Any) -> None:
    """What a script does: the model, and the tokenizer beside it."""
    model.save_pretrained(target, **options)
    save_tokenizer(source, target)


def save_tokenizer(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def calibration(source: Path) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(SEED)
    ids = [torch.randint(0, 900, (1, 64), generator=generator) for _ in range(8)]
    return [{"input_ids": i, "attention_mask": torch.ones_like(i)} for i in ids]


# ------------------------------------------------------------------------- transformers


def _saved(source: Path, target: Path, dtype: str = "bfloat16", **options: Any) -> None:
    save(load(source, dtype), source, target, **options)


row("save_pretrained")(_saved)
row("save_pretrained, float16")(partial(_saved, dtype="float16"))
row("save_pretrained, float32, sharded")(partial(_saved, dtype="float32", max_shard_size="400KB"))


@row("save_pretrained of a vision-language model")
def _(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = AutoConfig.from_pretrained(source).get_text_config().to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": text["hidden_size"], "num_position_embeddings": 16}
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(SEED)
    save(Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16), source, target)


@row("save_pretrained, mixture of experts")
def _(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    held = AutoConfig.from_pretrained(source).get_text_config().to_dict()
    kept = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    kept += ["head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"]
    kept += ["linear_value_head_dim", "layer_types", "vocab_size", "rope_parameters"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts |= {"shared_expert_intermediate_size": 64}
    torch.manual_seed(SEED)
    config = Qwen3_5MoeTextConfig(**{key: held[key] for key in kept}, **experts)
    save(Qwen3_5MoeForCausalLM(config).to(torch.bfloat16), source, target)


@row("save_pretrained, tied embeddings")
def _(source: Path, target: Path) -> None:
    model = load(source, tie_word_embeddings=True)
    model.tie_weights()
    save(model, source, target)


@row("torch.save of a state dict")
def _(source: Path, target: Path) -> None:
    import torch

    shutil.copytree(source, target)
    (target / "model.safetensors").unlink()
    torch.save(load(source).state_dict(), target / "pytorch_model.bin")


@row("TorchAoConfig, int8")
def _(source: Path, target: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    save(load(source, quantization_config=config), source, target)


def _bitsandbytes(source: Path, target: Path, bits: int) -> None:
    import bitsandbytes  # noqa: F401
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    save(load(source, quantization_config=config), source, target)


for _bits in (4, 8):
    row(f"bitsandbytes, {_bits} bits")(partial(_bitsandbytes, bits=_bits))


@row("bitsandbytes, dequantize and save_pretrained")
def _(source: Path, target: Path) -> None:
    """The way to 16 bits that a refusal names."""
    quantized = target.parent / "quantized"
    MAKERS["bitsandbytes, 4 bits"](source, quantized)
    save(load(quantized).dequantize(), source, target)


@row("HQQ, save_quantized")
def _(source: Path, target: Path) -> None:
    """The package's own way to save; transformers 5 has no other."""
    import torch
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    model = load(source)
    config = BaseQuantizeConfig(nbits=4, group_size=64)
    AutoHQQHFModel.quantize_model(model, config, compute_dtype=torch.bfloat16, device="cpu")
    AutoHQQHFModel.save_quantized(model, str(target))
    save_tokenizer(source, target)


@row("Quanto, int8")
def _(source: Path, target: Path) -> None:
    from optimum.quanto import QuantizedModelForCausalLM, qint8

    model = QuantizedModelForCausalLM.quantize(load(source), weights=qint8, exclude="lm_head")
    save(model, source, target)


# ------------------------------------------------------------------------ transformers 4

# transformers 4 has tokenizers of this family and not its models. The slow one has vocab.json and
# merges.txt instead of tokenizer.json.
_SAVE_TOKENIZER = """
import pathlib, sys, transformers
kind, source, target = sys.argv[1:]
transformers.Qwen2TokenizerFast.from_pretrained(source).save_pretrained(target)
if kind == "Qwen2Tokenizer":
    pathlib.Path(target, "tokenizer.json").unlink()
    transformers.Qwen2Tokenizer.from_pretrained(target).save_pretrained(target)
"""


def _tokenizer_of_4(source: Path, target: Path, kind: str) -> None:
    python = os.environ.get("TRANSFORMERS_4_PYTHON")
    if python is None:
        raise ImportError("TRANSFORMERS_4_PYTHON: a Python that has transformers 4")
    load(source).save_pretrained(target)
    words = [python, "-c", _SAVE_TOKENIZER, kind, str(source), str(target)]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": ""})


for _kind in ("Qwen2TokenizerFast", "Qwen2Tokenizer"):
    row(f"{_kind}.save_pretrained")(partial(_tokenizer_of_4, kind=_kind))


# -------------------------------------------------------------------------- gguf package


@row("gguf-new-metadata")
def _(source: Path, target: Path) -> None:
    """The script of the gguf package that rewrites the keys of a finished file."""
    from gguf.scripts import gguf_new_metadata

    from support.upstream.convert_upstream import convert

    target.mkdir()
    made = convert(source, target / "made.gguf", "f32", ["--no-mtp"])
    script = [sys.executable, gguf_new_metadata.__file__]
    names = [str(made), str(target / "model.gguf")]
    subprocess.run([*script, "--general-name", "Another", "--force", *names], check=True)


# --------------------------------------------------------------- programs of llama.cpp


def llama_program(name: str) -> str:
    """A program of llama.cpp that `mtp-gguf build-server` has built."""
    from mtp_gguf.server.build import find_build

    build = find_build()
    path = build.libraries / name if build else None
    if path is None or not path.is_file():
        raise ImportError(f"{name}: mtp-gguf build-server")
    return str(path)


def _upstreams(source: Path, target: Path) -> str:
    from support.upstream.convert_upstream import convert

    target.mkdir()
    return str(convert(source, target / "model.gguf", "f32", ["--no-mtp"]))


@row("llama-gguf-split --split")
def _(source: Path, target: Path) -> None:
    program, whole = llama_program("llama-gguf-split"), _upstreams(source, target)
    words = [program, "--split", "--split-max-tensors", "10", whole, str(target / "model")]
    subprocess.run(words, check=True)
    Path(whole).unlink()


@row("llama-gguf-split --merge")
def _(source: Path, target: Path) -> None:
    """Of a model that we have split."""
    from support.commands import MAIN

    program, options = llama_program("llama-gguf-split"), ["--quant", "F32", "--no-mtp"]
    split = [*options, "--split-max-size", "1M", "-o", str(target / "part.gguf")]
    target.mkdir()
    subprocess.run([sys.executable, "-c", MAIN, "convert", str(source), *split], check=True)
    first = min(target.iterdir())
    subprocess.run([program, "--merge", str(first), str(target / "model.gguf")], check=True)
    for part in target.glob("part*"):
        part.unlink()


def _imatrix(source: Path, target: Path, form: str) -> None:
    program, whole = llama_program("llama-imatrix"), _upstreams(source, target)
    text, made = target / "text.txt", target / f"imatrix.{form}"
    text.write_text("The draft head reads the hidden state. " * 100, encoding="utf-8")
    words = [program, "-m", whole, "-f", str(text), "-o", str(made), "--output-format", form]
    subprocess.run([*words, "-c", "64", "--chunks", "3", "-t", "2"], check=True)


for _form in ("gguf", "dat"):
    row(f"llama-imatrix --output-format {_form}")(partial(_imatrix, form=_form))


# ----------------------------------------------------------------------- PEFT, mergekit


def _adapted(source: Path) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load(source), LoraConfig(r=4, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.data.copy_(noise)
    return model


@row("PEFT, merge_and_unload")
def _(source: Path, target: Path) -> None:
    save(_adapted(source).merge_and_unload(), source, target)


@row("PEFT, the adapter alone")
def _(source: Path, target: Path) -> None:
    save(_adapted(source), source, target)
    shutil.copy(source / "config.json", target)


@row("mergekit, linear")
def _(source: Path, target: Path) -> None:
    import yaml
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge

    other = target.with_name("other")
    save(_adapted(source).merge_and_unload(), source, other)
    plain = target.with_name("plain")
    save(load(source), source, plain)
    text = {
        "merge_method": "linear",
        "dtype": "bfloat16",
        "models": [
            {"model": str(plain), "parameters": {"weight": 0.5}},
            {"model": str(other), "parameters": {"weight": 0.5}},
        ],
    }
    config = MergeConfiguration.model_validate(yaml.safe_load(json.dumps(text)))
    run_merge(config, str(target), MergeOptions(copy_tokenizer=True, allow_crimes=True))
    save_tokenizer(source, target)


# --------------------------------------------------- llm-compressor, compressed-tensors


def _compressed(source: Path, target: Path, scheme: str) -> None:
    """llm-compressor's own steps, without its pipeline of datasets."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = load(source)
    ignore = ["lm_head", "re:.*in_proj_[ab]$", "re:.*conv1d"]
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=ignore)
    oneshot(model=model, recipe=recipe)
    model.save_pretrained(target, save_compressed=True)
    save_tokenizer(source, target)


for _scheme in ("FP8_DYNAMIC", "FP8_BLOCK", "W8A16", "W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16"):
    row(f"llm-compressor, {_scheme}")(partial(_compressed, scheme=_scheme))


# --------------------------------------------------------------- GPTQ, AWQ, AutoRound


@row("GPTQModel, 4 bits")
def _(source: Path, target: Path) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    model = GPTQModel.load(str(source), QuantizeConfig(bits=4, group_size=64))
    model.quantize(calibration(source), batch_size=1)
    model.save(str(target))
    save_tokenizer(source, target)


@row("AutoAWQ, 4 bits")
def _(source: Path, target: Path) -> None:
    """AutoAWQ is no longer maintained; this adds the model's class, as its users do."""
    from awq import AutoAWQForCausalLM
    from awq.models import auto, base
    from transformers import AutoTokenizer

    class Qwen35(base.BaseAWQForCausalLM):  # type: ignore[misc]
        layer_type = "Qwen3_5DecoderLayer"
        max_seq_len_key = "max_position_embeddings"

        @staticmethod
        def get_model_layers(model: Any) -> Any:
            return model.model.layers

        @staticmethod
        def get_act_for_scaling(_layer: Any) -> dict[str, Any]:
            return {"is_scalable": False}

        @staticmethod
        def move_embed(model: Any, device: str) -> None:
            model.to(device)

        @staticmethod
        def get_layers_for_scaling(*_: Any) -> list[Any]:
            return []

    auto.AWQ_CAUSAL_LM_MODEL_MAP["qwen3_5_text"] = Qwen35
    base.TRANSFORMERS_AUTO_MAPPING_DICT["qwen3_5_text"] = "AutoModelForCausalLM"
    model = AutoAWQForCausalLM.from_pretrained(str(source))
    model.quantize(
        AutoTokenizer.from_pretrained(source),
        quant_config={"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
        | {"modules_to_not_convert": ["in_proj_a", "in_proj_b"]},
        calib_data=[batch["input_ids"][0].tolist() for batch in calibration(source)],
        max_calib_seq_len=64,
        apply_clip=False,
    )
    model.save_quantized(str(target))
    save_tokenizer(source, target)


def _auto_round(source: Path, target: Path, form: str) -> None:
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    rounded = AutoRound(
        load(source),
        AutoTokenizer.from_pretrained(source),
        bits=4,
        group_size=64,
        sym=True,
        iters=0,
        disable_opt_rtn=True,
        device_map="cpu",
    )
    rounded.quantize_and_save(str(target), format=form)


for _form in ("auto_round", "auto_gptq", "auto_awq"):
    row(f"AutoRound, {_form}")(partial(_auto_round, form=_form))


# ----------------------------------------------------------------------------- ModelOpt


def _modelopt(source: Path, target: Path, preset: str) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = load(source)

    def calibrate(quantized: Any) -> None:
        for batch in calibration(source):
            quantized(**batch)

    mtq.quantize(model, getattr(mtq, preset), calibrate)
    export_hf_checkpoint(model, export_dir=str(target))
    save_tokenizer(source, target)


for _preset in ("FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG", "INT4_AWQ_CFG"):
    row(f"ModelOpt, {_preset}")(partial(_modelopt, preset=_preset))


def main() -> int:
    name, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    try:
        MAKERS[name](source, target)
    except ImportError as error:
        print(error, file=sys.stderr)
        return MISSING
    return 0


if __name__ == "__main__":
    sys.exit(main())
