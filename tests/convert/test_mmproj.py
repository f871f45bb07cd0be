"""`convert --mmproj`: the bytes of `convert_hf_to_gguf.py --mmproj`, and what the tools know of it.

The checkpoints are saved by transformers (`Qwen3_5ForConditionalGeneration.save_pretrained`).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.hub import remote
from mtp_gguf.gguf_tools.model import Metadata
from support.checkpoint_edits import edit_json, edit_tensors, read_tensors
from support.checkpoints import TINY, Spec, write_safetensors
from support.commands import check_refusal, held, invoke, spawn
from support.conversions import converted, refused
from support.gguf_files import edited, tensors_of
from support.hub_commands import environment
from support.hub_server import Hub
from support.models import Models
from support.upstream.convert_upstream import convert as convert_upstream
from support.vision_models import write_vision_checkpoint

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra"),
]

TEXT = replace(TINY, mtp=False)
MIXTURE = replace(TEXT, name="mixture", experts=4, experts_per_token=2)
TYPES = ("F16", "BF16", "F32", "Q8_0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("vision") / "seeing", TEXT)


def upstream(model: Path, out: Path, kind: str) -> bytes:
    return convert_upstream(model, out, kind.lower(), ["--mmproj"]).read_bytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", TYPES)
def test_upstream_bytes(kind: str, model: Path, output: Path) -> None:
    theirs = upstream(model, output / "theirs.gguf", kind)
    result = invoke("convert", model, "--mmproj-only", "--mmproj", kind, "-o", output / "ours.gguf")
    assert result.exit_code == 0, result.output
    assert "projector qwen3vl_merger, 2 layers, for models with embeddings of 64" in result.output
    assert (output / "ours.gguf").read_bytes() == theirs


@pytest.mark.parametrize(
    ("spec", "tower", "dtype"),
    [
        pytest.param(MIXTURE, {"depth": 1, "hidden_size": 48, "num_heads": 3}, "float32", id="moe"),
        pytest.param(TEXT, {"num_position_embeddings": 49, "patch_size": 14}, "float16", id="f16"),
    ],
)
def test_other_towers(
    spec: Spec, tower: dict[str, int], dtype: str, output: Path, tmp_path: Path
) -> None:
    sizes = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
    sizes |= {"num_position_embeddings": 64, "patch_size": 16, **tower}
    model = write_vision_checkpoint(tmp_path / "model", spec, sizes, dtype)
    for kind in TYPES:
        ours = output / f"{kind}.gguf"
        converted(model, ours, "--mmproj-only", "--mmproj", kind)
        assert ours.read_bytes() == upstream(model, output / "theirs.gguf", kind), kind


def test_with_the_model_from_one_read(model: Path, output: Path) -> None:
    """Both files at once, the model's with the bytes that it has alone."""
    both, alone = output / "both.gguf", output / "alone.gguf"
    result = invoke("convert", model, "--no-mtp", "-o", both, "--mmproj", "--also", "Q8_0")
    assert result.exit_code == 0, result.output
    assert "source tensors skipped" not in result.output
    vision = output / "mmproj-both.gguf"
    assert vision.read_bytes() == upstream(model, output / "theirs.gguf", "F16")
    result = invoke("convert", model, "--no-mtp", "-o", alone, "--also", "Q8_0")
    assert "--mmproj writes it into a file of its own" in result.output
    assert both.read_bytes() == alone.read_bytes()
    named = [(output / f"{name}-Q8_0.gguf").read_bytes() for name in ("both", "alone")]
    assert named[0] == named[1]


def test_names_in_a_folder(model: Path, output: Path) -> None:
    """A folder as the output: the name that upstream gives the file."""
    upstream(model, output / "mmproj-theirs.gguf", "Q8_0")
    (output / "mmproj-theirs.gguf").unlink()
    for arguments in (["--mmproj-only", "--mmproj", "q8_0"], ["--mmproj", "--no-mtp"]):
        assert invoke("convert", model, "-o", output, *arguments).exit_code == 0
    names = sorted(path.name for path in output.glob("mmproj-*"))
    assert names == ["mmproj-Seeing-F16.gguf", "mmproj-Seeing-Q8_0.gguf"]
    assert "v.patch_embd.weight.1" in tensors_of(output / names[0])


def test_plans(model: Path, output: Path) -> None:
    result = invoke("convert", model, "--no-mtp", "--mmproj", "--dry-run", "--json", "-o", output)
    plan = json.loads(result.output)["also"][0]
    assert {t["part"] for t in plan["tensors"]} == {"vision tower"}
    result = invoke("convert", model, "--mmproj-only", "--dry-run", "-o", output / "x.gguf")
    lines = [line.split()[:4] for line in result.output.splitlines()]
    source = "model.visual.patch_embed.proj.weight"
    assert [source, "->", "v.patch_embd.weight.1", "F16"] in lines
    assert not [*output.iterdir()]


