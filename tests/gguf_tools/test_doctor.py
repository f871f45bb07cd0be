"""The doctor reports every fault by its code, and the command that it prints fixes it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.format import TensorSpec, Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import TensorCopy
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.native import MTPLlama
from mtp_gguf.native.libraries.replay import replays
from support.carried_models import write_model
from support.checkpoint_edits import edit_json, edit_tensors
from support.checkpoints import COVERED, DENSE, MOE, SPECS, Spec
from support.commands import invoke, refused, succeed
from support.gguf_files import (
    TensorEdit,
    differing,
    drop,
    edited,
    numbers_of,
    renumber,
    reshape,
    tensors_of,
    value_of,
)
from support.models import Models

UNIFORM = ("--quant", "Q8_0")
IDS = "mtp_gguf.fastmtp.token_ids"
HEAD = "blk.4."
U32 = partial(Value, ValueType.U32)


def doctor(*arguments: object, code: int) -> dict[str, Any]:
    result = invoke("doctor", *arguments, "--json")
    assert result.exit_code == code, result.output + repr(result.exception)
    fields: dict[str, Any] = json.loads(result.stdout)
    assert fields["format"] == 2
    assert fields["can_draft"] == (code == 0)
    assert bool(fields["runs_with"]) == (code == 0)
    return fields


def codes_of(fields: dict[str, Any]) -> list[str]:
    """The codes of the findings that are more than notes."""
    return [f["code"] for f in fields["findings"] if f["severity"] != "note"]


def fixed(command: str, folder: Path, original: Path) -> Path:
    """Run a `fix` command as printed and return the file that it wrote, which has no fault."""
    before = set(folder.iterdir())
    for part in command.replace("ORIGINAL", shlex.quote(str(original))).split(" && "):
        words = shlex.split(part)
        assert words[0] == "mtp-gguf"
        succeed(*words[1:])
    made = {path for path in folder.iterdir() if path not in before and path.name != "trunk.gguf"}
    [path] = made
    assert doctor(path, code=0)["findings"] == []
    return path


def in_head(name: str, change: Callable[[Any], Any]) -> TensorEdit:
    """Change the numbers of the head's tensors that have `name` in theirs."""
    return renumber(rf"^blk\.4\..*{name}", change)


# ------------------------------------------------------------------------ sound models


@pytest.mark.sample(4)
@pytest.mark.parametrize("spec", [*COVERED, SPECS["dense-f16"]], ids=str)
@pytest.mark.parametrize("options", [(), ("--mtp-f16", "--fastmtp"), ("--mtp-type", "IQ4_XS")])
def test_sound_files(spec: Spec, options: tuple[str, ...], models: Models) -> None:
    fields = doctor(models.convert(spec, *options), "--source", models.checkpoint(spec), code=0)
    assert [f for f in fields["findings"] if f["severity"] != "note"] == []
    program = [command.split()[0] for command in fields["runs_with"]]
    assert program == ["llama-server", "mtp-gguf", "mtp-gguf"]
    assert fields["runs_with"][2].startswith("mtp-gguf generate ")


@pytest.mark.parametrize("spec", COVERED, ids=str)
def test_sound_checkpoints(spec: Spec, models: Models) -> None:
    fields = doctor(models.checkpoint(spec), code=0)
    assert fields["findings"] == []
    assert fields["runs_with"][0].startswith("mtp-gguf convert ")


def test_split_files_and_separate_heads(models: Models, tmp_path: Path) -> None:
    fields = doctor(models.convert(DENSE, "--split-max-size", "1M"), code=0)
    assert any("generate" in command for command in fields["runs_with"])
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    head = models.convert(DENSE, *UNIFORM, "--head-only")
    odd = tmp_path / 'it\'s $(odd) "1".gguf'
    odd.symlink_to(trunk)
    fields = doctor(odd, "--head", head, code=0)
    words = shlex.split(fields["runs_with"][0])
    assert words == ["llama-server", "-m", str(odd), "-md", str(head), "--spec-type", "draft-mtp"]
    assert f"-md {head}" in fields["runs_with"][0]
    assert fields["runs_with"][2].startswith("python: mtp_gguf.native.MTPLlama(")
    code = fields["runs_with"][2].removeprefix("python: mtp_gguf.native.")[:-1] + ", n_ctx=64)"
    with eval(code, {"MTPLlama": MTPLlama}) as llm:
        assert llm.head is not None
    wide = dataclasses.replace(DENSE, name="wide", hidden=320)
    fields = doctor(trunk, "--head", models.convert(wide, *UNIFORM, "--head-only"), code=1)
    assert [f["code"] for f in fields["findings"]] == ["does-not-fit"]
    assert doctor(trunk, "--head", trunk, code=1)["findings"][0]["code"] == "no-head"


