"""Bad input to `mtp-gguf convert`: one clear sentence, the right exit code, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from support.checkpoint_edits import (
    add_mtp_layer,
    edit_header,
    edit_json,
    edit_tensors,
    read_tensors,
    write_repeating,
)
from support.checkpoints import SMALL, TINY, Array, Spec, write_safetensors
from support.commands import check_refusal, held, invoke, spawn
from support.conversions import converted, refuse, refused
from support.gguf_files import differing, tensors_of, value_of
from support.models import Models
from support.upstream.imatrix import write_imatrix

BARE = replace(TINY, name="bare", mtp=False)
SHARDED = replace(TINY, name="sharded", shards=3)
NESTED = replace(TINY, name="nested", nested=True)
MIXTURE = replace(TINY, name="moe", experts=4)
FP8 = replace(TINY, name="fp8", hidden=256, fp8=True)
LARGE = Spec("large", hidden=1024, intermediate=3584)  # 140 MB, some seconds for one thread
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"
NORM, PROJECTION = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
SCALES, DECAY = f"{PROJECTION}_scale_inv", "model.layers.0.linear_attn.A_log"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that keeps a thread busy for some seconds."""
    return write_repeating(tmp_path_factory.mktemp("large") / "large", LARGE)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output folder that already contains a file."""
    folder = tmp_path / "output"
    folder.mkdir()
    (folder / "other.txt").write_text("mine")
    return folder


def test_the_tiny_checkpoint_converts_when_nothing_is_broken(broken: Path, output: Path) -> None:
    converted(broken, output / "out.gguf", "--quant", "F16")
    assert sorted(held(output)) == ["other.txt", "out.gguf"]


# What becomes of a checkpoint's folder, and what the refusal says; … stands for other words.
Edit = Callable[[Path], object]
Faults = dict[str, tuple[Edit, str]]


def check_said(said: str, message: str) -> None:
    assert re.search(".*".join(map(re.escape, said.split(" … "))), message), message


def both(*edits: Edit) -> Edit:
    return lambda model: [edit(model) for edit in edits]


def removed(*names: str) -> Edit:
    def edit(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return edit


def written(name: str, text: str) -> Edit:
    return lambda model: (model / name).write_text(text, encoding="latin-1")


def in_json(name: str, inside: str = "", **keys: Any) -> Edit:
    """Set keys of a JSON file, or of an object inside."""
    return lambda model: edit_json(
        model / name, lambda content: (content[inside] if inside else content).update(keys)
    )


def config(**keys: Any) -> Edit:
    return in_json(CONFIG, **keys)


def in_index(tensor: str, file: object) -> Edit:
    """Let the index say that a tensor is in `file`."""
    return in_json(INDEX, "weight_map", **{tensor: file})


def tensors(edit: Callable[[dict[str, Array]], object]) -> Edit:
    return lambda model: edit_tensors(model, edit)


def stored(name: str, change: Callable[[Array], Array]) -> Edit:
    """Store what becomes of a tensor."""
    return tensors(lambda found: found.update({name: change(found[name].copy())}))


def added(name: str, array: Array) -> Edit:
    return tensors(lambda found: found.update({name: array}))


def with_value(place: int, value: float) -> Callable[[Array], Array]:
    def change(array: Array) -> Array:
        array.reshape(-1)[place] = value
        return array

    return change


def without(*prefixes: str) -> Edit:
    def edit(found: dict[str, Array]) -> None:
        for name in [n for n in found if n.startswith(prefixes)]:
            del found[name]

    return tensors(edit)


def header(**fields: object) -> Edit:
    """Change what the header of the weights says of a norm."""
    return lambda model: edit_header(model / WEIGHTS, lambda h: h[NORM].update(fields))


def wrong(*rows: tuple[str, Iterable[object], str]) -> Faults:
    """Keys of a config with values that they cannot have; KEY and VALUE stand for them in messages.

    A key may be inside an object, or in another file: FILE:OBJECT.KEY.
    """
    faults: Faults = {}
    for keys, values, said in rows:
        for path in keys.split():
            name, _, place = path.rpartition(":")
            inside, _, key = place.rpartition(".")
            for value in values:
                message = said.replace("KEY", key).replace("VALUE", repr(value))
                edit = in_json(name or CONFIG, inside, **{key: value})
                faults[f"{path} {str(value)[:40]} {len(faults)}"] = edit, message
    return faults


def share_a_tensor(model: Path) -> None:
    """Two shards with one tensor, and no index to say which counts."""
    (model / INDEX).unlink()
    first, second = (read_tensors(path) for path in sorted(model.glob("*.safetensors"))[:2])
    write_safetensors(model / SECOND, second | {"lm_head.weight": first["lm_head.weight"]})


def make_a_folder_of_the_weights(model: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).mkdir()


def enlarge_the_header(model: Path) -> None:
    data = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(struct.pack("<Q", 100_000_001) + data[8:])


def replace_the_split(tokenizer: dict[str, Any]) -> None:
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+"


FILES: Faults = {
    "no config": (removed(CONFIG), "config.json … found none"),
    **{
        f"config of {text[:9]}": (written(CONFIG, text), "config.json … expected")
        for text in ("", "{", "[1]", "\xff", '{"a": NaN}', "[" * 100_000)
    },
    "no weights": (removed(WEIGHTS), "expected model.safetensors … found none"),
    "PyTorch's weights": (
        both(removed(WEIGHTS), written("pytorch_model.bin", "")),
        "pytorch_model.bin … a ZIP archive … rewrite it … torch.load",
    ),
    "empty weights": (written(WEIGHTS, ""), "header length … found a file of 0"),
    "a folder": (make_a_folder_of_the_weights, "model.safetensors … folder"),
    # Only that the converter ends well; gguf_tools/test_safetensors.py breaks each field.
    "header's length": (enlarge_the_header, "model.safetensors … header length … 100000001"),
    "overlap": (header(data_offsets=[0, 128]), "model.safetensors … overlap"),
    "shape": (header(shape=[64, 1]), "model.safetensors … model.norm.weight … [64] … [64, 1]"),
    "dtype": (header(dtype="I16"), "model.safetensors … model.norm.weight … dtype … I16"),
}
SHARDS: Faults = {
    "no shard": (removed(SECOND), f"{INDEX} … {SECOND} … finish the download"),
    "no shard and no index": (removed(SECOND, INDEX), f"expected 3 shards … {SECOND}"),
    "one in two shards": (
        share_a_tensor,
        f"lm_head.weight … is in both model-00001-of-00003.safetensors … {SECOND}",
    ),
    **{
        f"index with {file}": (
            in_index(NORM, file),
            f"{INDEX} … {NORM} … a file name inside the folder … {file!r}",
        )
        for file in (
            *("../x.safetensors", "/etc/passwd", "a/b.safetensors", "a\\b", "x\0", "..", "."),
            *("", 3, None),
        )
    },
    "index with an absent file": (
        in_index(NORM, "model-00009.safetensors"),
        f"{INDEX} … files that are missing: model-00009.safetensors;",
    ),
    "index with an absent tensor": (
        in_index("model.extra.weight", "model-00001-of-00003.safetensors"),
        "model.extra.weight … found nowhere",
    ),
    "index without a tensor": (
        lambda model: edit_json(model / INDEX, lambda index: index["weight_map"].pop(NORM)),
        f"{NORM} … is not in {INDEX}",
    ),
    **wrong((f"{INDEX}:weight_map", (None, [], "x", {}), f"{INDEX} … KEY")),
}
TENSORS: Faults = {
    "another": (
        added("model.layers.0.mlp.bias", np.zeros((2, 2), np.float32)),
        "1 tensors … 'model.layers.0.mlp.bias' … not supported",
    ),
    "missing": (without(PROJECTION), f"{PROJECTION} … [64, 96] … no such tensor"),
    "transposed": (stored(PROJECTION, lambda a: a.T.copy()), f"{PROJECTION} … [64, 96] … [96, 64]"),
    "twice": (
        tensors(lambda t: t.update({"model.language_model.norm.weight": t[NORM]})),
        "model.language_model.norm.weight … the same tensor",
    ),
    "no output": (without("lm_head"), "tie_word_embeddings is false … lm_head.weight"),
    # The decay is -exp(A_log); NumPy warns of an overflow, which the sentence reports.
    "decay in F32": (
        stored(DECAY, lambda a: np.full_like(a, 1000, np.float32)),
        f"{DECAY} … NaN or infinity",
    ),
    "decay in F16": (
        stored(DECAY, lambda a: np.full_like(a, 20, np.float16)),
        f"{DECAY} … NaN or infinity",
    ),
    "no layers of the head": (
        both(config(mtp_num_hidden_layers=0), without("mtp.layers.")),
        "incomplete … mtp.layers.* … --no-mtp … --from",
    ),
    "no norm of the head": (
        without("mtp.layers.0.self_attn.q_norm"),
        "mtp.layers.0.self_attn.q_norm.weight … [32] … no such tensor",
    ),
}
WHOLE = "KEY … expected a whole number from"
FOUND, ROPE = f"{WHOLE} … found VALUE", "rope_parameters"
SIZES = "intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
DEFAULTS = "linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"
COUNTS = f"{DEFAULTS} max_position_embeddings mtp_num_hidden_layers"
LINEAR, FULL = "linear_attention", "full_attention"
HUGE: tuple[object, ...] = (1e400, "warm", 10**400, [], 1e39)
UNKNOWN: list[object] = [None, [], "Qwen3_5ForCausalLM", ["LlamaForCausalLM"], [["x"]], [{}], {}]
CONFIGS = wrong(
    ("hidden_size", ("64", 64.5, True, 0, -1, 1 << 40, [64], None), f"{WHOLE} 1 … found VALUE"),
    (SIZES, ("64", 0, 1 << 40, None), f"{WHOLE} 1 … found VALUE"),
    ("head_dim linear_num_key_heads", ("1", 1.5, True, -1, 1 << 40, [1]), FOUND),
    (COUNTS, ("1", -1, 1 << 40), FOUND),
    # These take no memory.
    ("hidden_size vocab_size linear_num_value_heads", (1 << 30,), "expected shape … by the config"),
    # More layers than llama.cpp knows.
    ("num_hidden_layers", (513, 1 << 30), "KEY … at most 512 … VALUE"),
    ("layer_types", ([LINEAR],), "2 entries … found 1"),
    ("layer_types", ([LINEAR] * 3,), "2 entries … found 3"),
    ("layer_types", ([LINEAR, "sliding_attention"],), "sliding_attention"),
    ("layer_types", ([LINEAR, None],), "None"),
    ("layer_types", ([LINEAR, [FULL]],), "['full_attention']"),
    ("layer_types", (LINEAR, {}), "2 entries … VALUE"),
    ("layer_types", ([FULL, LINEAR],), "self_attn … no such tensor"),
    ("linear_num_key_heads", (4,), "linear_num_value_heads … a multiple of KEY (4) … found 2"),
    (
        f"{ROPE}.rope_theta {ROPE}.partial_rotary_factor",
        ("x", True, [], 1e400, float("nan"), -1.0, 10**400),
        "config.json … KEY … expected",
    ),
    (f"{ROPE}.partial_rotary_factor", (1.5, 100), "config.json … KEY … from 0 to 1 … VALUE"),
    ("rms_norm_eps", ("x", -1e-6, 1e400, 1e39), "config.json … KEY … expected"),
    (
        f"{ROPE}.mrope_section",
        ("x", [1, 2, 3, 4, 5], [1.5], [-1], [1 << 40], 3, [True]),
        "config.json … KEY … expected",
    ),
    (ROPE, ([1],), "config.json … KEY … expected"),
    (ROPE, ({"rope_type": "dynamic", "factor": 2},), "config.json … rope_type … expected"),
    (ROPE, ({"rope_type": ["yarn"], "factor": 2},), "config.json … rope_type … expected"),
    (
        ROPE,
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": -5},),
        "config.json … original_max_position_embeddings … expected",
    ),
    (ROPE, ({"rope_type": "linear", "factor": "2"},), "config.json … factor … expected"),
    (ROPE, ({"rope_type": "linear", "factor": -2},), "config.json … factor … expected"),
    ("tie_word_embeddings", ("no", 0, []), "KEY … true or false … found VALUE"),
    ("text_config", (3, "x", [1]), "KEY … an object … VALUE"),
    ("quantization_config", ("gptq", [], 4), "KEY … expected … VALUE"),
    *(
        (f"{file}:eos_token_id", values, f"{file} … KEY … 0 to 1023 … found {found}")
        for file in (CONFIG, GENERATION)
        for values, found in (((1024, -1, 1 << 40, "x", True), "VALUE"), (([1024],), "1024"))
    ),
    (f"{GENERATION}:temperature", HUGE, f"{GENERATION} … temp … expected"),
    (f"{GENERATION}:top_k", HUGE, f"{GENERATION} … KEY … expected"),
    (f"{GENERATION}:repetition_penalty", HUGE, f"{GENERATION} … penalty_repeat … expected"),
) | {
    f"architectures {found}": (
        config(architectures=found, model_type="llama"),
        "config.json … architectures: expected … found",
    )
    for found in UNKNOWN
}
MIXTURES = wrong(
    ("num_experts_per_tok", (0, 5, "2", None), "KEY … found VALUE"),
    ("num_experts", (0, -4, "x", 1 << 40), "KEY … found VALUE"),
)
MANY_EXPERTS = wrong(("num_experts", ((1 << 31) - 1,), "expected shape … VALUE"))
SIZES_OF_BLOCKS = (128, [128], [128, 0], [128.0, 128], [True, 128])
QUANTIZED = {
    **wrong(
        (
            "quantization_config.weight_block_size",
            SIZES_OF_BLOCKS,
            "KEY … [rows, columns] … VALUE",
        )
    ),
    "no config": (
        lambda model: edit_json(model / CONFIG, lambda c: c.pop("quantization_config")),
        "without a quantization_config … F8_E4M3",
    ),
    "no scales": (without(SCALES), f"{SCALES} … found none"),
    **{
        f"scales of {list(shape)}": (
            added(SCALES, np.ones(shape, np.float32)),
            f"{SCALES} … [2, 1] … {list(shape)}",
        )
        for shape in ((2, 2), (1,), ())
    },
    "scales in 8 bits": (
        added(SCALES, np.ones((2, 1), ml_dtypes.float8_e4m3fn)),
        f"{SCALES} … F32, F16 or BF16 … F8_E4M3",
    ),
    "scales alone": (added(f"{NORM}_scale_inv", np.ones((1, 1), np.float32)), f"{NORM}_scale_inv"),
    "infinite scales": (
        added(SCALES, np.array([[1], [np.nan]], np.float32)),
        f"{PROJECTION} … NaN or infinity",
    ),
}
AFFIXES = f"{TOKENIZER}:model.continuing_subword_prefix {TOKENIZER}:model.end_of_word_suffix"
NO_SPLIT = "no regular expression … --tokenizer-pre NAME"
TOKENIZERS = {
    "none": (removed(TOKENIZER), "tokenizer.json … found none"),
    **{
        f"of {text}": (written(TOKENIZER, text), "tokenizer.json … expected")
        for text in ("", "{", "{}", "[]", '{"model": 3}')
    },
    **wrong(
        (f"{TOKENIZER}:model.merges", ([["no", "such"]],), "tokenizer.json … expected a tokenizer"),
        (AFFIXES, ("##",), "tokenizer.json: model.KEY: expected none, found VALUE"),
        (f"{TOKENIZER}:pre_tokenizer", (None,), f"KEY … {NO_SPLIT}"),
    ),
    "split": (
        lambda model: edit_json(model / TOKENIZER, replace_the_split),
        r"pre_tokenizer … \s+ … --tokenizer-pre NAME",
    ),
    **{
        f"{file} of {text!r}": (written(file, text), file)
        for file in (SETTINGS, GENERATION)
        for text in ("{", "[]", "3", "\xff")
    },
}
# Of checkpoints that are wrong from the start, and others.
OTHERS: dict[str, tuple[Spec, Edit, str]] = {
    "heads": (
        *(replace(TINY, name="heads", heads=3, kv_heads=2), both()),
        "num_attention_heads … a multiple of num_key_value_heads (2) … found 3",
    ),
    "ids": (
        *(replace(TINY, name="short", vocab_size=900), both()),
        "tokenizer.json … below vocab_size (900) … found 921",
    ),
    "a special token without an id": (
        *(replace(TINY, name="full", vocab_size=922), in_json(SETTINGS, eos_token="<|nope|>")),
        "tokenizer_config.json: … expected tokens of tokenizer.json … '<|nope|>' … "
        "vocab_size (922)",
    ),
    "end of text": (
        *(NESTED, in_json(CONFIG, "text_config", eos_token_id=1024)),
        "eos_token_id … found 1024",
    ),
}
CASES = [
    *(
        pytest.param(spec, *fault, id=f"{part}-{name}".encode("unicode_escape").decode())
        for part, spec, faults in (
            *(("files", TINY, FILES), ("shards", SHARDED, SHARDS), ("tensors", TINY, TENSORS)),
            *(("config", TINY, CONFIGS), ("moe", MIXTURE, MIXTURES), ("fp8", FP8, QUANTIZED)),
            ("huge", replace(MIXTURE, fused_experts=False), MANY_EXPERTS),
            ("huge-fused", replace(MIXTURE, fused_mtp_experts=True), MANY_EXPERTS),
            ("tokenizer", TINY, TOKENIZERS),
        )
        for name, fault in faults.items()
    ),
    *(pytest.param(*row, id=name) for name, row in OTHERS.items()),
]


@pytest.mark.parametrize(("spec", "edit", "said"), CASES)
def test_a_broken_checkpoint(
    spec: Spec, edit: Edit, said: str, models: Models, tmp_path: Path, output: Path
) -> None:
    model = models.copy(spec, tmp_path)
    edit(model)
    check_said(said, refuse(model, output))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quant", ["F16", "BF16", "F32", "Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("name", [PROJECTION, NORM])
def test_weights_that_are_not_finite(
    name: str, quant: str, value: float, models: Models, tmp_path: Path, output: Path
) -> None:
    model = models.copy(SMALL, tmp_path)
    stored(name, with_value(77, value))(model)
    arguments = [model, "-o", output / "out.gguf", "--quant", quant]
    refused(arguments, name, "NaN or infinity", output=output)


def test_weights_too_large_for_f16(broken: Path, output: Path) -> None:
    stored(PROJECTION, with_value(0, 1e5))(broken)
    refuse(broken, output, PROJECTION, "F16")
    converted(broken, output / "out.gguf", "--quant", "BF16", "--mtp-type", "BF16")


@pytest.mark.parametrize("options", [(), ("--tokenizer-pre", "qwen35")])
def test_a_tokenizer_that_is_not_bpe(options: tuple[str, ...], broken: Path, output: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    in_json(TOKENIZER, model=model, added_tokens=[])(broken)
    words = "tokenizer.json", "model.type", "expected BPE", "'WordLevel'"
    refuse(broken, output, *words, options=options)


def test_a_split_that_is_named(broken: Path, output: Path) -> None:
    edit_json(broken / TOKENIZER, replace_the_split)
    converted(broken, output / "out.gguf", "--quant", "F16", "--tokenizer-pre", "qwen2")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "nowhere … folder with config.json"),
        (f"sharded/{SECOND}", "expected a checkpoint folder with config.json, found a file"),
        ("x" * 300, "too long"),
    ],
)
def test_no_folder(name: str, said: str, models: Models, tmp_path: Path, output: Path) -> None:
    models.copy(SHARDED, tmp_path)
    check_said(said, refuse(tmp_path / name, output))


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_truncated_shard(cut: int, models: Models, tmp_path: Path, output: Path) -> None:
    model = models.copy(SHARDED, tmp_path)
    os.truncate(model / SECOND, size := (model / SECOND).stat().st_size - cut)
    refuse(model, output, SECOND, f"{size + cut} bytes", f"{size} bytes", "truncated")


def test_an_index_that_names_another_shard(models: Models, tmp_path: Path, output: Path) -> None:
    model = models.copy(SHARDED, tmp_path)
    index = json.loads((model / INDEX).read_text())["weight_map"]
    other = next(file for file in index.values() if file != index[NORM])
    in_index(NORM, other)(model)
    refuse(model, output, INDEX, NORM, f"expected in {other}", f"found in {index[NORM]}")


class TestHead:
    def test_claimed_by_the_config_but_absent(self, broken: Path, output: Path) -> None:
        without("mtp.")(broken)
        words = "mtp_num_hidden_layers is 1", "no mtp.* tensor", "first missing: mtp.fc.weight"
        ways_out = "--no-mtp", "--from", "download a checkpoint that still has it"
        refuse(broken, output, *words, *ways_out)
        converted(broken, output / "out.gguf", "--quant", "F16", "--no-mtp")

    @pytest.mark.parametrize("change", [{"set": 0}, {"set": None}, {}], ids=str)
    def test_present_but_not_in_the_config(
        self, change: dict[str, Any], broken: Path, output: Path
    ) -> None:
        """Layers are counted if the config lacks the number, as users cannot edit it on the hub."""
        whole = converted(broken, output / "whole.gguf", "--quant", "F16")

        def edit(config: dict[str, Any]) -> None:
            del config["mtp_num_hidden_layers"]
            if change:
                config["mtp_num_hidden_layers"] = change["set"]

        edit_json(broken / CONFIG, edit)
        assert not differing(whole, converted(broken, output / "out.gguf", "--quant", "F16"))
        assert value_of(output / "out.gguf", "qwen35.nextn_predict_layers") == 1
        converted(broken, output / "bare.gguf", "--quant", "F16", "--no-mtp")

    @pytest.mark.parametrize("there", [True, False], ids=["two", "only claimed"])
    def test_of_several_layers_the_first_is_kept(
        self, there: bool, models: Models, broken: Path, output: Path
    ) -> None:
        """llama.cpp drafts with one; a file with more does not load."""
        one = converted(models.checkpoint(TINY), output / "one.gguf", "--quant", "F16")
        add_mtp_layer(broken, with_tensors=there)
        assert not differing(one, converted(broken, output / "two.gguf", "--quant", "F16"))
        assert value_of(output / "two.gguf", "qwen35.nextn_predict_layers") == 1
        note = "11 source tensors skipped: MTP layers after the first; llama.cpp drafts with one"
        assert (note in invoke("convert", broken, "--dry-run").output) == there
        bare = models.checkpoint(BARE)
        lent = converted(bare, output / "lent.gguf", "--quant", "F16", "--from", broken)
        assert not differing(one, lent)

    @pytest.mark.parametrize("count", [0, None, 1])
    def test_of_a_donor_that_does_not_count_it(
        self, count: int | None, models: Models, broken: Path, output: Path
    ) -> None:
        """The donor's tensors count, whatever either config says."""
        config(mtp_num_hidden_layers=count)(broken)
        options = "--quant", "F16", "--from", broken
        converted(models.checkpoint(BARE), output / "out.gguf", *options)
        assert value_of(output / "out.gguf", "qwen35.nextn_predict_layers") == 1

    def test_half_of_a_donor(self, models: Models, broken: Path, output: Path) -> None:
        """The error names the donor, not the model that takes its head."""
        model, options = models.checkpoint(BARE), ("--from", broken)
        for edit, said in (
            (without("mtp.layers.0.mlp"), f"{broken} … mtp.layers.0.mlp … no such tensor"),
            (TENSORS["no layers of the head"][0], f"{broken} … incomplete"),
        ):
            edit(broken)
            message = refuse(model, output, options=options)
            check_said(said, message)
            assert str(model) not in message

    @pytest.mark.parametrize(
        ("spec", "options", "said"),
        [
            (BARE, ("--head-only",), "--head-only … mtp.* … --from"),
            (BARE, ("--fastmtp",), "--fastmtp … MTP head"),
            (TINY, ("--mtp-from", BARE), "DONOR: --from … mtp.*"),
            (
                *(TINY, ("--from", replace(TINY, name="wide", hidden=96))),
                "DONOR … mtp.fc.weight … [64, 128] … [96, 192]",
            ),
            (MIXTURE, ("--from", TINY), "mtp.layers.0.mlp"),
        ],
        ids=["alone", "drafts", "of none", "width", "dense"],
    )
    def test_that_is_none_or_does_not_fit(
        self, spec: Spec, options: tuple[str | Spec, ...], said: str, models: Models, output: Path
    ) -> None:
        words = [models.checkpoint(o) if isinstance(o, Spec) else o for o in options]
        message = refuse(models.checkpoint(spec), output, options=tuple(words))
        check_said(said.replace("DONOR", str(words[-1])), message)

    @pytest.mark.parametrize("found", [3, [1], "x"])
    def test_of_a_donor_with_a_broken_config(
        self, found: object, models: Models, broken: Path, output: Path
    ) -> None:
        config(text_config=found)(broken)
        options = ("--from", broken)
        refuse(models.checkpoint(TINY), output, "text_config", "an object", options=options)


