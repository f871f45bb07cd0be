"""What to convert instead of a checkpoint that cannot be: the ends of refusals, with commands."""

import re
from collections.abc import Mapping
from pathlib import Path

from mtp_gguf.gguf_tools.files.safetensors import FROM_ORIGINAL

_PYTHON = 'python -c "from transformers import AutoModelForCausalLM as M'
_GPTQMODEL = (
    'python -c "from gptqmodel import GPTQModel as G, QuantizeConfig as Q; '
    "m = G.load('ORIGINAL', Q(bits=4, group_size=128)); "
    "m.quantize(open('TEXTS').read().split(chr(10) * 2)); m.save('COPY')\""
)

# By `quant_method` in config.json, besides the original: None where no tool makes anything better.
# tests/real_tools makes such files with AutoRound, bitsandbytes, GPTQModel and ModelOpt; these
# commands themselves were not run.
WAYS: Mapping[str, str | None] = {
    "aqlm": None,
    "auto-round": (
        "let AutoRound write the format auto_gptq: auto-round --model ORIGINAL --scheme W4A16 "
        "--format auto_gptq --output_dir COPY"
    ),
    "awq": f"quantize that with GPTQModel: {_GPTQMODEL}",
    "bitnet": None,
    "bitsandbytes": (
        f"from a copy in 16 bits: {_PYTHON}; M.from_pretrained('FOLDER', dtype='bfloat16')"
        ".dequantize().save_pretrained('COPY')\", with the tokenizer's files beside it"
    ),
    "compressed-tensors": (
        f"from a copy in 16 bits: {_PYTHON}, CompressedTensorsConfig as C; M.from_pretrained("
        "'FOLDER', dtype='bfloat16', quantization_config=C(dequantize=True)).save_pretrained("
        "'COPY')\", with the tokenizer's files beside it, or let llm-compressor write W4A16, "
        "W8A16, FP8_DYNAMIC or NVFP4A16"
    ),
    "eetq": None,
    "fbgemm_fp8": None,
    "fp_quant": None,
    "gptq": f"let GPTQModel write 4 or 8 bits: {_GPTQMODEL}",
    "higgs": None,
    "hqq": None,
    "modelopt": "let ModelOpt write FP8_DEFAULT_CFG or NVFP4_DEFAULT_CFG",
    "mxfp4": None,
    "quanto": None,
    "quark": None,
    "spqr": None,
    "torchao": None,
    "vptq": None,
}


def original(folder: Path) -> str:
    """Return the end of a sentence: to convert the checkpoint that this one was made of."""
    if (found := _base_model(folder)) is None:
        return FROM_ORIGINAL
    named = FROM_ORIGINAL.replace("OWNER/NAME", found)
    return named.replace("checkpoint", f"checkpoint ({found}, by its model card)", 1)


def way_out(folder: Path, method: str) -> str:
    """Return the end of the refusal of a quantized checkpoint, by its `quant_method`."""
    other = WAYS.get(method)
    return original(folder) + (f", or {other}" if other else "")


def _base_model(folder: Path) -> str | None:
    import gguf  # noqa: PLC0415  (slow, and wanted only for a refusal)

    try:
        named = gguf.Metadata.load_model_card(folder).get("base_model")
    except Exception:  # the YAML reader raises its own exceptions
        return None
    named = named[0] if isinstance(named, list) and named else named
    plain = isinstance(named, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", named, re.ASCII)
    return str(named) if plain else None