def test_a_head_of_another_tokenizer(models: Models, tmp_path: Path, monkeypatch: Any) -> None:
    """The vocabularies have the same size and differ only in their tokens."""
    monkeypatch.chdir(tmp_path)
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    tokens = Value(ValueType.STRING, [f"t{i}" for i in range(1024)])
    head = models.convert(DENSE, *UNIFORM, "--head-only")
    foreign = tmp_path / "foreign.gguf"
    edited(head, foreign, metadata={"tokenizer.ggml.tokens": tokens})
    [finding] = doctor(trunk, "--head", foreign, code=1)["findings"]
    assert finding["code"] == "does-not-fit"
    assert "different tokenizers (1024 tokens differ)" in finding["text"]
    fixed(finding["fix"], tmp_path, models.checkpoint(DENSE))


@pytest.mark.parametrize("layout", ["table", "sidecar"])
def test_layouts_that_stock_cannot_load(layout: str, models: Models) -> None:
    options = (*UNIFORM, "--fastmtp", "100", "--fastmtp-layout", layout)
    fields = doctor(models.convert(DENSE, *options), code=0)
    codes = ["layout", *(["sidecar"] if layout == "sidecar" else [])]
    assert [f["code"] for f in fields["findings"]] == codes
    assert not any(command.startswith("llama-server") for command in fields["runs_with"])
    assert "patched server" in fields["runs_with"][0]
    mark = "libraries of mtp-gguf build-server" if layout == "table" else "MTPLlama("
    assert mark in fields["runs_with"][1]


def test_memory_by_hand(models: Models) -> None:
    model = models.convert(DENSE, "--mtp-f16", "--fastmtp", "128")
    memory = doctor(model, "--context", 1000, "--depth", 2, code=0)["memory"]
    # Head of 256 x (512 + 128 + 128 + 256) + 512 x 256 + 3 x 256 x 256 halves, seven norms.
    norms = 4 * (5 * 256 + 2 * 64)
    assert memory["head"] == 2 * (256 * 1024 + 512 * 256 + 3 * 256 * 256) + norms
    assert memory["cache"] == 2 * (2 * 64) * 2 * (1024 + 256)  # whole buckets, one for drafts
    # Three layers of six value heads of 128 x 128, and three columns of their 1280 channels.
    assert memory["state_copy"] == 3 * 4 * (6 * 128 * 128 + 3 * (6 * 128 + 2 * 2 * 128))
    # k of two heads, delta of six, six decays, and the convolution's inputs.
    assert memory["state_log"] == 3 * 4 * ((2 + 6) * 128 + 6 + (6 * 128 + 2 * 2 * 128))
    assert memory["draft_rows"] == 128 * 210  # tied, rows of 256 in Q6_K
    rest = memory["head"] + memory["cache"] + memory["draft_rows"]
    assert memory["total"] == rest + 2 * memory["state_copy"]
    assert memory["total_by_replay"] == rest + 2 * memory["state_log"]


