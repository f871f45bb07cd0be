"""Checkpoints saved by transformers, and their peculiarities one by one: upstream's bytes.

transformers writes every default into text_config, nulls included, drops the MTP head, and keeps in
tokenizer.json what the last call asked for. Upstream's converter reads configs and tokenizers
through transformers, so what it makes of a habit is what transformers takes it for.

All habits, of which the everyday run sees some: python -m pytest -m slow THIS_FILE
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_edits import BYTE_LEVEL, add_tokens
from support.checkpoints import SPECS, TINY, Spec, write_checkpoint
from support.commands import invoke
from support.conversions import converted
from support.upstream import compare
from support.upstream.compare import tensor_differences, without_ones
from support.upstream.convert_upstream import convert as convert_upstream
from support.upstream.describe import describe

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra"),
]

NESTED = replace(TINY, name="nested", nested=True)
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": TINY.hidden,
    "patch_size": 4,
}
END, TURN = "<|endoftext|>", "<|im_end|>"
IDS = {END: 896, TURN: 898}


def differences(model: Path, out: Path, *options: str, ignored: tuple[str, ...] = ()) -> list[str]:
    """How our BF16 file of a checkpoint differs from upstream's; options as both have them."""
    head = () if "--no-mtp" in options else ("--mtp-type", "BF16")
    converted(model, out / "ours.gguf", "--quant", "BF16", *head, *options)
    ours = describe(out / "ours.gguf")
    theirs = describe(convert_upstream(model, out / "theirs.gguf", "bf16", options))
    return compare.differences(without_ones(theirs), ours, ignored)


# ------------------------------------------------------------------------------ whole models


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = replace(TINY, name="original", state_dtype="BF16")  # as a BF16 model is saved
    return write_checkpoint(tmp_path_factory.mktemp("original") / spec.name, spec)


def _save(folder: Path, original: Path, kind: str) -> Path:
    """Save a model through transformers, as a fine-tune would, tokenizer and all."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    from transformers import models  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    text = json.loads((original / "config.json").read_text(encoding="utf-8"))
    if kind == "causal":
        model = transformers.Qwen3_5ForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    elif kind == "moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        text |= {"shared_expert_intermediate_size": 32}
        config = models.qwen3_5_moe.Qwen3_5MoeTextConfig(**text)
        model = transformers.Qwen3_5MoeForCausalLM(config).to(torch.bfloat16)
    else:
        tied = kind == "conditional-tied"
        config = transformers.Qwen3_5Config(
            text_config=text, vision_config=VISION, tie_word_embeddings=tied
        )
        model = transformers.Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(original)
    tokenizer("A tutorial's call.", padding="max_length", truncation=True, max_length=16)
    tokenizer.save_pretrained(folder)
    saved = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved["padding"] and saved["truncation"]  # noqa: PT018
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [
        "causal",
        "conditional-tied",
        pytest.param("conditional", marks=pytest.mark.slow),
        pytest.param("moe", marks=pytest.mark.slow),
    ],
)
def test_saved_models(kind: str, original: Path, tmp_path: Path) -> None:
    model = _save(tmp_path / kind, original, kind)
    assert not differences(model, tmp_path, "--no-mtp")
    result = invoke("convert", model, "-o", tmp_path / "x.gguf")
    assert "the checkpoint has no mtp.* tensor" in result.stderr  # its config claims one
    if kind == "causal":  # the same weights: its lost head is that of the original
        converted(original, tmp_path / "whole.gguf", "--quant", "BF16")
        converted(model, tmp_path / "lent.gguf", "--quant", "BF16", "--mtp-from", original)
        whole, lent = (describe(tmp_path / f"{name}.gguf") for name in ("whole", "lent"))
        assert not [*tensor_differences(whole.tensors, lent.tensors)]


@pytest.mark.filterwarnings("ignore")
def test_qwen3_next_with_its_head(tmp_path: Path) -> None:
    """A model of transformers' class with the `mtp.*` tensors that published checkpoints have."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    transformers.utils.logging.disable_progress_bar()
    spec = replace(SPECS["next-unfused"], name="source", layers=2, interval=2, state_dtype="BF16")
    original = write_checkpoint(tmp_path / "source", spec)
    model = transformers.Qwen3NextForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(original).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert not any(name.startswith("mtp.") for name in tensors)
    stored = load_file(original / "model.safetensors")
    tensors |= {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert not differences(folder, tmp_path)


# ------------------------------------------------------------------------- habits of configs

Edit = Callable[[dict[str, Any]], object]


def rope(*absent: str, **changes: Any) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        for key in absent:
            del config["rope_parameters"][key]
        config["rope_parameters"] |= changes

    return edit


def scaled(**changes: Any) -> Edit:
    older = {"type": "yarn", "factor": 2.0, "mrope_section": [2, 1, 1], **changes}
    return lambda c: c.update(rope_scaling=older, rope_parameters=None, rope_theta=7e5)


CONFIGS: dict[str, Edit] = {
    "no-rope": lambda c: c.pop("rope_parameters"),
    "yarn-attn-factor": rope(rope_type="yarn", factor=4.0, attn_factor=0.7),
    "head-of-0": lambda c: c.update(mtp_num_hidden_layers=0),
    "head-uncounted": lambda c: c.pop("mtp_num_hidden_layers"),
    "no-theta": rope("rope_theta"),
    "theta-outside": lambda c: (rope("rope_theta")(c), c.update(rope_theta=5e5)),
    "no-partial": rope("partial_rotary_factor"),
    "no-sections": rope("mrope_section"),
    "no-type": rope("rope_type"),
    "null-type": rope(rope_type=None),
    "yarn": rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024),
    "yarn-both-factors": rope(rope_type="yarn", factor=4.0, attn_factor=0.7, attention_factor=1.5),
    "yarn-betas": rope(rope_type="yarn", factor=4, beta_fast=16, beta_slow=2.0),
    "yarn-older-name": rope("rope_type", type="yarn", factor=4.0),
    "yarn-length-outside": lambda c: (
        rope(rope_type="yarn", factor=4.0)(c),
        c.update(original_max_position_embeddings=2048),
    ),
    "linear": rope(rope_type="linear", factor=4),
    "scaling": scaled(),
    "scaling-attn-factor": scaled(attn_factor=0.5, original_max_position_embeddings=512),
    "scaling-beside": lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "no-epsilon": lambda c: c.pop("rms_norm_eps"),
    "no-length": lambda c: c.pop("max_position_embeddings"),
    "null-rope-scaling": lambda c: c.update(rope_scaling=None),
    "null-quantization": lambda c: c.update(quantization_config=None),
}
EVERYDAY_CONFIGS = ("yarn-attn-factor", "head-uncounted")


