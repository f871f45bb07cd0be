"""Bad input to `mtp-gguf convert`: one clear sentence, the right exit code, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from collections.abc import Callable
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

SHARDED = replace(TINY, name="sharded", shards=3)
NESTED = replace(TINY, name="nested", nested=True)
FP8 = replace(TINY, name="fp8", hidden=256, fp8=True)
LARGE = Spec("large", hidden=1024, intermediate=3584)  # 140 MB, some seconds for one thread
INDEX = "model.safetensors.index.json"
PROJECTION = "model.layers.0.mlp.down_proj.weight"


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


def drop(*prefixes: str) -> Callable[[dict[str, Array]], None]:
    def edit(tensors: dict[str, Array]) -> None:
        for name in [n for n in tensors if n.startswith(prefixes)]:
            del tensors[name]

    return edit


def test_the_tiny_checkpoint_converts_when_nothing_is_broken(broken: Path, output: Path) -> None:
    converted(broken, output / "out.gguf", "--quant", "F16")
    assert sorted(held(output)) == ["other.txt", "out.gguf"]


class TestHead:
    def test_claimed_by_the_config_but_absent(self, broken: Path, output: Path) -> None:
        edit_tensors(broken, drop("mtp."))
        refuse(
            broken,
            output,
            "mtp_num_hidden_layers is 1",
            "no mtp.* tensor",
            "first missing: mtp.fc.weight",
            "--no-mtp",
            "--from",
            "download a checkpoint that still has it",
        )
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

        edit_json(broken / "config.json", edit)
        assert not differing(whole, converted(broken, output / "out.gguf", "--quant", "F16"))
        assert value_of(output / "out.gguf", "qwen35.nextn_predict_layers") == 1
        converted(broken, output / "bare.gguf", "--quant", "F16", "--no-mtp")

    def test_without_its_layers(self, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update(mtp_num_hidden_layers=0))
        edit_tensors(broken, drop("mtp.layers."))
        words = str(broken), "incomplete", "mtp.layers.*", "--no-mtp", "--from"
        refuse(broken, output, *words)

    def test_one_of_its_tensors_is_missing(self, broken: Path, output: Path) -> None:
        edit_tensors(broken, drop("mtp.layers.0.self_attn.q_norm"))
        refuse(broken, output, "mtp.layers.0.self_attn.q_norm.weight", "[32]", "no such tensor")

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
        bare = models.checkpoint(replace(TINY, name="bare", mtp=False))
        lent = converted(bare, output / "lent.gguf", "--quant", "F16", "--from", broken)
        assert not differing(one, lent)

    def test_head_only_of_a_model_without_one(self, models: Models, output: Path) -> None:
        model = models.checkpoint(replace(TINY, name="bare", mtp=False))
        refuse(model, output, "--head-only", "mtp.*", "--from", options=("--head-only",))

    def test_fastmtp_without_a_head(self, models: Models, output: Path) -> None:
        model = models.checkpoint(replace(TINY, name="bare", mtp=False))
        refuse(model, output, "--fastmtp", "MTP head", options=("--fastmtp",))

    @pytest.mark.parametrize("count", [0, None, 1])
    def test_of_a_donor_that_does_not_count_it(
        self, count: int | None, models: Models, broken: Path, output: Path
    ) -> None:
        """The donor's tensors count, whatever either config says."""
        model = models.checkpoint(replace(TINY, name="bare", mtp=False))
        edit_json(broken / "config.json", lambda c: c.update(mtp_num_hidden_layers=count))
        converted(model, output / "out.gguf", "--quant", "F16", "--from", broken)
        assert value_of(output / "out.gguf", "qwen35.nextn_predict_layers") == 1

    def test_half_of_a_donor(self, models: Models, broken: Path, output: Path) -> None:
        """The error names the donor, not the model that takes its head."""
        model = models.checkpoint(replace(TINY, name="bare", mtp=False))
        edit_tensors(broken, drop("mtp.layers.0.mlp"))
        options = ("--from", broken)
        message = refuse(model, output, "mtp.layers.0.mlp", "no such tensor", options=options)
        assert str(broken) in message
        assert str(model) not in message
        edit_tensors(broken, drop("mtp.layers."))
        edit_json(broken / "config.json", lambda c: c.update(mtp_num_hidden_layers=0))
        message = refuse(model, output, str(broken), "incomplete", options=options)
        assert str(model) not in message

    def test_donor_without_a_head(self, models: Models, output: Path) -> None:
        donor = models.checkpoint(replace(TINY, name="bare", mtp=False))
        model = models.checkpoint(TINY)
        refuse(model, output, str(donor), "--from", "mtp.*", options=("--mtp-from", donor))

    def test_donor_of_another_width_is_named(self, models: Models, output: Path) -> None:
        donor = models.checkpoint(replace(TINY, name="wide", hidden=96))
        words = str(donor), "mtp.fc.weight", "[64, 128]", "[96, 192]"
        refuse(models.checkpoint(TINY), output, *words, options=("--from", donor))

    def test_dense_donor_for_a_mixture(self, models: Models, output: Path) -> None:
        mixture = models.checkpoint(replace(TINY, name="moe", experts=4))
        donor = models.checkpoint(TINY)
        refuse(mixture, output, "mtp.layers.0.mlp", options=("--from", donor))

    @pytest.mark.parametrize("text_config", [3, [1], "x"])
    def test_donor_with_a_broken_config(
        self, text_config: object, models: Models, broken: Path, output: Path
    ) -> None:
        edit_json(broken / "config.json", lambda c: c.update(text_config=text_config))
        options = ("--from", broken)
        refuse(models.checkpoint(TINY), output, "text_config", "an object", options=options)