@pytest.mark.sample(5)
@pytest.mark.parametrize("spec", COVERED, ids=str)
@pytest.mark.parametrize("options", [("--fastmtp", "128"), ()])
def test_memory_is_what_a_session_takes(
    spec: Spec, options: tuple[str, ...], models: Models, capfd: pytest.CaptureFixture[str]
) -> None:
    path = models.convert(spec, "--mtp-f16", *options)
    memory = doctor(path, "--context", 700, "--depth", 2, code=0)["memory"]
    states = []
    for depth in (0, 2):
        capfd.readouterr()
        with MTPLlama(str(path), n_ctx=700, depth=depth, verbose=True) as llm:
            log = capfd.readouterr().err
            states.append(float(re.findall(r"RS buffer size = +([\d.]+) MiB", log)[0]))
            head = llm.head
    assert head is not None
    rows = memory["draft_rows"] if options else memory["whole_rows"]
    taken = head.weight_bytes + head.mapped_bytes
    assert taken == memory["head"] + rows
    assert head.cache_bytes == memory["cache"]
    copies = (states[1] - states[0]) * (1 << 20)  # the log rounds to a hundredth
    if spec.family == "qwen3_next":  # one copy, which the session keeps
        assert (copies, memory["copies"]) == (0, 1)
        return
    kept = memory["state_log" if replays("qwen35", 0) else "state_copy"]
    assert copies == pytest.approx(2 * kept, abs=0.011 * (1 << 20))


def test_the_report_reads_well(models: Models) -> None:
    output = succeed("doctor", models.convert(DENSE, "--mtp-f16", "--fastmtp"))
    assert "can draft\n" in output
    assert "head: block 4 (8 F16)" in output
    assert "extra memory at 8192 positions, depth 3: " in output
    assert "on a CPU with our patches: " in output
    assert "note: the draft vocabulary is not counted on text" in output