class TestImatrix:
    def test_that_is_a_model(self, models: Models, tmp_path: Path, output: Path) -> None:
        model = models.checkpoint(TINY)
        converted(model, tmp_path / "model.gguf", "--quant", "F16")
        options = ("--imatrix", tmp_path / "model.gguf")
        refuse(model, output, "model.gguf", "expected 'imatrix'", "'model'", options=options)

    def test_that_is_missing_or_no_gguf(self, models: Models, tmp_path: Path, output: Path) -> None:
        path = tmp_path / "imatrix.dat"
        model, options = models.checkpoint(TINY), ("--imatrix", path)
        refuse(model, output, "imatrix.dat", "cannot be opened", options=options)
        for data, words in ((bytes(100), "found no entries"), (b"ZIPs" * 9, "GGUF or an older")):
            path.write_bytes(data)
            refuse(model, output, str(path), words, options=options)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            *(
                ((quant,), f"--quant {quant} … an imatrix")
                for quant in ("IQ2_XXS", "IQ2_XS", "IQ1_S")
            ),
            *(((q, "--tensor-type", "ffn_down=IQ2_XXS"), "an imatrix") for q in ("F16", "Q4_K_M")),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
    )
    def test_needed_but_absent(
        self, options: tuple[str, ...], said: str, models: Models, output: Path
    ) -> None:
        arguments = [models.checkpoint(SMALL), "-o", output / "x.gguf", "--quant", *options]
        check_said(f"{said} … --imatrix", refused(arguments, output=output))