class TestFiles:
    def test_no_such_folder(self, tmp_path: Path, output: Path) -> None:
        refuse(tmp_path / "nowhere", output, "nowhere", "folder with config.json")

    def test_a_file_in_place_of_the_folder(self, broken: Path, output: Path) -> None:
        refuse(
            broken / "model.safetensors",
            output,
            "expected a checkpoint folder with config.json, found a file",
        )

    def test_name_too_long_for_any_file(self, output: Path) -> None:
        refuse(Path("x" * 300), output, "too long")

    def test_no_config(self, broken: Path, output: Path) -> None:
        (broken / "config.json").unlink()
        refuse(broken, output, "config.json", "found none")

    @pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", '{"a": NaN}', "[" * 100_000])
    def test_invalid_config(self, text: str, broken: Path, output: Path) -> None:
        (broken / "config.json").write_text(text, encoding="latin-1")
        refuse(broken, output, "config.json", "expected")

    def test_no_weights(self, broken: Path, output: Path) -> None:
        (broken / "model.safetensors").unlink()
        refuse(broken, output, "expected model.safetensors", "found none")
        (broken / "pytorch_model.bin").write_bytes(b"")
        refuse(broken, output, "pytorch_model.bin", "a ZIP archive", "rewrite it", "torch.load")

    def test_missing_shard(self, models: Models, tmp_path: Path, output: Path) -> None:
        model = models.copy(SHARDED, tmp_path)
        (model / "model-00002-of-00003.safetensors").unlink()
        refuse(model, output, INDEX, "model-00002-of-00003.safetensors", "finish the download")
        (model / INDEX).unlink()
        refuse(model, output, "expected 3 shards", "model-00002-of-00003.safetensors")

    @pytest.mark.parametrize("cut", [1, 1000])
    def test_truncated_shard(self, cut: int, models: Models, tmp_path: Path, output: Path) -> None:
        model = models.copy(SHARDED, tmp_path)
        shard = model / "model-00002-of-00003.safetensors"
        os.truncate(shard, size := shard.stat().st_size - cut)
        refuse(model, output, shard.name, f"{size + cut} bytes", f"{size} bytes", "truncated")

    def test_empty_shard(self, broken: Path, output: Path) -> None:
        (broken / "model.safetensors").write_bytes(b"")
        refuse(broken, output, "header length", "found a file of 0")

    def test_shard_that_is_a_folder(self, broken: Path, output: Path) -> None:
        (broken / "model.safetensors").unlink()
        (broken / "model.safetensors").mkdir()
        refuse(broken, output, "model.safetensors", "folder")

    def test_overlapping_shards(self, models: Models, tmp_path: Path, output: Path) -> None:
        model = models.copy(SHARDED, tmp_path)
        (model / INDEX).unlink()
        first = read_tensors(model / "model-00001-of-00003.safetensors")
        second = read_tensors(model / "model-00002-of-00003.safetensors")
        name = next(iter(first))
        second[name] = first[name]
        write_safetensors(model / "model-00002-of-00003.safetensors", second)
        words = "is in both model-00001-of-00003.safetensors", "00002-of-00003", name
        refuse(model, output, *words)


class TestIndex:
    @pytest.fixture
    def model(self, models: Models, tmp_path: Path) -> Path:
        return models.copy(SHARDED, tmp_path)

    def move(self, model: Path, file: object, tensor: str = "model.norm.weight") -> None:
        """Let the index say that a tensor is in `file`."""
        edit_json(model / INDEX, lambda index: index["weight_map"].update({tensor: file}))

    @pytest.mark.parametrize(
        "file",
        [
            "../x.safetensors",
            "/etc/passwd",
            "a/b.safetensors",
            "a\\b",
            "x\0",
            "..",
            ".",
            "",
            3,
            None,
        ],
    )
    def test_points_outside_the_folder(self, file: object, model: Path, output: Path) -> None:
        self.move(model, file)
        words = INDEX, "model.norm.weight", "a file name inside the folder", repr(file)
        refuse(model, output, *words)

    def test_names_an_absent_file(self, model: Path, output: Path) -> None:
        self.move(model, "model-00009.safetensors")
        refuse(model, output, INDEX, "files that are missing: model-00009.safetensors;")

    def test_names_another_shard_than_holds_the_tensor(self, model: Path, output: Path) -> None:
        index = json.loads((model / INDEX).read_text())["weight_map"]
        true = index["model.norm.weight"]
        other = next(file for file in index.values() if file != true)
        self.move(model, other)
        words = INDEX, "model.norm.weight", f"expected in {other}", f"found in {true}"
        refuse(model, output, *words)

    def test_names_a_tensor_that_no_shard_has(self, model: Path, output: Path) -> None:
        self.move(model, "model-00001-of-00003.safetensors", "model.extra.weight")
        refuse(model, output, "model.extra.weight", "found nowhere")

    def test_lacks_a_tensor_of_a_shard(self, model: Path, output: Path) -> None:
        edit_json(model / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))
        refuse(model, output, "model.norm.weight", f"is not in {INDEX}")

    @pytest.mark.parametrize("weight_map", [None, [], "x"])
    def test_without_a_weight_map(self, weight_map: object, model: Path, output: Path) -> None:
        edit_json(model / INDEX, lambda index: index.update(weight_map=weight_map))
        refuse(model, output, INDEX, "weight_map")

    def test_with_an_empty_weight_map(self, model: Path, output: Path) -> None:
        edit_json(model / INDEX, lambda index: index.update(weight_map={}))
        refuse(model, output, INDEX, "weight_map")


