"""`doctor --explain` names why drafting does not pay; each cause is produced here on purpose."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.bench.explain import Cause, Measured, Usage, causes
from mtp_gguf.bench.quality import Drafting
from mtp_gguf.gguf_tools.doctor import diagnose
from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import TensorCopy
from mtp_gguf.gguf_tools.model import Metadata, open_model
from support.checkpoints import SPECS
from support.commands import check_refusal, invoke, succeed
from support.gguf_files import edited, numbers_of, permute_projection, with_numbers
from support.models import Models

MACHINE = {"verification", "experts-on-cpu"}  # what this machine's load can decide
PAYS = Measured(
    Drafting((0.8, 0.6, 0.4), 2, 30.0, 20.0, (50.0, 55.0, 60.0, 65.0)), 0.8, None, 0.8, 0.0, None,
    (), (),
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(models: Models) -> Path:
    return models.convert("demo", "--mtp-f16")


def explained(model: Path, *options: object) -> dict[str, Any]:
    """The JSON of --explain."""
    result = invoke("doctor", model, "--explain", "--temp", 0, "--json", *options)
    assert result.exit_code in (0, 1), result.output + repr(result.exception)
    fields: dict[str, Any] = json.loads(result.stdout)["explain"]
    return fields


def only(model: Path, *options: object) -> dict[str, Any]:
    """The only cause that does not depend on the load of this machine."""
    found = explained(model, *options)["causes"]
    [cause] = [each for each in found if each["code"] not in MACHINE]
    assert cause["text"]
    assert cause["fix"].startswith("mtp-gguf ")
    assert cause["measured"]
    fields: dict[str, Any] = cause
    return fields


def of(model: Path, measured: Measured, usage: Usage) -> list[Cause]:
    """The causes of a file by measurements that are given."""
    with open_model(model) as opened:
        return causes(opened, opened, diagnose(opened, None, 512, 3), measured, usage)


def test_a_model_that_drafts_well(whole: Path) -> None:
    found = explained(whole)
    assert {cause["code"] for cause in found["causes"]} <= MACHINE
    measured = found["measured"]
    assert measured["first"] > 0.5
    assert measured["at_temperature"] == measured["first"]  # greedy
    assert len(measured["drafting"]["acceptance"]) == 3
    assert len(measured["drafting"]["verify"]) == 4
    assert measured["gain"] >= 1
    text = succeed("doctor", whole, "--explain", "--temp", 0)
    assert "measured: acceptance by position" in text
    assert of(whole, PAYS, Usage(0)) == []


def test_no_head(whole: Path, tmp_path: Path) -> None:
    trunk = tmp_path / "trunk.gguf"
    succeed("strip", whole, "-o", trunk)
    assert only(trunk)["code"] == "no-head"
    assert explained(trunk)["measured"] is None
    output = invoke("doctor", trunk, "--explain").output
    assert f"  fix: mtp-gguf graft {trunk} --from ORIGINAL" in output


def test_the_head_of_another_fine_tune(whole: Path, tmp_path: Path) -> None:
    cause = only(edited(whole, tmp_path / "other.gguf", tensors=permute_projection))
    assert cause["code"] == "other-fine-tune"
    assert cause["measured"]["acceptance"] < 0.15


def test_a_norm_raised_twice(whole: Path, tmp_path: Path) -> None:
    def raise_norms(tensors: dict[str, TensorCopy]) -> None:
        for name, tensor in tensors.items():
            if name.startswith("blk.4.") and "norm" in name:
                tensors[name] = with_numbers(tensor, numbers_of(tensor) + 1)

    cause = only(edited(whole, tmp_path / "twice.gguf", tensors=raise_norms))
    assert cause["code"] == "norm-raised-twice"
    assert cause["measured"]["acceptance"] > 0


def test_a_vocabulary_without_the_texts_tokens(models: Models, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(list(range(3900, 4000))))
    path = tmp_path / "model.gguf"
    options = ("--mtp-f16", "--fastmtp-ids", ids, "--fastmtp", 64)
    succeed("convert", models.checkpoint("demo"), "-o", path, *options)
    cause = only(path)
    assert cause["code"] == "draft-vocabulary"
    figures = cause["measured"]
    assert figures["covered"] < 0.2
    assert figures["acceptance"] < 0.3  # a quarter of the list follows the text
    assert figures["without_list"] > 0.5
    words = tmp_path / "words.txt"
    words.write_text("The river is low in summer, and the children walk across it.\n" * 20)
    command = shlex.split(cause["fix"].replace("FILES", str(words)))
    succeed(*command[1:])
    assert explained(path, "--text", words)["measured"]["covered"] == 1


def test_a_list_that_is_made_at_load(models: Models) -> None:
    """Compared with the whole vocabulary, as one in the file is."""
    spec = replace(SPECS["dense-tied"], name="large", hidden=64, vocab_size=32_768)
    path = models.gguf(spec, "Q8_0", "F16")
    found = explained(path)["measured"]
    assert found["covered"] is None
    assert found["whole"] is not None
    [cause] = of(path, replace(PAYS, whole=0.95), Usage(0))
    assert cause.code == "draft-vocabulary"
    assert cause.text == (
        "the draft vocabulary was chosen by id when the file was loaded; first drafts are accepted "
        "80%, 95% over the whole vocabulary"
    )
    assert cause.fix.startswith("mtp-gguf fastmtp add ")
    assert of(path, replace(PAYS, whole=0.85), Usage(0)) == []


def test_a_template_of_another_model(whole: Path, tmp_path: Path) -> None:
    def foreign(keys: Metadata) -> None:
        template = "{% for m in messages %}<|foreign_start|>{{ m.content }}{% endfor %}"
        keys["tokenizer.chat_template"] = Value(ValueType.STRING, template)

    cause = only(edited(whole, tmp_path / "foreign.gguf", metadata=foreign))
    assert cause["code"] == "chat-template"
    assert cause["measured"] == {"markers": "<|foreign_start|>"}


def test_a_high_temperature(whole: Path) -> None:
    cause = only(whole, "--temp", 3)
    assert cause["code"] == "temperature"
    figures = cause["measured"]
    assert figures["temperature"] == 3
    assert figures["acceptance"] < figures["greedy"] - 0.1
    assert cause["fix"] == f"mtp-gguf serve {whole} -- --temp 1.5"
    assert "it samples other, less varied text" in cause["text"]


@pytest.mark.thorough
def test_a_type_that_is_too_small(models: Models) -> None:
    cause = only(models.convert("demo", "--mtp-type", "Q2_K"))
    assert cause["code"] == "head-type"
    assert "Q2_K" in cause["measured"]["types"]
    assert cause["fix"].endswith("--mtp-type Q8_0")


def test_a_context_beyond_training(whole: Path) -> None:
    with open_model(whole) as model:
        trained = model.first.integer("qwen35.context_length") or 0
    cause = only(whole, "--ctx", trained + 1)
    assert cause["code"] == "context"
    assert cause["measured"] == {"context": trained + 1, "trained": trained}
    assert cause["fix"].endswith(f" -c {trained}")


def test_what_the_machine_makes_of_it(whole: Path, models: Models) -> None:
    loses = replace(
        PAYS, drafting=replace(PAYS.drafting, depth=0, tokens_per_second=20.0, verify=(50.0, 90.0))
    )
    [cause] = of(whole, loses, Usage(0))
    assert cause.code == "verification"
    assert cause.measured == {"batch_of_2": 1.8, "gain": 1.0, "best_depth": 0}
    assert cause.fix == f"mtp-gguf tune {whole}"
    experts = models.convert("moe-mixed", "--mtp-f16")
    [cause] = of(experts, loses, Usage(0))
    assert cause.code == "experts-on-cpu"
    assert cause.measured["experts"] == 16
    assert "takes 1.80 times" in cause.text
    on_gpu = replace(loses, gpus=("CUDA0",))
    assert [c.code for c in of(experts, on_gpu, Usage(0, gpu_layers=-1))] == ["verification"]
    [cause] = of(experts, on_gpu, Usage(0))
    assert cause.fix == f"mtp-gguf serve {experts} -ngl -1"
    several = replace(PAYS, gpus=("CUDA0", "CUDA1"))
    [cause] = of(whole, several, Usage(0, gpu_layers=-1))
    assert cause.code == "several-gpus"
    assert cause.measured == {"gpus": 2}
    assert "--split-mode none" in cause.fix


def test_experts_on_the_cpu(models: Models) -> None:
    """What is measured decides, so that a machine on which drafting pays has no cause."""
    found = explained(models.convert("moe-mixed", "--mtp-f16"))
    drafting = found["measured"]["drafting"]
    of_machine = [cause for cause in found["causes"] if cause["code"] in MACHINE]
    assert len(of_machine) == (drafting["depth"] == 0)
    for cause in of_machine:
        assert cause["code"] == "experts-on-cpu"
        assert cause["measured"]["experts"] == 16
        ratio = drafting["verify"][1] / drafting["verify"][0]
        assert cause["measured"]["batch_of_2"] == pytest.approx(ratio)


def test_what_cannot_be_explained(whole: Path, tmp_path: Path, models: Models) -> None:
    result = invoke("doctor", models.checkpoint("demo"), "--explain")
    check_refusal(result.exit_code, result.stderr, "--explain are for GGUF", code=2)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    result = invoke("doctor", whole, "--explain", "--text", short)
    check_refusal(result.exit_code, result.stderr, "tokens, expected 28 or more")
    for option in (("--text", short), ("--temp", 0.5)):
        result = invoke("doctor", whole, *option)
        words = f"{option[0]} is for --explain"
        check_refusal(result.exit_code, result.stderr, words, code=2)