SHORT = ("memory: expected more", "ulimit -v")


def short_memory(kilobytes: int, modules: str) -> str:
    """Code that limits the memory of a process to what it uses and so much more."""
    return f"""
import resource, {modules}
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {kilobytes * 1000}, -1))
"""


def check_refused_process(*arguments: object, words: tuple[str, ...], **options: Any) -> None:
    with spawn(*arguments, **options) as process:
        _, stderr = process.communicate(timeout=60)
    check_refusal(process.returncode, stderr, *words)


class TestOutput:
    def test_exists(self, models: Models, output: Path) -> None:
        model = models.checkpoint(TINY)
        (output / "out.gguf").write_text("precious")
        refuse(model, output, "out.gguf", "exists", "--overwrite", "another name")
        converted(model, output / "out.gguf", "--quant", "F16", "--overwrite")
        assert len(held(output)) == 2

    def test_one_of_its_shards_exists(self, models: Models, output: Path) -> None:
        (output / "out-00002-of-00002.gguf").write_text("precious")
        options = ("--split-max-size", "300K")
        model = models.checkpoint(TINY)
        refuse(model, output, "out-00002-of-00002.gguf", "--overwrite", options=options)

    @pytest.mark.parametrize(
        ("name", "through_link"),
        [
            ("model.safetensors", True),  # by its own name it is no name for a GGUF
            ("config.json", False),
            ("config.json", True),
            ("tokenizer.json", False),
            ("chat_template.jinja", True),
        ],
    )
    def test_is_a_file_of_the_checkpoint(
        self, name: str, through_link: bool, broken: Path, output: Path
    ) -> None:
        before = held(broken)
        target = broken / name
        if through_link:
            target = output / "link.gguf"
            target.symlink_to(broken / name)
        arguments = [broken, "-o", target, "--quant", "F16", "--overwrite"]
        refused(arguments, "is the input", "another name", output=output)
        assert held(broken) == before

    @pytest.mark.parametrize(
        ("option", "name"),
        [
            ("--imatrix", "imatrix.gguf"),
            ("--fastmtp-ids", "ids.txt"),
            ("--fastmtp-corpus", "corpus.txt"),
        ],
    )
    def test_is_another_input(self, option: str, name: str, models: Models, output: Path) -> None:
        if option == "--imatrix":
            write_imatrix(output / name, TINY)
        else:
            (output / name).write_text("1 2 3")
        arguments = [models.checkpoint(TINY), "-o", output / name, "--quant", "F16", "--overwrite"]
        refused([*arguments, option, output / name], name, "is the input", output=output)

    def test_is_a_file_of_the_donor(self, models: Models, broken: Path, output: Path) -> None:
        before = held(broken)
        target = output / "link.gguf"
        target.symlink_to(broken / "model.safetensors")
        arguments = [models.checkpoint(TINY), "--from", broken, "-o", target, "--overwrite"]
        refused([*arguments, "--quant", "F16"], "is the input", output=output)
        assert held(broken) == before

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("no/out.gguf", "no … expected its folder to exist"),
            ("other.txt/out.gguf", "other.txt … folder"),
            ("x" * 300, "too long"),
        ],
        ids=["missing", "a file", "long"],
    )
    def test_cannot_be_there(self, name: str, said: str, models: Models, output: Path) -> None:
        arguments = [models.checkpoint(TINY), "-o", output / name, "--quant", "F16"]
        check_said(said, refused(arguments, output=output))

    def test_shard_name_is_a_folder(self, models: Models, output: Path) -> None:
        (output / "out-00002-of-00002.gguf").mkdir()
        options = ("--split-max-size", "300K", "--overwrite")
        refuse(models.checkpoint(TINY), output, "found a folder", options=options)

    def test_folder_is_read_only(self, models: Models, output: Path) -> None:
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        output.chmod(0o500)
        refuse(models.checkpoint(TINY), output, "cannot be written", "Permission denied")

    def test_disk_is_full(self, models: Models, output: Path, tmp_path: Path) -> None:
        """A limit on the size of files is what a test can set; it fails as a full disk does.

        The miniature for llama.cpp's quantizer is written to TMPDIR.
        """
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, BYTES))"
        environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
        (tmp_path / "temporary").mkdir()
        before = held(tmp_path)
        for model, size, options, words in (
            (TINY, 300_000, ("--quant", "F16"), ("out.gguf", "no space")),
            (SMALL, 20_000, (), ()),
        ):
            prelude = limit.replace("BYTES", str(size))
            arguments = ("convert", models.checkpoint(model), "-o", output / "out.gguf", *options)
            check_refused_process(*arguments, prelude=prelude, words=words, env=environment)
            assert held(tmp_path) == before

    @pytest.mark.parametrize("loaded", ["", "mtp_gguf.convert.plans.plan_checkpoint"])
    def test_memory_is_short(self, loaded: str, models: Models, output: Path) -> None:
        """A library cannot be loaded, or an object cannot be made."""
        limit = short_memory(1_000, f"mtp_gguf.cli, mtp_gguf.cli.convert, {loaded or 'sys'}")
        arguments = ("convert", models.checkpoint(SMALL), "-o", output / "out.gguf")
        check_refused_process(*arguments, prelude=limit, words=SHORT)
        assert not held(output).keys() - {"other.txt"}

    @pytest.mark.thorough
    def test_limited_memory_is_not_spent_on_threads(self, models: Models) -> None:
        """OpenBLAS starts a thread for each processor, with a buffer, when NumPy is imported."""
        limit = """
import atexit, os, resource, mtp_gguf.cli
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, -1))
atexit.register(lambda: print("threads:", len(os.listdir("/proc/self/task"))))
"""
        with spawn("convert", models.checkpoint(SMALL), "--dry-run", prelude=limit) as process:
            stdout, _ = process.communicate(timeout=60)
        assert "threads: 1" in stdout

    # Where it runs out decides how: in a MemoryError, in a folder that cannot be read (ENOMEM), in
    # a library that cannot be mapped.
    @pytest.mark.parametrize("kilobytes", [500, 1_000, 2_000, 2_300, 3_000, 8_000])
    def test_no_memory_to_start_with(self, kilobytes: int) -> None:
        check_refused_process("info", prelude=short_memory(kilobytes, "mtp_gguf"), words=SHORT)

    def test_disk_fills_up_meanwhile(
        self, models: Models, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: object) -> int:
            raise OSError(28, "No space left on device")

        model = models.checkpoint(TINY)
        monkeypatch.setattr(os, "pwrite", fails)
        refuse(model, output, "out.gguf", "no space", "No space left on device")