# ------------------------------------------------------------------ faults of GGUF files


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("code", "metadata", "tensors"),
    [
        ("claimed-head", None, drop(HEAD)),
        ("incomplete-head", None, drop(HEAD + "nextn.eh_proj", HEAD + "ffn_up")),
        ("hidden-head", {"qwen35.nextn_predict_layers": None}, None),
        ("hidden-head", {"qwen35.nextn_predict_layers": U32(0)}, None),
        ("block-count", {"qwen35.block_count": U32(4)}, None),
        ("block-count", {"qwen35.block_count": U32(6)}, None),
        (
            "recurrent-layers",
            {"qwen35.attention.recurrent_layers": Value(ValueType.BOOL, [True] * 3 + [False])},
            None,
        ),
        ("head-shape", None, reshape(HEAD + "nextn.eh_proj.weight", lambda shape: shape[::-1])),
        ("not-finite", None, in_head("nextn.enorm", lambda w: w * np.nan)),
    ],
)
def test_faults_and_their_cure(
    code: str, metadata: Any, tensors: Any, models: Models, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = models.convert(DENSE, *UNIFORM, "--mtp-f16")
    broken = edited(whole, tmp_path / "b.gguf", metadata=metadata, tensors=tensors)
    fields = doctor(broken, code=1)
    assert codes_of(fields) == [code]
    cured = fixed(fields["findings"][0]["fix"], tmp_path, whole)
    assert cured.read_bytes()[-1000:] == whole.read_bytes()[-1000:]


def test_two_mtp_layers(models: Models, tmp_path: Path, monkeypatch: Any) -> None:
    """As llama.cpp's converter writes them: the second block has no nextn tensors."""
    monkeypatch.chdir(tmp_path)
    whole = models.convert(DENSE, *UNIFORM, "--mtp-type", "F16")
    claim = {
        "qwen35.nextn_predict_layers": U32(2),
        "qwen35.block_count": U32(6),
        "qwen35.attention.recurrent_layers": Value(ValueType.BOOL, [True] * 3 + [False] * 3),
    }

    def double(tensors: dict[str, TensorCopy]) -> None:
        for name in [n for n in tensors if n.startswith(HEAD) and "nextn" not in n]:
            copy = tensors[name]
            other = name.replace(HEAD, "blk.5.")
            spec = dataclasses.replace(copy.spec, name=other)
            tensors[other] = dataclasses.replace(copy, spec=spec)

    two = edited(whole, tmp_path / "two.gguf", metadata=claim, tensors=double)
    [finding] = doctor(two, code=1)["findings"]
    assert finding["code"] == "layers"
    assert "expected 1 MTP layer, found 2 by qwen35.nextn_predict_layers" in finding["text"]
    assert "(blocks 4 to 5)" in finding["text"]
    words = ("expected one MTP layer", f"mtp-gguf doctor {two}")
    for command in (("extract", two), ("convert", two), ("convert", two, "--head-only")):
        refused(tmp_path, *command, "-o", tmp_path / "x.gguf", words=words)
    cured = fixed(finding["fix"], tmp_path, tmp_path / "no other model is needed")
    assert not differing(tensors_of(cured), tensors_of(whole))
    assert value_of(cured, "qwen35.block_count") == 5


def test_a_file_without_a_head(models: Models, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    spec = SPECS["dense-tied"]  # whose model card names what it was tuned from
    trunk = models.convert(spec, *UNIFORM, "--no-mtp")
    finding, note = doctor(trunk, code=1)["findings"]
    assert (finding["code"], note["code"], note["severity"]) == ("no-head", "from-text", "note")
    assert finding["fix"].endswith("--from ORIGINAL")
    fixed(finding["fix"], tmp_path, models.checkpoint(spec))

    quantized = {"general.quantized_by": Value(ValueType.STRING, "somebody")}
    edited(trunk, tmp_path / "q.gguf", metadata=quantized)
    finding, _ = doctor(tmp_path / "q.gguf", code=1)["findings"]
    assert finding["fix"].endswith("--from example/Tiny-Base")


def halve_experts(tensors: dict[str, TensorCopy]) -> None:
    for name in [n for n in tensors if n.startswith("blk.3.ffn_") and "_exps." in n]:
        reshape(name, lambda shape: (*shape[:-1], shape[-1] // 2))(tensors)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("edit", "code", "words"),
    [
        (drop("blk.3.ffn_up_exps"), "incomplete-head", "half present: ffn_up_exps.weight"),
        (halve_experts, "head-shape", "ffn_gate_exps.weight: expected shape"),
    ],
    ids=["one missing", "half of each"],
)
def test_half_of_the_experts(
    edit: TensorEdit, code: str, words: str, models: Models, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = models.convert(MOE, *UNIFORM)
    findings = doctor(edited(whole, tmp_path / "b.gguf", tensors=edit), code=1)["findings"]
    assert {f["code"] for f in findings} == {code}
    assert any(words in f["text"] for f in findings), findings
    fixed(findings[0]["fix"], tmp_path, whole)


@pytest.mark.parametrize(
    ("change", "code"),
    [(lambda w: w - 1, "norm-not-raised"), (lambda w: w + 1, "norm-raised-twice")],
)
def test_norms_are_suspected_and_measured(
    change: Any, code: str, models: Models, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = models.convert(DENSE, *UNIFORM)
    broken = edited(whole, tmp_path / "b.gguf", tensors=in_head("norm.weight", change))
    [finding] = doctor(broken, code=0)["findings"]
    assert (finding["code"], finding["severity"]) == (code, "warning")
    fields = doctor(broken, "--source", models.checkpoint(DENSE), code=1)
    assert {f["code"] for f in fields["findings"]} == {code}
    assert {f["severity"] for f in fields["findings"]} == {"fault"}
    assert len(fields["findings"]) == 7
    cured = fixed(fields["findings"][0]["fix"], tmp_path, whole)
    assert cured.read_bytes() == whole.read_bytes()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda w: np.roll(w, 256, axis=1), "eh-proj-swapped", "halves swapped"),
        (lambda w: w.T.reshape(w.shape), "eh-proj-transposed", "column by column"),
    ],
    ids=["swapped", "transposed"],
)
@pytest.mark.parametrize("head", ["F32", "Q8_0"])
def test_the_projection_is_measured(
    change: Any, code: str, words: str, head: str, models: Models, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = edited(
        models.convert(DENSE, "--quant", "F32", "--mtp-type", "F32"),
        tmp_path / "plain.gguf",
        tensors=in_head("eh_proj", change),
    )
    broken = plain if head == "F32" else requantized(plain, tmp_path / "b.gguf")
    assert doctor(broken, code=0)["findings"] == []
    fields = doctor(broken, "--source", models.checkpoint(DENSE), code=1)
    [finding] = fields["findings"]
    assert finding["code"] == code
    assert words in finding["text"]
    cured = fixed(finding["fix"], tmp_path, models.checkpoint(DENSE))
    assert doctor(cured, "--source", models.checkpoint(DENSE), code=0)["findings"] == []


def requantized(source: Path, target: Path) -> Path:
    """A copy whose eh_proj is Q8_0, like a published file."""

    def quantize(tensors: dict[str, TensorCopy]) -> None:
        name = HEAD + "nextn.eh_proj.weight"
        tensor = tensors[name]
        packed = gguf.quants.quantize(numbers_of(tensor), gguf.GGMLQuantizationType.Q8_0)
        spec = TensorSpec(name, tensor.spec.shape, BY_NAME["Q8_0"])
        tensors[name] = TensorCopy(spec, data=packed.tobytes())

    return edited(source, target, tensors=quantize)


def matrices(value: float, *names: str) -> Callable[[dict[str, TensorCopy]], None]:
    """Fill the head's matrices, or those whose names end so, with one value."""

    def edit(tensors: dict[str, TensorCopy]) -> None:
        for name in [n for n in tensors if n.startswith(HEAD) and n.endswith(names or "")]:
            spec = tensors[name].spec
            if len(spec.shape) > 1:
                rows = np.full(spec.shape[::-1], value, np.float32)
                kind = gguf.GGMLQuantizationType[spec.type.name]
                tensors[name] = TensorCopy(spec, data=gguf.quants.quantize(rows, kind).tobytes())

    return edit


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("head", ["F16", "Q8_0"])
def test_a_head_of_zeros(head: str, models: Models, tmp_path: Path, monkeypatch: Any) -> None:
    """It fits its trunk, and runs; only its values show it."""
    monkeypatch.chdir(tmp_path)
    whole = models.convert(DENSE, "--quant", "Q8_0", "--mtp-type", head)
    zero = edited(whole, tmp_path / "zero.gguf", tensors=matrices(0))
    [finding] = doctor(zero, code=1)["findings"]
    assert (finding["code"], finding["severity"]) == ("zero-head", "fault")
    assert finding["text"].startswith("all matrices of the head are zero")
    fixed(finding["fix"], tmp_path, whole)

    ffn = edited(whole, tmp_path / "ffn.gguf", tensors=matrices(0, "ffn_up.weight"))
    [finding] = doctor(ffn, code=0)["findings"]
    assert (finding["code"], finding["severity"]) == ("zero-head", "warning")
    assert finding["text"].startswith("blk.4.ffn_up.weight is zero")


def test_a_checkpoint_whose_head_is_not_finite(models: Models, tmp_path: Path) -> None:
    folder = models.copy(DENSE, tmp_path)
    edit_tensors(folder, lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"] + np.nan}))
    [finding] = doctor(folder, code=1)["findings"]
    assert finding["text"] == "mtp.fc.weight has values that are not finite"
    to = ("-o", tmp_path / "made.gguf")
    words = ("mtp.fc.weight: ", "expected finite weights, found NaN or infinity")
    refused(tmp_path, "convert", folder, *to, words=words)


def test_commands_that_write_a_head_of_zeros_say_so(models: Models, tmp_path: Path) -> None:
    whole, made = models.convert(DENSE, *UNIFORM), tmp_path / "made.gguf"
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    zero = edited(whole, tmp_path / "zero.gguf", tensors=matrices(0))
    nan = edited(
        models.convert(DENSE, "--mtp-type", "F16"), tmp_path / "nan.gguf", tensors=matrices(np.nan)
    )
    folder = models.copy(DENSE, tmp_path)
    edit_tensors(
        folder,
        lambda t: t.update({n: 0 * t[n] for n in t if n.startswith("mtp.") and t[n].ndim > 1}),
    )
    [finding] = doctor(folder, code=1)["findings"]
    assert (finding["code"], finding["severity"]) == ("zero-head", "fault")
    words = "warning: all matrices of the head are zero"
    to = ("-o", made, "--overwrite")
    assert words in succeed("convert", folder, *to)
    assert words in succeed("graft", trunk, "--from", zero, "--no-check", *to)
    text = "blk.4.attn_k.weight (and 7 others) has values that are not finite"
    [finding] = doctor(nan, code=1)["findings"]
    assert (finding["code"], finding["text"]) == ("not-finite", text)
    fields = json.loads(succeed("graft", trunk, "--from", nan, "--no-check", *to, "--json"))
    assert fields["warnings"] == [text]
    assert json.loads(succeed("convert", folder, *to, "--json"))["warnings"]
    sound = json.loads(succeed("convert", models.checkpoint(DENSE), *to, "--json"))
    assert sound["warnings"] == []


def filled(pattern: str, value: float) -> TensorEdit:
    """Fill tensors with one value."""
    return renumber(pattern, lambda numbers: np.full_like(numbers, value))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.nan, "blk.2.post_attention_norm.weight: expected finite weights, found NaN"),
        (3e38, "expected finite numbers, found NaN or infinity, which layer 2 is the first to "),
    ],
    ids=["nan", "large"],
)
def test_load_names_what_makes_the_logits_nan(
    value: float, words: str, models: Models, tmp_path: Path
) -> None:
    """Without --load no trunk's weights are read; its head is not to blame."""
    edit = filled("^blk.2.post_attention_norm", value)
    broken = edited(models.convert("demo"), tmp_path / "b.gguf", tensors=edit)
    assert doctor(broken, code=0)["findings"] == []
    [finding] = doctor(broken, "--load", code=1)["findings"]
    assert finding["code"] == "does-not-run"
    assert words in finding["text"]


def test_load_runs_a_model_without_a_head(models: Models, tmp_path: Path) -> None:
    """One that never had one, and one that lost it."""
    whole = models.convert("demo")
    succeed("strip", whole, "-o", tmp_path / "trunk.gguf")
    qwen2 = write_model(tmp_path / "qwen2.gguf", "qwen2")
    norms = {"trunk": "blk.2.post_attention_norm.weight", "qwen2": "blk.1.ffn_norm.weight"}
    for path in (tmp_path / "trunk.gguf", qwen2):
        done = invoke("doctor", path, "--load")
        assert done.exit_code == 1
        assert done.stdout.endswith("loaded: it runs\n")
        for value, words in ((np.nan, "expected finite weights"), (3e38, "is the first to")):
            edit = filled(norms[path.stem], value)
            broken = edited(path, tmp_path / "broken.gguf", tensors=edit)
            found = doctor(broken, "--load", code=1)["findings"]
            assert found[0]["code"] == "does-not-run"
            assert words in found[0]["text"]


def test_the_only_head_beside_a_model_is_examined(models: Models, tmp_path: Path) -> None:
    """It is what generate, chat and serve draft with."""
    whole = models.convert("demo")
    trunk, head = tmp_path / "trunk.gguf", tmp_path / "mtp-trunk.gguf"
    succeed("strip", whole, "-o", trunk)
    assert "head_beside" in succeed("info", trunk, "--json")
    assert "a head is beside it" not in succeed("info", trunk)
    succeed("extract", whole, "-o", head)
    fields = doctor(trunk, code=0)
    assert str(head) in fields["runs_with"][0]
    assert json.loads(succeed("info", trunk, "--json"))["head_beside"] == str(head)
    assert succeed("info", trunk).endswith(f"generate, chat and serve draft: {head}\n")


def test_the_head_of_another_fine_tune(models: Models) -> None:
    other = dataclasses.replace(DENSE, name="other", seed=2)
    fields = doctor(models.convert(other, *UNIFORM), "--source", models.checkpoint(DENSE), code=1)
    assert {f["code"] for f in fields["findings"]} == {"head-values"}
    assert len(fields["findings"]) == 15


@pytest.mark.thorough
def test_a_head_of_few_bits(models: Models, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    low = models.convert(DENSE, "--mtp-type", "Q3_K")
    [finding] = doctor(low, code=0)["findings"]
    assert finding["code"] == "head-precision"
    assert "8 matrices of the head are Q3_K" in finding["text"]
    fixed(finding["fix"], tmp_path, models.checkpoint(DENSE))


def check_fault_and_fix(broken: Path, words: str, folder: Path) -> None:
    """A fault of the draft vocabulary is named, and the command that the doctor names fixes it."""
    faults = [f for f in doctor(broken, code=1)["findings"] if f["severity"] == "fault"]
    assert {f["code"] for f in faults} == {"draft-vocabulary"}
    assert any(words in f["text"] for f in faults), faults
    (folder / "corpus.txt").write_text("def f(): pass\n" * 99)
    fixed(faults[0]["fix"].replace("FILES", "corpus.txt"), folder, broken)


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ([0, 1, 2, 2, *range(898, 924)], "1 of its ids are repetitions, first 2 (2 times)"),
        ([0, 1, 5000, *range(898, 924)], "1 of its ids are outside 0 to 1023, first 5000"),
        ([0, 0, 3, 3, 3, 9], "relative to their index"),
        ([0, 1, 2, 3], "special tokens (turn ends, tools, thinking) are not in it"),
    ],
)
def test_unsound_lists(
    listed: list[int], words: str, models: Models, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)

    ids = {IDS: Value(ValueType.U32, listed)}
    broken = edited(models.convert(DENSE), tmp_path / "b.gguf", metadata=ids)
    check_fault_and_fix(broken, words, tmp_path)