class TestSafetensorsHeader:
    """Only that the converter ends well; gguf_tools/test_safetensors.py breaks each field."""

    def test_length(self, broken: Path, output: Path) -> None:
        path = broken / "model.safetensors"
        path.write_bytes(struct.pack("<Q", 100_000_001) + path.read_bytes()[8:])
        refuse(broken, output, "model.safetensors", "header length", "100000001")

    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            ("data_offsets", [0, 128], ["overlap"]),
            ("shape", [64, 1], ["model.norm.weight", "[64]", "[64, 1]"]),
            ("dtype", "I16", ["model.norm.weight", "dtype", "I16"]),
        ],
    )
    def test_field(
        self, field: str, value: object, words: list[str], broken: Path, output: Path
    ) -> None:
        def edit(header: dict[str, Any]) -> None:
            header["model.norm.weight"][field] = value

        edit_header(broken / "model.safetensors", edit)
        refuse(broken, output, "model.safetensors", *words)


class TestTensors:
    def test_unknown_tensor(self, broken: Path, output: Path) -> None:
        extra = np.zeros((2, 2), np.float32)
        edit_tensors(broken, lambda t: t.update({"model.layers.0.mlp.bias": extra}))
        refuse(broken, output, "1 tensors", "'model.layers.0.mlp.bias'", "not supported")

    def test_missing_one(self, broken: Path, output: Path) -> None:
        edit_tensors(broken, drop(PROJECTION))
        refuse(broken, output, PROJECTION, "[64, 96]", "no such tensor")

    def test_of_another_shape(self, broken: Path, output: Path) -> None:
        def edit(tensors: dict[str, Array]) -> None:
            tensors[PROJECTION] = tensors[PROJECTION].T.copy()

        edit_tensors(broken, edit)
        refuse(broken, output, PROJECTION, "[64, 96]", "[96, 64]")

    def test_the_same_one_under_two_names(self, broken: Path, output: Path) -> None:
        def edit(tensors: dict[str, Array]) -> None:
            tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"]

        edit_tensors(broken, edit)
        refuse(broken, output, "model.language_model.norm.weight", "the same tensor")

    def test_untied_without_an_output(self, broken: Path, output: Path) -> None:
        edit_tensors(broken, drop("lm_head"))
        refuse(broken, output, "tie_word_embeddings is false", "lm_head.weight")

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("quant", ["F16", "BF16", "F32", "Q8_0", "Q4_K_M"])
    @pytest.mark.parametrize("name", [PROJECTION, "model.norm.weight"])
    def test_not_finite(
        self,
        name: str,
        quant: str,
        value: float,
        models: Models,
        tmp_path: Path,
        output: Path,
    ) -> None:
        model = models.copy(SMALL, tmp_path)

        def edit(tensors: dict[str, Array]) -> None:
            array = tensors[name].copy()
            array.reshape(-1)[77] = value
            tensors[name] = array

        edit_tensors(model, edit)
        words = name, "NaN or infinity"
        arguments = [model, "-o", output / "out.gguf", "--quant", quant]
        refused(arguments, *words, output=output)

    @pytest.mark.parametrize(("value", "dtype"), [(1000.0, np.float32), (20.0, np.float16)])
    def test_too_large_for_a_power(
        self, value: float, dtype: type, broken: Path, output: Path
    ) -> None:
        """The decay is -exp(A_log); NumPy warns of an overflow, which the sentence reports."""
        name = "model.layers.0.linear_attn.A_log"
        edit_tensors(broken, lambda t: t.update({name: np.full_like(t[name], value, dtype)}))
        refuse(broken, output, name, "NaN or infinity")

    def test_too_large_for_f16(self, broken: Path, output: Path) -> None:
        def edit(tensors: dict[str, Array]) -> None:
            array = tensors[PROJECTION].copy()
            array[0, 0] = 1e5
            tensors[PROJECTION] = array

        edit_tensors(broken, edit)
        refuse(broken, output, PROJECTION, "F16")
        converted(broken, output / "out.gguf", "--quant", "BF16", "--mtp-type", "BF16")