def wait_for_a_part(process: subprocess.Popen[str], output: Path) -> None:
    deadline = time.monotonic() + 60
    while not [*output.glob(".out*.partial")] and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


class TestInterrupt:
    @pytest.mark.thorough
    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        ("number", "options"),
        [
            (signal.SIGINT, ()),
            (signal.SIGTERM, ("--also", "Q8_0", "--split-max-size", "20M")),
            (signal.SIGHUP, ("--also", "F16")),
        ],
        ids=str,
    )
    def test_leaves_nothing(
        self, number: int, options: tuple[str, ...], large: Path, output: Path
    ) -> None:
        """Ctrl-C, kill or a lost terminal during the work: all partial files are removed."""
        arguments = ["convert", large, "-o", output / "out.gguf", "--threads", "1", *options]
        before = held(output)
        with spawn(*arguments) as process:
            wait_for_a_part(process, output)
            time.sleep(0.2)
            process.send_signal(number)
            if number != signal.SIGINT:
                process.send_signal(number)  # an impatient user
            _, stderr = process.communicate(timeout=60)
        words = ("interrupted", "nothing was written")
        check_refusal(process.returncode, stderr, *words, code=128 + number)
        assert held(output) == before

    def test_under_nohup(self, large: Path, output: Path) -> None:
        """A signal that the parent process ignores stays ignored."""
        arguments = ["convert", large, "-o", output / "out.gguf"]
        ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
        with spawn(*arguments, prelude=ignore) as process:
            wait_for_a_part(process, output)
            process.send_signal(signal.SIGHUP)
            _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        assert (output / "out.gguf").is_file()

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("seconds", [0.1, 0.3, 0.5, 0.7])
    def test_at_any_time(
        self, seconds: float, models: Models, tmp_path: Path, output: Path
    ) -> None:
        """At any moment, there is a complete file or none."""
        model = models.checkpoint(SMALL)
        whole = converted(model, tmp_path / "whole.gguf")
        with spawn("convert", model, "-o", output / "out.gguf") as process:
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        if set(held(output)) == {"other.txt"}:
            assert process.returncode
        else:
            assert not differing(whole, tensors_of(output / "out.gguf"))
            assert sorted(held(output)) == ["other.txt", "out.gguf"]