def test_lists_of_the_wrong_kind(models: Models, tmp_path: Path) -> None:
    ids = {IDS: Value(ValueType.I32, [1, 2, 3])}
    broken = edited(models.convert(DENSE), tmp_path / "b.gguf", metadata=ids)
    [finding] = doctor(broken, code=1)["findings"]
    assert finding["code"] == "draft-vocabulary"
    table = models.convert(DENSE, *UNIFORM, "--fastmtp", "100", "--fastmtp-layout", "table")

    broken = edited(table, tmp_path / "c.gguf", tensors=reshape("d2t", lambda _: (50,)))
    [finding] = doctor(broken, code=1)["findings"]
    assert "expected 50 rows" in finding["text"]


def test_an_unsound_map(models: Models, tmp_path: Path, monkeypatch: Any) -> None:
    """A file with the rows of the draft vocabulary has its ids in `d2t`."""
    monkeypatch.chdir(tmp_path)
    table = models.convert(DENSE, *UNIFORM, "--fastmtp", "100", "--fastmtp-layout", "table")
    change = renumber("^d2t$", lambda ids: np.where(np.arange(len(ids)) == 3, -5, ids))
    broken = edited(table, tmp_path / "b.gguf", tensors=change)
    check_fault_and_fix(broken, "outside 0 to 1023, first -5", tmp_path)