def _cases(names: Any, everyday: tuple[str, ...], thorough: tuple[str, ...] = ()) -> list[Any]:
    marks: dict[str, tuple[pytest.MarkDecorator, ...]] = dict.fromkeys(names, (pytest.mark.slow,))
    marks |= dict.fromkeys(thorough, (pytest.mark.thorough,))
    marks |= dict.fromkeys(everyday, ())
    return [pytest.param(name, marks=mark, id=name) for name, mark in marks.items()]


@pytest.mark.parametrize("name", _cases(CONFIGS, EVERYDAY_CONFIGS))
@pytest.mark.parametrize(
    "spec", [TINY, pytest.param(NESTED, marks=pytest.mark.slow)], ids=lambda spec: spec.name
)
def test_habits_of_configs(spec: Spec, name: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / spec.name, spec)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    CONFIGS[name](config["text_config"] if spec.nested else config)
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert not differences(model, tmp_path)


# ---------------------------------------------------------------------- habits of tokenizers

Both = Callable[[dict[str, Any], dict[str, Any]], object]  # tokenizer.json, tokenizer_config.json


def added(*texts: str, **flags: bool) -> Both:
    return lambda tokenizer, _: add_tokens(tokenizer, *texts, **flags)


def processed(*steps: Any, **settings: Any) -> Both:
    """The post-processor, of one step or several, and settings; `...` takes one out."""

    def edit(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
        several = {"type": "Sequence", "processors": [*steps]}
        tokenizer["post_processor"] = steps[0] if len(steps) == 1 else several
        config |= settings
        for key in [key for key, value in config.items() if value is ...]:
            del config[key]

    return edit


def template(first: str | None = None, last: str | None = None) -> dict[str, Any]:
    def around(*texts: str) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = [{"Sequence": {"id": text, "type_id": 0}} for text in texts]
        start = [{"SpecialToken": {"id": first, "type_id": 0}}] if first else []
        end = [{"SpecialToken": {"id": last, "type_id": 0}}] if last else []
        return start + pieces + end

    texts = [text for text in (first, last) if text]
    known = {text: {"id": text, "ids": [IDS[text]], "tokens": [text]} for text in texts}
    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A", "B"),
        "special_tokens": known,
    }