class TestConfig:
    @pytest.mark.parametrize(
        "architectures", [None, [], "Qwen3_5ForCausalLM", ["LlamaForCausalLM"], [["x"]], [{}], {}]
    )
    def test_unknown_architecture(self, architectures: object, broken: Path, output: Path) -> None:
        change = {"architectures": architectures, "model_type": "llama"}
        edit_json(broken / "config.json", lambda c: c.update(change))
        refuse(broken, output, "config.json", "architectures: expected", "found")

    @pytest.mark.parametrize("value", ["64", 64.5, True, 0, -1, 1 << 40, [64], None])
    @pytest.mark.parametrize(
        "key",
        [
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
        ],
    )
    def test_size(self, key: str, value: object, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update({key: value}))
        refuse(broken, output, key, "expected a whole number from 1", f"found {value!r}")

    @pytest.mark.parametrize("value", ["1", 1.5, True, -1, 1 << 40, [1]])
    @pytest.mark.parametrize(
        "key",
        [
            "head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
            "max_position_embeddings",
            "mtp_num_hidden_layers",
        ],
    )
    def test_size_with_a_default(self, key: str, value: object, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update({key: value}))
        refuse(broken, output, key, "expected a whole number from", f"found {value!r}")

    @pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "linear_num_value_heads"])
    def test_huge_size_takes_no_memory(self, key: str, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update({key: 1 << 30}))
        refuse(broken, output, "expected shape", "by the config")

    @pytest.mark.parametrize("value", [513, 1 << 30])
    def test_more_layers_than_llama_cpp_knows(self, value: int, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update(num_hidden_layers=value))
        refuse(broken, output, "num_hidden_layers", "at most 512", str(value))

    @pytest.mark.parametrize(
        ("kinds", "words"),
        [
            (["linear_attention"], ["2 entries", "found 1"]),
            (["linear_attention"] * 3, ["2 entries", "found 3"]),
            (["linear_attention", "sliding_attention"], ["sliding_attention"]),
            (["linear_attention", None], ["None"]),
            (["linear_attention", ["full_attention"]], ["['full_attention']"]),
            ("linear_attention", ["2 entries", "'linear_attention'"]),
            ({}, ["2 entries", "{}"]),
            (["full_attention", "linear_attention"], ["self_attn", "no such tensor"]),
        ],
    )
    def test_layer_types(self, kinds: object, words: list[str], broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update(layer_types=kinds))
        refuse(broken, output, *words)

    def test_value_heads_no_multiple_of_key_heads(self, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update(linear_num_key_heads=4))
        words = "linear_num_value_heads", "a multiple of linear_num_key_heads (4)", "found 2"
        refuse(broken, output, *words)

    def test_heads_no_multiple_of_kv_heads(self, models: Models, output: Path) -> None:
        model = models.checkpoint(replace(TINY, name="heads", heads=3, kv_heads=2))
        words = "num_attention_heads", "a multiple of num_key_value_heads (2)", "found 3"
        refuse(model, output, *words)

    @pytest.mark.parametrize("value", [0, 5, "2", None])
    def test_experts_per_token(
        self, value: object, models: Models, tmp_path: Path, output: Path
    ) -> None:
        model = models.copy(replace(TINY, name="moe", experts=4), tmp_path)
        edit_json(model / "config.json", lambda c: c.update(num_experts_per_tok=value))
        refuse(model, output, "num_experts_per_tok", f"found {value!r}")

    @pytest.mark.parametrize("value", [0, -4, "x", 1 << 40])
    def test_number_of_experts(
        self, value: object, models: Models, tmp_path: Path, output: Path
    ) -> None:
        model = models.copy(replace(TINY, name="moe", experts=4), tmp_path)
        edit_json(model / "config.json", lambda c: c.update(num_experts=value))
        refuse(model, output, "num_experts", f"found {value!r}")

    @pytest.mark.parametrize("fused", [True, False])
    def test_huge_number_of_experts_takes_no_memory(
        self, fused: bool, models: Models, tmp_path: Path, output: Path
    ) -> None:
        spec = replace(TINY, name="moe", experts=4, fused_experts=fused, fused_mtp_experts=fused)
        model = models.copy(replace(spec, name=f"moe-{fused}"), tmp_path)
        edit_json(model / "config.json", lambda c: c.update(num_experts=(1 << 31) - 1))
        refuse(model, output, "expected shape", str((1 << 31) - 1))

    @pytest.mark.parametrize("value", ["x", True, [], 1e400, float("nan"), -1.0, 10**400])
    @pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor"])
    def test_rope(self, key: str, value: object, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c["rope_parameters"].update({key: value}))
        refuse(broken, output, "config.json", key, "expected")

    @pytest.mark.parametrize("value", [1.5, 100])
    def test_rotates_more_than_a_head(self, value: float, broken: Path, output: Path) -> None:
        edit_json(
            broken / "config.json",
            lambda c: c["rope_parameters"].update(partial_rotary_factor=value),
        )
        refuse(broken, output, "config.json", "partial_rotary_factor", "from 0 to 1", str(value))

    @pytest.mark.parametrize("value", ["x", -1e-6, 1e400, 1e39])
    def test_epsilon(self, value: object, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update(rms_norm_eps=value))
        refuse(broken, output, "config.json", "rms_norm_eps", "expected")

    @pytest.mark.parametrize("value", ["x", [1, 2, 3, 4, 5], [1.5], [-1], [1 << 40], 3, [True]])
    def test_rope_sections(self, value: object, broken: Path, output: Path) -> None:
        edit_json(
            broken / "config.json", lambda c: c["rope_parameters"].update(mrope_section=value)
        )
        refuse(broken, output, "config.json", "mrope_section", "expected")

    @pytest.mark.parametrize(
        ("rope", "word"),
        [
            ([1], "rope_parameters"),
            ({"rope_type": "dynamic", "factor": 2}, "rope_type"),
            ({"rope_type": ["yarn"], "factor": 2}, "rope_type"),
            (
                {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": -5},
                "original_max_position_embeddings",
            ),
            ({"rope_type": "linear", "factor": "2"}, "factor"),
            ({"rope_type": "linear", "factor": -2}, "factor"),
        ],
    )
    def test_rope_scaling(self, rope: object, word: str, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update(rope_parameters=rope))
        refuse(broken, output, "config.json", word, "expected")

    @pytest.mark.parametrize("value", ["no", 0, []])
    def test_tied(self, value: object, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update(tie_word_embeddings=value))
        refuse(broken, output, "tie_word_embeddings", "true or false", f"found {value!r}")

    @pytest.mark.parametrize("value", [3, "x", [1]])
    def test_text_config(self, value: object, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update(text_config=value))
        refuse(broken, output, "text_config", "an object", repr(value))

    @pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
    @pytest.mark.parametrize("value", [1024, -1, 1 << 40, [1024], "x", True])
    def test_end_of_text_beyond_the_vocabulary(
        self, value: object, file: str, broken: Path, output: Path
    ) -> None:
        edit_json(broken / file, lambda c: c.update(eos_token_id=value))
        found = value[0] if isinstance(value, list) else value
        words = file, "eos_token_id", "0 to 1023", f"found {found!r}"
        refuse(broken, output, *words)

    def test_the_same_in_a_nested_config(
        self, models: Models, tmp_path: Path, output: Path
    ) -> None:
        model = models.copy(NESTED, tmp_path)
        edit_json(model / "config.json", lambda c: c["text_config"].update(eos_token_id=1024))
        refuse(model, output, "eos_token_id", "found 1024")


class TestQuantizedSources:
    @pytest.mark.parametrize("value", ["gptq", [], 4])
    def test_no_object(self, value: object, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update(quantization_config=value))
        refuse(broken, output, "quantization_config", "expected", repr(value))

    @pytest.fixture
    def model(self, models: Models, tmp_path: Path) -> Path:
        return models.copy(FP8, tmp_path)

    @pytest.mark.parametrize("size", [128, [128], [128, 0], [128.0, 128], [True, 128]])
    def test_block_size(self, size: object, model: Path, output: Path) -> None:
        edit_json(
            model / "config.json",
            lambda c: c["quantization_config"].update(weight_block_size=size),
        )
        refuse(model, output, "weight_block_size", "[rows, columns]", repr(size))

    def test_without_the_config(self, model: Path, output: Path) -> None:
        edit_json(model / "config.json", lambda c: c.pop("quantization_config"))
        refuse(model, output, "without a quantization_config", "F8_E4M3")

    def test_without_scales(self, model: Path, output: Path) -> None:
        edit_tensors(model, drop(PROJECTION + "_scale_inv"))
        refuse(model, output, PROJECTION + "_scale_inv", "found none")

    @pytest.mark.parametrize(
        "scale", [np.ones((2, 2), np.float32), np.ones(1, np.float32), np.ones((), np.float32)]
    )
    def test_scales_of_another_shape(self, scale: Array, model: Path, output: Path) -> None:
        name = PROJECTION + "_scale_inv"
        edit_tensors(model, lambda t: t.update({name: scale}))
        refuse(model, output, name, "[2, 1]", str(list(scale.shape)))

    def test_scales_of_another_type(self, model: Path, output: Path) -> None:
        name = PROJECTION + "_scale_inv"
        scale = np.ones((2, 1), ml_dtypes.float8_e4m3fn)
        edit_tensors(model, lambda t: t.update({name: scale}))
        refuse(model, output, name, "F32, F16 or BF16", "F8_E4M3")

    def test_scales_without_a_weight(self, model: Path, output: Path) -> None:
        name = "model.norm.weight_scale_inv"
        edit_tensors(model, lambda t: t.update({name: np.ones((1, 1), np.float32)}))
        refuse(model, output, name)

    def test_scale_that_is_not_finite(self, model: Path, output: Path) -> None:
        name = PROJECTION + "_scale_inv"
        scale = np.array([[1], [np.nan]], np.float32)
        edit_tensors(model, lambda t: t.update({name: scale}))
        refuse(model, output, PROJECTION, "NaN or infinity")


class TestTokenizer:
    def test_missing(self, broken: Path, output: Path) -> None:
        (broken / "tokenizer.json").unlink()
        refuse(broken, output, "tokenizer.json", "found none")

    @pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"model": 3}'])
    def test_broken(self, text: str, broken: Path, output: Path) -> None:
        (broken / "tokenizer.json").write_text(text)
        refuse(broken, output, "tokenizer.json", "expected")

    def test_merges_that_do_not_fit_the_vocabulary(self, broken: Path, output: Path) -> None:
        edit_json(broken / "tokenizer.json", lambda t: t["model"].update(merges=[["no", "such"]]))
        refuse(broken, output, "tokenizer.json", "expected a tokenizer")

    @pytest.mark.parametrize("key", ["continuing_subword_prefix", "end_of_word_suffix"])
    def test_not_byte_level(self, key: str, broken: Path, output: Path) -> None:
        edit_json(broken / "tokenizer.json", lambda t: t["model"].update({key: "##"}))
        refuse(broken, output, "tokenizer.json", key, "expected none", "'##'")

    @pytest.mark.parametrize("options", [(), ("--tokenizer-pre", "qwen35")])
    def test_not_bpe(self, options: tuple[str, ...], broken: Path, output: Path) -> None:
        model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
        edit_json(broken / "tokenizer.json", lambda t: t.update(model=model, added_tokens=[]))
        words = "tokenizer.json", "model.type", "expected BPE", "'WordLevel'"
        refuse(broken, output, *words, options=options)

    def test_unknown_split(self, broken: Path, output: Path) -> None:
        def edit(tokenizer: dict[str, Any]) -> None:
            tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+"

        edit_json(broken / "tokenizer.json", edit)
        refuse(broken, output, "pre_tokenizer", r"\s+", "--tokenizer-pre NAME")
        converted(broken, output / "out.gguf", "--quant", "F16", "--tokenizer-pre", "qwen2")

    def test_no_split(self, broken: Path, output: Path) -> None:
        edit_json(broken / "tokenizer.json", lambda t: t.update(pre_tokenizer=None))
        refuse(broken, output, "pre_tokenizer", "no regular expression", "--tokenizer-pre NAME")

    def test_ids_beyond_the_vocabulary(self, models: Models, output: Path) -> None:
        model = models.checkpoint(replace(TINY, name="short", vocab_size=900))
        refuse(model, output, "tokenizer.json", "below vocab_size (900)", "found 921")

    def test_a_special_token_without_an_id(
        self, models: Models, tmp_path: Path, output: Path
    ) -> None:
        model = models.copy(replace(TINY, name="full", vocab_size=922), tmp_path)
        edit_json(model / "tokenizer_config.json", lambda c: c.update(eos_token="<|nope|>"))
        words = "expected tokens of tokenizer.json", "'<|nope|>'", "vocab_size (922)"
        refuse(model, output, "tokenizer_config.json: ", *words)

    @pytest.mark.parametrize("text", ["{", "[]", "3", "\xff"])
    @pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json"])
    def test_broken_companion(self, file: str, text: str, broken: Path, output: Path) -> None:
        (broken / file).write_text(text, encoding="latin-1")
        refuse(broken, output, file)

    @pytest.mark.parametrize("key", ["temperature", "top_k", "repetition_penalty"])
    @pytest.mark.parametrize("value", [1e400, "warm", 10**400, [], 1e39])
    def test_invalid_sampling_defaults(
        self, key: str, value: object, broken: Path, output: Path
    ) -> None:
        edit_json(broken / "generation_config.json", lambda c: c.update({key: value}))
        name = {"repetition_penalty": "penalty_repeat", "temperature": "temp"}.get(key, key)
        refuse(broken, output, "generation_config.json", name, "expected")