def test_a_hidden_list_is_mentioned(models: Models, tmp_path: Path) -> None:
    made = tmp_path / "made.gguf"
    made.write_bytes(models.convert(DENSE, "--fastmtp", "128").read_bytes())
    succeed("fastmtp", "remove", made, "--in-place")
    [finding] = doctor(made, code=0)["findings"]
    assert (finding["code"], finding["severity"]) == ("hidden-list", "note")


def test_other_tokenizers_and_architectures(models: Models, tmp_path: Path) -> None:
    for key, value, code in (
        ("tokenizer.ggml.tokens", ["a"] * 1000, "tokenizer"),
        ("general.architecture", "llama", "architecture"),
    ):
        other = {key: Value(ValueType.STRING, value)}
        broken = edited(models.convert(DENSE), tmp_path / f"{code}.gguf", metadata=other)
        assert codes_of(doctor(broken, code=1)) == [code]
    holed = edited(models.convert(DENSE), tmp_path / "holed.gguf", tensors=drop("blk.1."))
    assert [f["code"] for f in doctor(holed, code=1)["findings"]] == ["blocks"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("scores", Value(ValueType.U8, [1] * 1024), "expected an array of F32 or I32, found an ar"),
        ("scores", Value(ValueType.F32, [0.5] * 9), "expected an entry for each of 1024 tokens, f"),
        ("token_type", Value(ValueType.F32, [1.0] * 1024), "expected an array of I32, found an ar"),
        ("token_type", Value(ValueType.I32, 1), "expected an array of I32, found one I32"),
        ("tokens", Value(ValueType.I32, [1] * 1024), "expected an array of STRING, found an arra"),
        ("merges", Value(ValueType.I32, [1] * 10), "expected an array of STRING, found an array"),
    ],
)
def test_tokenizers_that_llama_cpp_refuses(
    key: str, value: Value, words: str, models: Models, tmp_path: Path
) -> None:
    other = {f"tokenizer.ggml.{key}": value}
    broken = edited(models.convert(DENSE, *UNIFORM), tmp_path / "b.gguf", metadata=other)
    [finding] = doctor(broken, code=1)["findings"]
    assert finding["code"] == "tokenizer"
    assert finding["text"].startswith(f"tokenizer.ggml.{key}: {words}")
    assert finding["fix"] == "mtp-gguf convert ORIGINAL --mtp-f16"
    result = invoke("generate", broken, "-p", "x", "-n", 1)  # llama.cpp's opinion
    assert result.exit_code == 1


