"""Write the trained demo model as ordinary Hugging Face files, and check that they read back.

python ship.py --run runs/demo --out ../../gguf_tools/demo_model
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
import vocabulary
from model import ROPE, SHAPE, DemoModel, make_config
from polish import stays_f32
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from train import FILES

LICENSE = """\
The weights and the tokenizer in this folder were made by benchmarks/demo_model of this project
from the source files of the Python 3.11 standard library, Copyright (c) 2001 Python Software
Foundation, which is under the PSF License Agreement (https://docs.python.org/3.11/license.html).
The model may repeat pieces of that text; for those the PSF licence applies. Everything else here
is under the licence of this project (see LICENSE at its root).
"""
SAMPLE = (
    "def read(path):\n    with open(path) as file:\n        return file.read() # naïve 'café' 42\n"
)


def config_fields(model: DemoModel, turn: int) -> dict[str, object]:
    """config.json in the family's fashion; `turn` is the id that ends a turn."""
    config, family = model.trunk.config, model.family
    return {
        "architectures": [family.model.__name__],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": turn,
        "full_attention_interval": 4,
        **SHAPE,
        "hidden_act": "silu",
        "initializer_range": config.initializer_range,
        "layer_types": config.layer_types,
        "mlp_only_layers": [],
        "model_type": config.model_type,
        "pad_token_id": config.pad_token_id,
        "partial_rotary_factor": ROPE["partial_rotary_factor"],
        "rope_parameters": {**ROPE, **family.rope},
        "transformers_version": transformers.__version__,
        "use_cache": True,
        "vocab_size": config.vocab_size,
        **family.shape,
        **family.stored,
    }


def tensors(model: DemoModel) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint under the family's name; the tied output matrix once."""
    found = {}
    for own_name, value in model.state_dict().items():
        name = own_name.removeprefix("trunk.")
        if name != "lm_head.weight":
            found[name] = value.float() if stays_f32(name) else value.bfloat16()
    return {name: value.contiguous() for name, value in sorted(found.items())}


def check(model: DemoModel, folder: Path) -> float:
    """Load the files as a user does; returns the largest difference of a logit, in nats."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(SAMPLE, return_tensors="pt").input_ids
    if tokenizer.decode(ids[0]) != SAMPLE:
        raise ValueError(f"tokenizer: expected {SAMPLE!r}, got {tokenizer.decode(ids[0])!r}")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    if chat != "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n":
        raise ValueError(f"chat template: got {chat!r}")
    read: Any = model.family.model.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    loaded, report = read
    if report["missing_keys"] or report["unexpected_keys"]:
        raise ValueError(f"model.safetensors: {report}")
    with torch.no_grad():
        return float((loaded(ids).logits - model.trunk(ids).logits).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.run / "tokenizer.json"))
    end, turn = vocabulary.ends(tokenizer)
    family = torch.load(args.run / "checkpoint.pt", weights_only=True)["family"]
    config = make_config(family, tokenizer.get_vocab_size(), pad=end, eos=[turn, end])
    model = DemoModel(family, config).eval()
    model.load_state_dict(torch.load(args.run / "model.pt", weights_only=True))

    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(args.run / name, args.out / name)
    save_file(tensors(model), args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "model.safetensors").chmod(0o644)
    generation = {
        "do_sample": True,
        "eos_token_id": [turn, end],
        "pad_token_id": end,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
    }
    for name, fields in (
        ("config.json", config_fields(model, turn)),
        ("generation_config.json", generation),
    ):
        (args.out / name).write_text(json.dumps(fields, indent=2) + "\n")
    if not (args.run / FILES).exists():
        (args.out / "LICENSE").write_text(LICENSE)
    print(f"largest difference of a logit after reading back: {check(model, args.out):.2e}")
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{size / 1e6:.2f} MB in {args.out}")


if __name__ == "__main__":
    main()