class TestImatrix:
    def test_of_another_model(self, models: Models, tmp_path: Path, output: Path) -> None:
        imatrix = write_imatrix(tmp_path / "imatrix.gguf", replace(SMALL, hidden=512))
        model = models.checkpoint(SMALL)
        words = "--imatrix", "[256, 1]", "[512, 1]", "made for another model?"
        refused([model, "-o", output / "x.gguf", "--imatrix", imatrix], *words, output=output)

    def test_that_is_a_model(self, models: Models, tmp_path: Path, output: Path) -> None:
        model = models.checkpoint(TINY)
        converted(model, tmp_path / "model.gguf", "--quant", "F16")
        options = ("--imatrix", tmp_path / "model.gguf")
        refuse(model, output, "model.gguf", "expected 'imatrix'", "'model'", options=options)

    def test_that_is_no_gguf(self, models: Models, tmp_path: Path, output: Path) -> None:
        path = tmp_path / "imatrix.dat"
        for data, words in ((bytes(100), "found no entries"), (b"ZIPs" * 9, "GGUF or an older")):
            path.write_bytes(data)
            refuse(models.checkpoint(TINY), output, str(path), words, options=("--imatrix", path))

    def test_missing(self, models: Models, tmp_path: Path, output: Path) -> None:
        options = ("--imatrix", tmp_path / "none.gguf")
        refuse(models.checkpoint(TINY), output, "none.gguf", "cannot be opened", options=options)

    @pytest.mark.parametrize("quant", ["IQ2_XXS", "IQ2_XS", "IQ1_S"])
    def test_needed_but_absent(self, quant: str, models: Models, output: Path) -> None:
        arguments = [models.checkpoint(SMALL), "-o", output / "x.gguf", "--quant", quant]
        refused(arguments, f"--quant {quant}", "an imatrix", "--imatrix", output=output)

    def test_needed_by_one_tensor_type(self, models: Models, output: Path) -> None:
        model = models.checkpoint(SMALL)
        for quant in ("F16", "Q4_K_M"):
            arguments = [model, "-o", output / "x.gguf", "--quant", quant]
            override = ["--tensor-type", "ffn_down=IQ2_XXS"]
            words = "an imatrix", "--imatrix"
            refused([*arguments, *override], *words, output=output)


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

    def test_folder_is_missing(self, models: Models, output: Path) -> None:
        refuse(models.checkpoint(TINY), output / "no", "expected its folder to exist", "no")

    def test_folder_is_a_file(self, models: Models, output: Path) -> None:
        arguments = [models.checkpoint(TINY), "-o", output / "other.txt" / "out.gguf"]
        refused([*arguments, "--quant", "F16"], "other.txt", "folder", output=output)

    def test_name_too_long(self, models: Models, output: Path) -> None:
        arguments = [models.checkpoint(TINY), "-o", output / ("x" * 300), "--quant", "F16"]
        refused(arguments, "too long", output=output)

    def test_shard_name_is_a_folder(self, models: Models, output: Path) -> None:
        (output / "out-00002-of-00002.gguf").mkdir()
        options = ("--split-max-size", "300K", "--overwrite")
        refuse(models.checkpoint(TINY), output, "found a folder", options=options)

    def test_folder_is_read_only(self, models: Models, output: Path) -> None:
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        output.chmod(0o500)
        refuse(models.checkpoint(TINY), output, "cannot be written", "Permission denied")

    def test_disk_is_full(self, models: Models, output: Path) -> None:
        """A limit on the size of files is what a test can set; it fails as a full disk does."""
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"
        arguments = [
            "convert",
            models.checkpoint(TINY),
            "-o",
            output / "out.gguf",
            "--quant",
            "F16",
        ]
        before = held(output)
        with spawn(*arguments, prelude=limit) as process:
            _, stderr = process.communicate(timeout=60)
        check_refusal(process.returncode, stderr, "out.gguf", "no space")
        assert held(output) == before

    def test_temporary_files_do_not_fit(self, models: Models, output: Path, tmp_path: Path) -> None:
        """The miniature for llama.cpp's quantizer is written to TMPDIR."""
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        arguments = ["convert", models.checkpoint(SMALL), "-o", output / "out.gguf"]
        before = held(output)
        with spawn(
            *arguments, prelude=limit, env={**os.environ, "TMPDIR": str(temporary)}
        ) as process:
            _, stderr = process.communicate(timeout=60)
        check_refusal(process.returncode, stderr)
        assert held(output) == before
        assert not held(temporary)

    @pytest.mark.parametrize("loaded", ["", "mtp_gguf.convert.plans.plan_checkpoint"])
    def test_memory_is_short(self, loaded: str, models: Models, output: Path) -> None:
        """A library cannot be loaded, or an object cannot be made."""
        limit = f"""
import resource
import mtp_gguf.cli, mtp_gguf.cli.convert, {loaded or "sys"}
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 1_000_000, -1))
"""
        with spawn(
            *("convert", models.checkpoint(SMALL), "-o", output / "out.gguf"), prelude=limit
        ) as process:
            _, stderr = process.communicate(timeout=60)
        check_refusal(process.returncode, stderr, "memory: expected more", "ulimit -v")
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
        limit = f"""
import resource, mtp_gguf
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {kilobytes * 1000}, -1))
"""
        with spawn("info", prelude=limit) as process:
            _, stderr = process.communicate(timeout=60)
        check_refusal(process.returncode, stderr, "memory: expected more", "ulimit -v")

    def test_disk_fills_up_meanwhile(
        self, models: Models, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: object) -> int:
            raise OSError(28, "No space left on device")

        model = models.checkpoint(TINY)
        monkeypatch.setattr(os, "pwrite", fails)
        refuse(model, output, "out.gguf", "no space", "No space left on device")


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
            deadline = time.monotonic() + 60
            while not [*output.glob(".out*.partial")] and time.monotonic() < deadline:
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
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
            deadline = time.monotonic() + 60
            while not [*output.glob(".out*.partial")] and time.monotonic() < deadline:
                time.sleep(0.01)
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
            (["--no-mtp", "--fastmtp"], ["--no-mtp"]),
            (["--no-mtp", "--head-only"], ["--no-mtp"]),
            (["--no-mtp", "--from", "x"], ["--no-mtp"]),
            (["--no-mtp", "--mtp-f16"], ["--no-mtp"]),
            (["--no-mtp", "--mtp-type", "Q8_0"], ["--no-mtp"]),
            (["--no-mtp", "--fastmtp-ids", "x"], ["--no-mtp"]),
            (["--no-mtp", "--fastmtp-corpus", "x"], ["--no-mtp"]),
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

    def test_no_model(self, output: Path) -> None:
        refused(["--fastmtp"], "MODEL", output=output, code=2)

    def test_two_models(self, output: Path) -> None:
        refused(["a", "b"], "unexpected", output=output, code=2)