# ------------------------------------------------------------------ faults of checkpoints


def test_checkpoints_whose_config_and_weights_disagree(models: Models, tmp_path: Path) -> None:
    bare = doctor(models.checkpoint(SPECS["dense-no-mtp"]), code=1)["findings"]
    assert [f["code"] for f in bare] == ["no-head"]

    folder = models.copy(DENSE, tmp_path)
    edit_json(folder / "config.json", lambda c: c.pop("mtp_num_hidden_layers"))
    assert doctor(folder, code=0)["findings"] == []  # counted, as convert does
    edit_json(folder / "config.json", lambda c: c.update(mtp_num_hidden_layers=1))
    assert doctor(folder, code=0)["findings"] == []

    edit_tensors(folder, lambda t: [t.pop(name) for name in [*t] if name.startswith("mtp.")])
    [finding] = doctor(folder, code=1)["findings"]
    assert finding["code"] == "claimed-head"
    command = finding["fix"].replace("ORIGINAL", str(models.checkpoint(DENSE)))
    succeed(*shlex.split(command)[1:], "-o", tmp_path / "made.gguf")
    assert doctor(tmp_path / "made.gguf", code=0)


def test_checkpoints_with_missing_parts(models: Models, tmp_path: Path) -> None:
    moe = models.copy(SPECS["moe-unfused"], tmp_path)
    edit_tensors(
        moe, lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.") and ".experts.2." in n]
    )
    [finding] = doctor(moe, code=1)["findings"]
    assert finding["code"] == "incomplete-head"
    assert "half present: 3 of 4, expert 2 is missing" in finding["text"]

    untied = models.copy(SPECS["dense-untied"], tmp_path)
    sorted(untied.glob("*.safetensors"))[1].unlink()
    [finding] = doctor(untied, code=1)["findings"]
    assert finding["code"] == "checkpoint"
    assert finding["fix"].startswith("hf download ORIGINAL --local-dir ")
    (untied / "config.json").write_text("{")
    assert doctor(untied, code=1)["findings"][0]["code"] == "checkpoint"

    wrong = models.copy(DENSE, tmp_path)
    edit_tensors(wrong, lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"].T.copy()}))
    [finding] = doctor(wrong, code=1)["findings"]
    assert "mtp.fc.weight: expected shape [256, 512]" in finding["text"]


# --------------------------------------------------------------------------- refusals


def test_paths_that_are_no_model(models: Models, tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    refused(tmp_path, "doctor", tmp_path / "no.gguf", words=("no.gguf", "version"))
    refused(tmp_path, "doctor", tmp_path / "absent.gguf", words=("cannot be opened",))
    folder = models.checkpoint(DENSE)
    refused(tmp_path, "doctor", folder, "--source", folder, words=("--from",), code=2)
    refused(tmp_path, "doctor", models.convert(DENSE), "--depth", 99, words=("16",), code=2)
