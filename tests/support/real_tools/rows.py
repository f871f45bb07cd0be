"""The expected outcome for each tool's checkpoint, for the tests and for docs/tensors.md."""

from __future__ import annotations

from dataclasses import dataclass

SAME = "the bytes of llama.cpp's converter"


@dataclass(frozen=True)
class Row:
    """One way to write a checkpoint.

    tool: the package with its version. made: a row of make.py. outcome: SAME, or what the one
    sentence of the refusal names. daily: whether it runs in every test run.
    """

    tool: str
    made: str
    outcome: str = SAME
    daily: bool = False


_TRANSFORMERS = "transformers 5.23"
_COMPRESSOR = "llm-compressor 0.14, compressed-tensors 0.20"
_MODELOPT = "ModelOpt 0.47"

ROWS = (
    Row(_TRANSFORMERS, "save_pretrained"),
    Row(_TRANSFORMERS, "save_pretrained, float32, sharded"),
    Row(_TRANSFORMERS, "save_pretrained, float16"),
    Row(_TRANSFORMERS, "save_pretrained, tied embeddings"),
    Row(_TRANSFORMERS, "save_pretrained, mixture of experts"),
    Row(_TRANSFORMERS, "save_pretrained of a vision-language model", daily=True),
    Row(_TRANSFORMERS, "torch.save of a state dict"),
    Row("transformers 4.57", "Qwen2TokenizerFast.save_pretrained"),
    Row("transformers 4.57", "Qwen2Tokenizer.save_pretrained"),
    Row("PEFT 0.21", "PEFT, merge_and_unload"),
    Row("PEFT 0.21", "PEFT, the adapter alone", "a LoRA adapter"),
    Row("mergekit 0.1.5", "mergekit, linear"),
    Row(_COMPRESSOR, "llm-compressor, FP8_DYNAMIC"),
    Row(_COMPRESSOR, "llm-compressor, FP8_BLOCK"),
    Row(_COMPRESSOR, "llm-compressor, W8A16"),
    Row(_COMPRESSOR, "llm-compressor, W4A16"),
    Row(_COMPRESSOR, "llm-compressor, W4A16_ASYM"),
    Row(_COMPRESSOR, "llm-compressor, NVFP4A16"),
    Row(_COMPRESSOR, "llm-compressor, MXFP4A16", "MXFP4"),
    Row(_MODELOPT, "ModelOpt, FP8_DEFAULT_CFG"),
    Row(_MODELOPT, "ModelOpt, NVFP4_DEFAULT_CFG"),
    Row(_MODELOPT, "ModelOpt, INT4_AWQ_CFG", "w4a16_awq"),
    Row("GPTQModel 7.7", "GPTQModel, 4 bits"),
    Row("AutoAWQ 0.2.9", "AutoAWQ, 4 bits", "AWQ"),
    Row("AutoRound 0.16", "AutoRound, auto_gptq"),
    Row("AutoRound 0.16", "AutoRound, auto_awq", "AWQ"),
    Row("AutoRound 0.16", "AutoRound, auto_round", "AutoRound"),
    Row("torchao 0.18", "TorchAoConfig, int8", "torchao"),
    Row("bitsandbytes 0.50", "bitsandbytes, 4 bits", "bitsandbytes"),
    Row("bitsandbytes 0.50", "bitsandbytes, 8 bits", "bitsandbytes"),
    Row("bitsandbytes 0.50", "bitsandbytes, dequantize and save_pretrained"),
    Row("hqq 0.2.8", "HQQ, save_quantized", "HQQ"),
    Row("Optimum Quanto 0.2.7", "Quanto, int8", "Quanto"),
    Row("gguf 0.19", "gguf-new-metadata"),
    Row("llama.cpp", "llama-gguf-split --split"),
    Row("llama.cpp", "llama-gguf-split --merge"),
    Row("llama.cpp", "llama-imatrix --output-format gguf"),
    Row("llama.cpp", "llama-imatrix --output-format dat"),
)
