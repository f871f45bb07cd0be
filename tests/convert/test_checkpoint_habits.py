"""Checkpoints as common tools write them: prefixes, buffers, nulls, LFS pointers, model cards."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.checkpoint_edits import edit_header, edit_json, edit_tensors
from support.checkpoints import SMALL, SPECS, TINY, Array, Spec
from support.commands import invoke
from support.conversions import converted, refuse
from support.gguf_files import differing, tensors_of, value_of
from support.models import Models
from support.upstream.imatrix import CHUNKS, DATASET, imatrix_entries, write_imatrix

NESTED = replace(TINY, name="nested", nested=True)
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def same_as(plain: Path, model: Path, output: Path, *options: object) -> None:
    """Both convert, to the same tensors."""
    expected = converted(plain, output / "plain.gguf", "--quant", "F16", *options)
    assert not differing(expected, converted(model, output / "x.gguf", "--quant", "F16", *options))


def rename(model: Path, change: Callable[[str], str]) -> None:
    def edit(tensors: dict[str, Array]) -> None:
        renamed = {change(name): array for name, array in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    edit_tensors(model, edit)


WRAPPED: dict[str, Callable[[str], str]] = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "peft": lambda name: f"base_model.model.{name}",
    "compiled-layers": lambda name: name.replace(".layers.0.", ".layers.0._orig_mod."),
    "data-parallel": lambda name: f"module.{name}",
    "lightning": lambda name: f"_forward_module.model.{name}",
    "held-by-a-module": lambda name: f"model.{name}",
    "fsdp": lambda name: f"_fsdp_wrapped_module.{name}".replace(
        ".layers.0.", ".layers.0._fsdp_wrapped_module._checkpoint_wrapped_module."
    ),
}


class TestNames:
    @pytest.mark.sample(4)
    @pytest.mark.parametrize("spec", [TINY, NESTED], ids=lambda spec: spec.name)
    @pytest.mark.parametrize("change", WRAPPED.values(), ids=WRAPPED)
    def test_of_wrapped_models(
        self, change: Callable[[str], str], spec: Spec, models: Models, tmp_path: Path, output: Path
    ) -> None:
        model = models.copy(spec, tmp_path)
        rename(model, change)
        same_as(models.checkpoint(spec), model, output)
        bare = models.checkpoint(replace(TINY, name="bare", mtp=False))
        converted(bare, output / "lent.gguf", "--quant", "F16", "--mtp-from", model)
        assert value_of(output / "lent.gguf", "qwen35.nextn_predict_layers") == 1

    def test_of_computed_buffers(self, models: Models, broken: Path, output: Path) -> None:
        names = "model.rotary_emb.original_inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"
        edit_tensors(broken, lambda t: t.update(dict.fromkeys(names, np.ones(4, np.float32))))
        same_as(models.checkpoint(TINY), broken, output)
        assert "2 source tensors skipped: computed" in invoke("convert", broken, "--dry-run").output

    @pytest.mark.parametrize("option", [(), ("--no-mtp",)])
    def test_with_an_unknown_prefix(
        self, option: tuple[str, ...], broken: Path, output: Path
    ) -> None:
        rename(broken, lambda name: f"student.{name}")
        refuse(broken, output, "'student.lm_head.weight'", "prefix 'student.'", options=option)
        assert "prefix 'student.'" in invoke("doctor", broken).output

    def test_of_a_tied_output_alone(self, models: Models, tmp_path: Path, output: Path) -> None:
        spec = replace(TINY, name="tied", tied=True)
        model = models.copy(spec, tmp_path)
        names = "lm_head.weight", "model.embed_tokens.weight"
        edit_tensors(model, lambda t: t.update({names[0]: t.pop(names[1])}))
        same_as(models.checkpoint(spec), model, output)


Edit = Callable[[Path], object]
LORA = "LoRA adapter … merge_and_unload"
STEP = re.compile(
    r"\(merge_and_unload of peft\)|name a GGUF in it|"
    r"mtp-gguf convert example/Tiny|mtp-gguf convert OWNER/NAME|python -c \"from \w+ import |"
    r"python \S+zero_to_fp32\.py |accelerate merge-weights |mv \S+model\.pt \S+pytorch_model\.bin"
)


def only(*names: str) -> Edit:
    """Files in place of the weights."""

    def change(model: Path) -> None:
        (model / "model.safetensors").unlink()
        for name in names:
            (model / name).parent.mkdir(exist_ok=True)
            (model / name).write_bytes(b"")

    return change


def adapted(name: str, was: str = "") -> Edit:
    """A tensor of an adapter, or one of the model under the name that it has beside one."""

    def edit(tensors: dict[str, Array]) -> None:
        tensors[name] = tensors.pop(was) if was else np.ones((4, 64), np.float32)

    return lambda model: edit_tensors(model, edit)


def of_mlx(model: Path) -> None:
    """mlx-lm writes this mark, and changes norms and convolutions of the model."""
    mark = {"__metadata__": {"format": "mlx"}}
    edit_header(model / "model.safetensors", lambda header: header.update(mark))


UP = "mtp.layers.0.mlp.up_proj"
A_LORA = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
FOLDERS: dict[str, tuple[Edit, str]] = {
    "of MLX": (of_mlx, "model.safetensors … MLX … from the original"),
    "of a quantization that is a text": (
        lambda model: edit_json(
            model / "config.json", lambda config: config.update(quantization_config="int4")
        ),
        "quantization_config",
    ),
    "of an adapter": (adapted(A_LORA), f"{A_LORA} … {LORA}"),
    # In place of the layer's name; none of its tensors is to be blamed as missing.
    **{
        f"of {part}": (
            adapted(f"base_model.model.{UP}.{part}.weight", f"{UP}.weight"),
            f"base_model.model.{UP}.{part}.weight … {LORA}",
        )
        for part in ("base_layer", "modules_to_save.default", "original_module")
    },
    # transformers applies it when it loads the folder.
    "with an adapter": (
        lambda model: (model / "adapter_config.json").write_text("{}"),
        "LoRA adapter beside the model … merge_and_unload",
    ),
    "of an adapter alone": (
        lambda model: (model / "config.json").rename(model / "adapter_config.json"),
        LORA,
    ),
    "of an adapter's weights": (only("adapter_model.safetensors"), "LoRA adapter"),
}
# What a folder has in place of weights, and the step that makes a model of it.
FSDP = "a distributed checkpoint … merge-weights"
WITHOUT_WEIGHTS: dict[str, tuple[Edit, str]] = {
    "of a GGUF": (only("tiny-BF16.gguf"), "name a GGUF in it … tiny-BF16.gguf"),
    "of FSDP": (only("pytorch_model_fsdp_0/__0_0.distcp"), FSDP),
    "of PyTorch's shards": (only("__0_0.distcp", ".metadata"), FSDP),
    "of DeepSpeed": (
        only("global_step5/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_to_fp32.py"),
        "a checkpoint of DeepSpeed … zero_to_fp32.py",
    ),
    "of DeepSpeed's stage 1": (
        only("global_step5/mp_rank_00_model_states.pt"),
        "a checkpoint of DeepSpeed",
    ),
    "of HQQ": (only("qmodel.pt"), "HQQ"),
    "of another name": (only("model.pt"), "model.pt"),
    "of TensorFlow": (only("tf_model.h5"), "TensorFlow"),
    "of Flax": (only("flax_model.msgpack"), "Flax"),
    "of ONNX": (only("model.onnx"), "ONNX"),
}


class TestOtherFolders:
    """Each is named, with the step that makes a model of it."""

    @pytest.mark.parametrize("name", [*FOLDERS, *WITHOUT_WEIGHTS])
    def test_is_named(self, name: str, broken: Path, output: Path) -> None:
        edit, said = (FOLDERS | WITHOUT_WEIGHTS)[name]
        edit(broken)
        message = refuse(broken, output, str(broken), *said.split(" … "))
        assert STEP.search(message), message
        if name in WITHOUT_WEIGHTS:
            assert said.split(" … ")[0] in invoke("list-tensors", broken).stderr

    @pytest.mark.parametrize("name", [*WITHOUT_WEIGHTS][:5])
    def test_without_a_config(self, name: str, broken: Path, output: Path) -> None:
        edit, said = WITHOUT_WEIGHTS[name]
        edit(broken)
        (broken / "config.json").unlink()
        refuse(broken, output, str(broken), *said.split(" … "))


class TestNulls:
    """Where transformers writes null, nothing is set: the value outside counts, or the default."""

    def test_inside_do_not_hide_what_is_outside(
        self, models: Models, tmp_path: Path, output: Path
    ) -> None:
        model = models.copy(NESTED, tmp_path)

        def edit(config: dict[str, Any]) -> None:
            inner = config["text_config"]
            for key in ("vocab_size", "hidden_size", "rope_parameters", "mtp_num_hidden_layers"):
                config[key], inner[key] = inner[key], None
            inner |= {"architectures": None, "pad_token_id": None, "quantization_config": None}

        edit_json(model / "config.json", edit)
        same_as(models.checkpoint(NESTED), model, output)

    def test_of_the_architecture(self, models: Models, broken: Path, output: Path) -> None:
        """The type of the model is as clear."""
        edit_json(broken / "config.json", lambda c: c.update(architectures=None))
        same_as(models.checkpoint(TINY), broken, output)

    def test_of_values_with_a_default(self, models: Models, broken: Path, output: Path) -> None:
        def edit(config: dict[str, Any]) -> None:
            config |= dict.fromkeys(("rms_norm_eps", "quantization_config", "rope_scaling"))
            config["tie_word_embeddings"] = None
            config["rope_parameters"]["mrope_section"] = None

        edit_json(broken / "config.json", edit)
        same_as(models.checkpoint(TINY), broken, output)

    @pytest.mark.parametrize(("outside", "inside"), [(True, False), (True, None), (None, True)])
    def test_tied_by_the_outer_config(
        self,
        outside: bool | None,
        inside: bool | None,
        models: Models,
        tmp_path: Path,
        output: Path,
    ) -> None:
        spec = replace(NESTED, name="tied", tied=True)
        model = models.copy(spec, tmp_path)
        tied = {"tie_word_embeddings": inside}
        edit_json(model / "config.json", lambda config: config["text_config"].update(tied))
        edit_json(model / "config.json", lambda config: config.update(tie_word_embeddings=outside))
        same_as(models.checkpoint(spec), model, output)
        (output / "x.gguf").unlink()
        edit_json(model / "config.json", lambda config: config.update(tie_word_embeddings=False))
        refuse(model, output, "tie_word_embeddings is false", "lm_head.weight")


class TestRope:
    @pytest.mark.parametrize(
        ("change", "key", "value"),
        [
            ({"rope_parameters": {}}, "rope.freq_base", 10000.0),
            ({"rope_parameters": {}, "rope_theta": 5e5}, "rope.freq_base", 5e5),
            (
                {"rope_parameters": {"type": "yarn", "factor": 4, "attn_factor": 0.5}},
                "rope.scaling.yarn_attn_factor",
                0.5,
            ),
            (
                {"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 1.5}},
                "rope.scaling.yarn_attn_factor",
                1.5,
            ),
            (  # the length that was trained is the length there is
                {"rope_scaling": {"type": "yarn", "factor": 4}},
                "rope.scaling.original_context_length",
                262144,
            ),
        ],
    )
    def test_as_transformers_reads_it(
        self, change: dict[str, Any], key: str, value: float, broken: Path, output: Path
    ) -> None:
        edit_json(broken / "config.json", lambda c: c.update(change))
        converted(broken, output / "x.gguf", "--quant", "F16")
        assert value_of(output / "x.gguf", f"qwen35.{key}") == value


class TestPointers:
    """Git LFS leaves a pointer file in place of a file that was not fetched."""

    @pytest.mark.parametrize(
        "name",
        [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "model.safetensors",
        ],
    )
    def test_of_a_checkpoint(self, name: str, broken: Path, output: Path) -> None:
        (broken / name).write_text(POINTER)
        refuse(broken, output, str(broken / name), "Git LFS pointer", "git lfs pull")
        result = invoke("doctor", broken)
        assert result.exit_code == 1
        assert "Git LFS pointer" in result.output

    def test_of_other_files(self, broken: Path, output: Path) -> None:
        file = output / "pointer.gguf"
        file.write_text(POINTER)
        refuse(broken, output, str(file), "Git LFS pointer", options=("--imatrix", file))
        for command in ("list-tensors", "doctor"):
            result = invoke(command, file)
            assert result.exit_code == 1
            assert "Git LFS pointer" in result.output + result.stderr


class TestModelCard:
    @pytest.mark.parametrize(
        ("card", "key", "value"),
        [
            ("version: 1.2", "version", "1.2"),
            ("version: 1.10", "version", "1.10"),
            ("version: 2024-01-02", "version", "2024-01-02"),
            ("model_name: 42", "name", "42"),
            ("language: no", "languages", ["no"]),
            ("language: [no, en]", "languages", ["no", "en"]),
            ("license: null\ntags: [1, 2.5, true]", "tags", ["1", "2.5", "true"]),
            ("license: apache-2.0", "license", "apache-2.0"),
            ("- no\n- fields", "license", None),
        ],
    )
    def test_says_what_is_written(
        self, card: str, key: str, value: object, broken: Path, output: Path
    ) -> None:
        (broken / "README.md").write_text(f"---\n{card}\n---\n# Card\n", encoding="utf-8")
        converted(broken, output / "x.gguf", "--quant", "F16")
        assert value_of(output / "x.gguf", f"general.{key}") == value

    @pytest.mark.parametrize(
        "card", ["author: [a, b]", "tags: [a, null]", "tags: [{a: b}]", 'model_name: "\\ud800"']
    )
    def test_with_something_else(
        self, card: str, broken: Path, output: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (broken / "README.md").write_text(f"---\n{card}\n---\n", encoding="utf-8")
        converted(broken, output / "x.gguf", "--quant", "F16")
        assert re.search(r"README.md: .* found: general\..*: expected text", caplog.text)
        for key in ("author", "tags"):
            assert value_of(output / "x.gguf", f"general.{key}") is None

    @pytest.mark.parametrize(
        "card", [b"---\na: [\n---\n", b"---\nlicense: {\n", b"---\n\t- x: @\n", b"\xff", POINTER]
    )
    def test_that_cannot_be_parsed(
        self, card: bytes | str, broken: Path, output: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (broken / "README.md").write_bytes(card.encode() if isinstance(card, str) else card)
        converted(broken, output / "x.gguf", "--quant", "F16")
        assert "README.md: expected a model card, found: " in caplog.text

    @pytest.mark.parametrize("origin", [5, [], None])
    def test_of_a_config_with_another_origin(
        self, origin: object, broken: Path, output: Path
    ) -> None:
        edit_json(broken / "config.json", lambda c: c.update(_name_or_path=origin))
        converted(broken, output / "x.gguf", "--quant", "F16")


class TestOlderImatrix:
    """`imatrix.dat`, what llama-imatrix wrote before GGUF, and writes yet where it is asked to."""

    @staticmethod
    def write(path: Path, spec: Spec, *, tail: bool = True) -> Path:
        """Means times the number of calls, as IMatrixCollector::save_imatrix_legacy has it."""
        entries = imatrix_entries(spec)
        data = struct.pack("<i", len(entries))
        for name, (sums, counts) in entries.items():
            seen = counts[:, None] > 0
            means = np.where(seen, sums / np.where(seen, counts[:, None], 1), 1).astype("<f4")
            data += struct.pack("<i", len(name)) + name.encode()
            data += struct.pack("<ii", CHUNKS, means.size) + (means * CHUNKS).tobytes()
        if tail:
            data += struct.pack("<ii", CHUNKS, len(DATASET)) + DATASET.encode()
        path.write_bytes(data)
        return path

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("spec", [SMALL, SPECS["moe-fused"]], ids=lambda spec: spec.name)
    def test_imatrix_weights_equal_those_of_a_gguf(
        self, spec: Spec, models: Models, output: Path
    ) -> None:
        model = models.checkpoint(spec)
        for name, imatrix in (
            ("new", write_imatrix(output / "imatrix.gguf", spec)),
            ("old", self.write(output / "imatrix.dat", spec)),
            ("bare", self.write(output / "bare.dat", spec, tail=False)),
        ):
            converted(model, output / f"{name}.gguf", "--quant", "IQ4_XS", "--imatrix", imatrix)
        new, old, bare = (output / f"{name}.gguf" for name in ("new", "old", "bare"))
        assert not differing(tensors_of(new), tensors_of(old))
        assert not differing(tensors_of(new), tensors_of(bare))
        for key in ("dataset", "entries_count", "chunks_count"):
            found = [value_of(path, f"quantize.imatrix.{key}") for path in (new, old)]
            assert found[0] == found[1] is not None
        assert value_of(bare, "quantize.imatrix.chunks_count") is None

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda data: data[:-3], ("the name of the dataset",)),
            (lambda data: data[:1000], ("the values of",)),
            (lambda data: struct.pack("<i", -1) + data[4:], ("no entries",)),
            (lambda data: data[:4] + struct.pack("<i", -9) + data[8:], ("the name of entry 0",)),
            (lambda data: data[:4] + struct.pack("<i", 1 << 30) + data[8:], ("1073741824 bytes",)),
            (lambda data: data[:-27] + b"\0\0\xc0\x7f" + data[-23:], ("NaN",)),
        ],
    )
    def test_broken(
        self, change: Callable[[bytes], bytes], words: tuple[str, ...], models: Models, output: Path
    ) -> None:
        path = self.write(output / "imatrix.dat", SMALL)
        path.write_bytes(change(path.read_bytes()))
        options = ("--imatrix", path)
        refuse(models.checkpoint(SMALL), output, "imatrix.dat", *words, options=options)

    @pytest.mark.parametrize("suffix", ["dat", "gguf"])
    def test_of_another_model(self, suffix: str, models: Models, output: Path) -> None:
        write = self.write if suffix == "dat" else write_imatrix
        path = write(output / f"imatrix.{suffix}", replace(SMALL, hidden=512))
        words = "--imatrix", "[256, 1]", "[512, 1]", "made for another model?"
        refuse(models.checkpoint(SMALL), output, *words, options=("--imatrix", path))


def test_json_is_read_as_utf_8(broken: Path, output: Path) -> None:
    """A folder, a pipe or another encoding in the place of a file is one sentence."""
    path = broken / "generation_config.json"
    text = path.read_text(encoding="utf-8")
    path.write_bytes(json.dumps(json.loads(text)).encode("utf-16"))
    refuse(broken, output, "generation_config.json", "UTF-8")
    path.unlink()
    path.mkdir()
    converted(broken, output / "x.gguf", "--quant", "F16")  # no file, no defaults