@pytest.mark.thorough
def test_only_its_shards_from_the_hub(model: Path, output: Path, tmp_path: Path) -> None:
    """--mmproj-only downloads the shards of the tower, a conversion without it the others."""
    name = "somebody/Seeing"
    folder = shutil.copytree(model, tmp_path / "Seeing")
    tensors = read_tensors(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {n: "2-vision" if "visual" in n else "1-text" for n in tensors}
    for file in ("1-text", "2-vision"):
        held = {n: t for n, t in tensors.items() if files[n] == file}
        write_safetensors(folder / f"{file}.safetensors", held)
    index = {"weight_map": {n: f"{file}.safetensors" for n, file in files.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with Hub(name, {"main": folder}) as hub:
        kept = environment(hub, tmp_path / "home")
        for option, wanted in (("--mmproj-only", "2-vision"), ("--no-mtp", "1-text")):
            hub.requests.clear()
            with spawn("convert", name, "-o", output / "x.gguf", option, env=kept) as process:
                _, stderr = process.communicate(timeout=120)
            assert process.returncode == 0, stderr
            weights = {f for f in hub.fetched() if f.endswith(".safetensors")}
            assert weights == {f"{wanted}.safetensors"}
            (output / "x.gguf").unlink()


@pytest.mark.thorough
def test_with_all_types_from_one_read_of_the_hub(model: Path, output: Path, tmp_path: Path) -> None:
    name = "somebody/Seeing"
    words = ("--quant", "Q4_K_M", "--also", "Q6_K,Q8_0", "--no-mtp", "--mmproj", "-o", "x.gguf")
    files: list[dict[str, bytes]] = []
    with Hub(name, {"main": model}) as hub:
        env = environment(hub, tmp_path / "home")
        for source, stream in ((name, ["--stream"]), (model, [])):
            folder = output / f"{len(files)}"
            folder.mkdir()
            with spawn("convert", source, *words, *stream, env=env, cwd=folder) as process:
                _, stderr = process.communicate(timeout=120)
            assert process.returncode == 0, stderr
            files.append(held(folder))
    assert files[0] == files[1]
    assert len(files[0]) == 4
    # The header is part of a first request.
    once = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert hub.weights_sent <= once + remote._BLOCK_BYTES


# ---------------------------------------------------------------------------------- bad inputs


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "broken")


def test_fine_tunes_without_a_tower(broken: Path, output: Path) -> None:
    edit_json(broken / "config.json", lambda c: c.update(vision_config=None))
    arguments = [broken, "--mmproj-only", "-o", output]
    refused(arguments, "expected a vision tower, found no vision_config", output=output)
    refused([broken, "--no-mtp", "--mmproj", "-o", output], "vision tower", output=output)


def test_text_models(models: Models, output: Path) -> None:
    refused(
        [models.checkpoint(TINY), "--mmproj", "-o", output],
        "expected a vision tower",
        output=output,
    )


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"out_hidden_size": 63}, "out_hidden_size: expected 64, the language model's"),
        ({"depth": 3}, "vision tower is incomplete: blocks.2.norm1.weight"),
        ({"depth": 1}, "model.visual.blocks.1."),
        ({"depth": "2"}, "vision_config: depth: expected a whole number"),
        ({"hidden_size": 32}, "expected shape"),
        ({"temporal_patch_size": 1}, "temporal_patch_size: expected 2"),
        ({"deepstack_visual_indexes": [0]}, "deepstack_visual_indexes: expected none"),
        ({"num_heads": 3}, "hidden_size: expected a multiple of num_heads"),
    ],
)
def test_contradictions(edit: dict[str, object], words: str, broken: Path, output: Path) -> None:
    edit_json(broken / "config.json", lambda c: c["vision_config"].update(edit))
    refused([broken, "--mmproj-only", "-o", output], words, output=output)


@pytest.mark.parametrize("mean", [None, [0.5], "half", [0.5, 0.5, 1e300], [True, 0, 0]])
def test_processors(mean: object, broken: Path, output: Path) -> None:
    edit_json(broken / "preprocessor_config.json", lambda c: c.update(image_mean=mean))
    words = "image_mean of preprocessor_config.json or processor_config.json: expected 3 numbers"
    refused([broken, "--mmproj-only", "-o", output], words, output=output)
    (broken / "preprocessor_config.json").unlink()
    refused([broken, "--mmproj-only", "-o", output], "found none", output=output)