class TestUsage:
    """Wrong options end with exit code 2, before anything is read."""

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--quant", "Q9_9"], ["--quant", "Q4_K_M", "'Q9_9'"]),
            (["--quant", ""], ["--quant", "''"]),
            (["--mtp-type", "Q9_9"], ["--mtp-type", "Q8_0", "'Q9_9'"]),
            (["--mtp-type", "I8"], ["--mtp-type", "'I8'"]),
            (["--mtp-f16", "--mtp-type", "Q8_0"], ["--mtp-f16", "contradict"]),
            (["--tensor-type", "Q4_K"], ["--tensor-type", "REGEX=TYPE", "'Q4_K'"]),
            (["--tensor-type", "=Q4_K"], ["--tensor-type", "REGEX=TYPE"]),
            (["--tensor-type", "ffn="], ["--tensor-type", "expected one of", "''"]),
            (["--tensor-type", "ffn=Q9"], ["--tensor-type", "expected one of", "'Q9'"]),
            (["--tensor-type", "(=Q4_K"], ["--tensor-type", "'('", "no regular expression"]),
            (["--also", "Q9_9"], ["--also", "Q5_K_M", "'Q9_9'"]),
            (["--also", "Q5_K_M,"], ["--also", "''"]),
            (["--also", ""], ["--also", "''"]),
            (["--also", "Q8_0,q8_0"], ["--also", "each mix once", "Q8_0 again"]),
            (["--also", "q4_k_m"], ["--also", "each mix once", "Q4_K_M again"]),
            (["--tensor-type", "[[:alpha:]]=Q4_K"], ["--tensor-type", "no regular expression"]),
            *(
                (["--no-mtp", *other.split()], ["--no-mtp"])
                for other in (
                    *("--fastmtp", "--head-only", "--from x", "--mtp-f16", "--mtp-type Q8_0"),
                    *("--fastmtp-ids x", "--fastmtp-corpus x"),
                )
            ),
            (["--fastmtp-ids", "x", "--fastmtp-corpus", "y"], ["--fastmtp-ids", "contradict"]),
            (["--fastmtp-layout", "sidecar"], ["--fastmtp-layout", "--fastmtp"]),
            (["--fastmtp-layout", "table"], ["--fastmtp-layout", "--fastmtp"]),
            (["--fastmtp-layout", "other", "--fastmtp"], ["--fastmtp-layout", "sidecar"]),
            (["--fastmtp", "0"], ["--fastmtp"]),
            (["--fastmtp", "-5"], ["-5"]),
            (["--fastmtp=x"], ["--fastmtp", "integer"]),
            (["--split-max-size", "4T"], ["--split-max-size", "such as 4G", "'4T'"]),
            (["--split-max-size", "0G"], ["such as 4G", "'0G'"]),
            (["--split-max-size", "-1G"], ["such as 4G", "'-1G'"]),
            (["--threads", "0"], ["--threads"]),
            (["--threads", "1000000"], ["--threads"]),
            (["--unknown"], ["--unknown"]),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_option(self, options: list[str], words: list[str], output: Path) -> None:
        arguments = ["/nonexistent", *options, "-o", output / "x.gguf"]
        refused(arguments, *words, output=output, code=2)

    def test_number_of_models(self, output: Path) -> None:
        refused(["--fastmtp"], "MODEL", output=output, code=2)
        refused(["a", "b"], "unexpected", output=output, code=2)