ROBERTA = {
    "type": "RobertaProcessing",
    "sep": [TURN, 898],
    "cls": [END, 896],
    "trim_offsets": True,
    "add_prefix_space": False,
}
NORMALIZERS = [{"type": "NFC"}, {"type": "Lowercase"}]
TOKENIZERS: dict[str, Both] = {
    "looks-special": added("<pad>", "<mask>", "<2mass>", "[@BOS@]", "<unused7>", "<｜x｜>", "<|y>"),
    "sentencepiece": added("a▁b", "▁", "<|g▁h|>"),
    "first": processed(template(END), add_bos_token=...),
    "symbols": added("é", "Ġx", " x ", "\n", "e\u0301", "日本"),
    "normalized": added("e▁f", "naïve", normalized=True),
    "special": added("c▁d", "ñ ", special=True),
    "words": added("<w>", "w w", single_word=True, lstrip=True, rstrip=True),
    "overlapping": added("<ab", "<ab>c", "b>", "<|im_end|>x", "the"),
    "no-step": processed(),
    "no-step-adds": processed(add_bos_token=True, bos_token=END, add_eos_token=True),
    "adds-sep": processed(add_sep_token=True, add_bos_token=...),
    "bytes-win": processed(BYTE_LEVEL, add_bos_token=True, bos_token=END, add_eos_token=True),
    "first-known": processed(template(END), bos_token=END, add_bos_token=False),
    "first-other": processed(template(END), bos_token=TURN),
    "first-cls": processed(template(END), bos_token=TURN, cls_token=END),
    "both": processed(template(END, TURN), bos_token=END, add_bos_token=..., add_eos_token=...),
    "last": processed(template(None, TURN), add_eos_token=False),
    "last-other": processed(template(None, END)),
    "bytes-first": processed(BYTE_LEVEL, template(END), bos_token=END),
    "first-bytes": processed(template(END), BYTE_LEVEL, bos_token=END, add_bos_token=False),
    "roberta": processed(ROBERTA, add_bos_token=...),
    "cls-sep": processed(BYTE_LEVEL, cls_token=END, sep_token=TURN, eos_token=..., pad_token=...),
    "object": processed(BYTE_LEVEL, bos_token={"__type": "AddedToken", "content": END}),
    "unknown-mask": processed(BYTE_LEVEL, unk_token=END, mask_token="<|box_start|>"),
    "eos-of-words": processed(BYTE_LEVEL, eos_token="the"),
    "eos-new": processed(BYTE_LEVEL, eos_token="<|new|>"),
    "extra-named": processed(BYTE_LEVEL, extra_special_tokens={"call_token": "<tool_call>"}),
    "extra": processed(BYTE_LEVEL, additional_special_tokens=["<tool_call>", "<brandnew>"]),
    "templates": processed(
        BYTE_LEVEL,
        chat_template=[{"name": "default", "template": "{{x}}"}, {"name": "a b", "template": "y"}],
    ),
    "null-template": processed(BYTE_LEVEL, chat_template=None),
    "lowercase": lambda t, _: t.update(normalizer={"type": "Sequence", "normalizers": NORMALIZERS}),
    "strip-accents": lambda t, _: t.update(normalizer={"type": "StripAccents"}),
    "no-normalizer": lambda t, _: t.update(normalizer=None),
    "older-merges": lambda t, _: t["model"].update(
        merges=[" ".join(pair) for pair in t["model"]["merges"]]
    ),
    "dropout": lambda t, _: t["model"].update(dropout=0.9),
    "qwen2": processed(BYTE_LEVEL, tokenizer_class="Qwen2Tokenizer"),
    "fast": processed(BYTE_LEVEL, tokenizer_class="PreTrainedTokenizerFast"),
}
EVERYDAY_TOKENIZERS = ("first", "looks-special")
THOROUGH_TOKENIZERS = (
    *("sentencepiece", "special", "no-step", "no-step-adds", "bytes-win", "first-known"),
    *("bytes-first", "first-bytes", "last", "last-other"),
)


@pytest.mark.parametrize("name", _cases(TOKENIZERS, EVERYDAY_TOKENIZERS, THOROUGH_TOKENIZERS))
def test_habits_of_tokenizers(name: str, original: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny", TINY)
    paths = [model / file for file in ("tokenizer.json", "tokenizer_config.json")]
    tokenizer, config = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    TOKENIZERS[name](tokenizer, config)
    if "chat_template" in config:  # upstream prefers it to the file, transformers does not
        (model / "chat_template.jinja").unlink()
    for path, value in zip(paths, (tokenizer, config), strict=True):
        path.write_text(json.dumps(value), encoding="utf-8")
    assert not differences(model, tmp_path)


def test_vocabulary_and_merges(tmp_path: Path) -> None:
    """transformers reads the pair as Qwen2Tokenizer; its Qwen3_5Tokenizer loses the vocabulary."""
    from tokenizers import Tokenizer  # noqa: PLC0415

    model = write_checkpoint(tmp_path / "tiny", TINY)
    Tokenizer.from_file(str(model / "tokenizer.json")).model.save(str(model))
    (model / "tokenizer.json").unlink()
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "tokenizer_class": "Qwen2Tokenizer"}), encoding="utf-8")
    assert not differences(model, tmp_path)