def test_incomplete_towers(broken: Path, output: Path) -> None:
    edit_tensors(broken, lambda t: t.pop("model.visual.merger.norm.bias"))
    words = "the vision tower is incomplete: merger.norm.bias is missing"
    refused([broken, "--mmproj-only", "-o", output], words, output=output)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mmproj", "Q4_K"], "expected one of F16, BF16, F32, Q8_0; found 'Q4_K'"),
        (["--mmproj-only", "--fastmtp"], "cannot be combined"),
        (["--mmproj-only", "--no-mtp"], "cannot be combined"),
    ],
)
def test_options(options: list[str], words: str, model: Path, output: Path) -> None:
    refused([model, "-o", output, *options], words, output=output, code=2)


def test_gguf_sources(model: Path, output: Path) -> None:
    converted(model, output / "model.gguf", "--no-mtp", "--quant", "BF16")
    arguments = [output / "model.gguf", "--mmproj", "-o", output / "x.gguf"]
    refused(arguments, "--mmproj needs the original checkpoint", output=output, code=2)


# -------------------------------------------------------------------------------- other commands


@pytest.fixture(scope="module")
def files(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its towers in two types."""
    folder = tmp_path_factory.mktemp("files")
    converted(model, folder / "model.gguf", "--no-mtp", "--quant", "BF16", "--mmproj", "F32")
    converted(model, folder / "half.gguf", "--mmproj-only")
    return folder


def test_listing(files: Path) -> None:
    result = invoke("list-tensors", files / "mmproj-model.gguf")
    line = "vision tower (mmproj), projector qwen3vl_merger, 2 layers, for models with embeddings"
    assert f"{line} of 64 (" in result.output
    listed = json.loads(invoke("list-tensors", files / "half.gguf", "--json").output)
    assert listed["tower"]["width"] == 64
    assert {t["part"] for t in listed["tensors"]} == {"vision tower"}


def test_comparing(files: Path, model: Path, output: Path) -> None:
    both = invoke("compare", files / "mmproj-model.gguf", files / "half.gguf")
    assert both.exit_code == 0, both.output
    original = invoke("compare", files / "half.gguf", model)
    assert original.exit_code == 0, original.output
    assert "0 keys of the metadata differ" in original.output
    wrong = invoke("compare", files / "model.gguf", files / "half.gguf")
    assert wrong.exit_code == 1
    assert "Traceback" not in wrong.output


def test_file_tools_refuse_towers(files: Path, output: Path) -> None:
    for command in ("extract", "strip"):
        result = invoke(command, files / "half.gguf", "-o", output / "x.gguf")
        check_refusal(result.exit_code, result.stderr, "clip")


def examined(*arguments: object, code: int) -> dict[str, object]:
    """What `doctor --json` says."""
    result = invoke("doctor", *arguments, "--json")
    assert result.exit_code == code, result.output
    fields: dict[str, object] = json.loads(result.output)
    return fields


def test_doctor_of_towers(files: Path, output: Path) -> None:
    alone = invoke("doctor", files / "half.gguf")
    assert alone.exit_code == 0, alone.output
    assert "half.gguf: vision tower (mmproj), projector qwen3vl_merger, 2 layers" in alone.output
    assert not examined(files / "half.gguf", code=0)["can_draft"]
    broken = edited(files / "half.gguf", output / "x.gguf", tensors=lambda t: t.pop("mm.2.bias"))
    found = examined(broken, code=1)["findings"]
    assert "incomplete: mm.2.bias is missing" in str(found)

    def many(keys: Metadata) -> None:
        keys["clip.vision.block_count"] = Value(ValueType.U32, 1 << 31)

    broken = edited(files / "half.gguf", output / "y.gguf", metadata=many)
    found = examined(broken, code=1)["findings"]
    assert "block_count: expected a number from 1 to 512, found 2147483648" in str(found)


def test_doctor_of_pairs(files: Path, models: Models, output: Path) -> None:
    head_model = models.convert(TINY)
    fields = examined(head_model, "--mmproj", files / "half.gguf", code=0)
    assert fields["can_draft"]
    result = invoke("doctor", head_model, "--mmproj", files / "half.gguf")
    assert "sees pictures: vision tower" in result.output
    wide = models.convert(replace(TINY, name="wide", hidden=96))
    fields = examined(wide, "--mmproj", files / "half.gguf", code=1)
    assert fields["can_draft"]  # without pictures
    assert "a model with embeddings of 96, found one for 64" in str(fields["findings"])
    fields = examined(head_model, "--mmproj", head_model, code=1)
    assert "expected an mmproj file, found architecture 'qwen35'" in str(fields["findings"])

    def other(keys: Metadata) -> None:
        keys["clip.projector_type"] = Value(ValueType.STRING, "pixtral")

    foreign = edited(files / "half.gguf", output / "x.gguf", metadata=other)
    fields = examined(head_model, "--mmproj", foreign, code=1)
    assert "expected the projector qwen3vl_merger for qwen35, found pixtral" in str(fields)
