"""`mtp-gguf train-head`: what it writes, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file, save_file

from mtp_gguf.convert.heads.acceptance import VARIABLE
from mtp_gguf.convert.heads.head_checkpoint import checkpoint_head
from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import TensorCopy
from mtp_gguf.gguf_tools.heads.acceptance import Acceptance, read_stored
from mtp_gguf.gguf_tools.heads.head import block_of
from mtp_gguf.gguf_tools.machine import os_files, process_memory
from mtp_gguf.gguf_tools.model import Metadata, open_model
from mtp_gguf.native.checks.acceptance import measure_acceptance
from mtp_gguf.train import trainer as training
from mtp_gguf.train.block import own_tables, read_weights
from support.carried_models import write_model
from support.checkpoints import SPECS
from support.commands import UNWRITABLE, check_refusal, invoke, refused, spawn, succeed
from support.gguf_files import edited, loads, value_of
from support.models import DEMO, Models
from support.serving import PATIENCE
from support.upstream.nextn_models import drafts, write_models

IDS = "mtp_gguf.fastmtp.token_ids"
# The demo model knows it, and it changes with the model only.
TEXT = Path(__file__).parents[2] / "benchmarks" / "demo_model" / "train.py"
FAST = ("--tokens", 700, "--length", 64, "--epochs", 1, "--steps", 2, "-t", 1)


@pytest.fixture(scope="module")
def demo(models: Models) -> Path:
    return models.gguf("demo", "Q4_K_M", "F16")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "code.py"
    path.write_text(TEXT.read_text(encoding="utf-8"), encoding="utf-8")
    return path


def trained(model: Path, text: Path, target: Path, *options: object) -> dict[str, Any]:
    result = invoke("train-head", model, "--text", text, "-o", target, "--json", *FAST, *options)
    assert result.exit_code == 0, result.output + repr(result.exception)
    fields: dict[str, Any] = json.loads(result.stdout)
    assert not target.with_name(f"{target.name}.train").exists()
    return fields


def trunk_of(path: Path) -> dict[str, bytes]:
    with open_model(path) as model:
        taken = set(model.head.names)
        return {name: bytes(model.read(name)) for name in model.tensors if name not in taken}


def test_the_trunk_stays_byte_for_byte(
    demo: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)  # so that the acceptance is measured and stored
    fields = trained(demo, text, tmp_path / "tuned.gguf")
    assert trunk_of(tmp_path / "tuned.gguf") == trunk_of(demo)
    assert fields["head"]["ready"] is True
    assert fields["head"]["types"] == {"F16": 8}
    assert len(fields["acceptance"]["after"]) == 2
    assert fields["acceptance"]["after"][0] > 0.6
    assert fields["predicted_speedup"]["after"] > 0
    with open_model(tmp_path / "tuned.gguf") as model:
        assert model.first.scalar("mtp_gguf.train.source") == "text of 1 file"
        assert model.first.scalar("mtp_gguf.train.start") == "own head"
        assert len(model.first.array("mtp_gguf.train.acceptance_after") or []) == 2
        keys = {key for key in model.metadata() if ".train." in key}
        stored = read_stored(model)
    # Nothing of the text, nor its name.
    names = ("acceptance_after", "acceptance_before", "seed", "source", "start", "steps", "tokens")
    assert keys == {f"mtp_gguf.train.{name}" for name in (*names, "updates")}
    assert stored.fault == ""
    measured = measure_acceptance(tmp_path / "tuned.gguf")
    assert stored.acceptance == Acceptance(measured.greedy, measured.sampled)
    assert measured.share > 0.4


def test_a_head_that_knows_other_texts_is_no_wrong_one(
    demo: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus of all files, which it was not trained for, says little of it."""
    monkeypatch.delenv(VARIABLE)
    fields = trained(demo, text, tmp_path / "tuned.gguf", "--least-acceptance", 0.65)
    taught, share = fields["acceptance"]["after"][0], fields["stored_acceptance"]["share"]
    assert share < 0.65 < taught
    (warning,) = fields["warnings"]
    assert warning.startswith(f"{share:.0%} of first drafts are accepted")
    assert f"of the texts that the head was trained for, {taught:.0%} are" in warning


def test_a_head_that_has_learned_little_is_told_so(
    demo: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not that of another model, since it was made for this one."""
    monkeypatch.delenv(VARIABLE)
    fields = trained(demo, text, tmp_path / "new.gguf", "--from-scratch")
    (warning,) = fields["warnings"]
    assert fields["acceptance"]["after"][0] < 0.3
    assert warning.endswith(" are: train it longer, on more text")


def test_from_scratch_for_a_trunk_without_a_head(
    models: Models, demo: Path, text: Path, tmp_path: Path
) -> None:
    succeed("strip", demo, "-o", tmp_path / "trunk.gguf")
    refused(
        tmp_path,
        *("train-head", tmp_path / "trunk.gguf", "--text", text, "-o", tmp_path / "no.gguf"),
        words=("no complete MTP head", "--head-from", "--from-scratch"),
    )
    fields = trained(
        tmp_path / "trunk.gguf", text, tmp_path / "new.gguf", "--from-scratch", "--fastmtp", 600
    )
    assert trunk_of(tmp_path / "new.gguf") == trunk_of(demo)
    assert fields["acceptance"]["before"] is None
    assert fields["head"]["types"] == {"Q8_0": 8}
    assert fields["head"]["draft"]["size"] == 600
    assert "training data" in fields["head"]["draft"]["source"]
    succeed("generate", tmp_path / "new.gguf", "-p", "def f(", "-n", 8, "--ctx", 64, "--depth", 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_a_model_without_an_mtp_architecture(architecture: str, tmp_path: Path) -> None:
    """It is carried, in the work folder, and the output can be turned back into it."""
    # Random weights may end a held-out text at once, with which there is nothing to measure.
    text = tmp_path / "text.py"
    text.write_text("".join(f"def f{i}(a, b):\n    return a + {i} * b\n\n" for i in range(400)))
    model = write_model(tmp_path / "model.gguf", architecture, Type.Q8_0, halves=False)
    made, again = tmp_path / "made.gguf", tmp_path / "again.gguf"
    fields = trained(model, text, made)
    assert fields["head"]["ready"] is True
    assert fields["head"]["ours"] is True
    assert fields["warnings"] == []
    assert value_of(made, "mtp_gguf.train.start") == "random weights"
    assert loads(made)
    out = succeed("generate", made, "-p", "def f(", "-n", 8, "--ctx", 64, "--depth", 2)
    assert out == succeed("generate", made, "-p", "def f(", "-n", 8, "--ctx", 64, "--depth", 0)
    succeed("doctor", made)
    succeed("carry", "--back", made, "-o", again)
    assert again.read_bytes() == model.read_bytes()

    succeed("carry", model, "-o", tmp_path / "carrier.gguf")
    fields = trained(tmp_path / "carrier.gguf", text, again, "--overwrite")
    assert again.read_bytes() == made.read_bytes()
    for option in (("--head-only",), ("--head-from", made)):
        words = (option[0], f"mtp-gguf carry {model}")
        refused(
            tmp_path,
            *("train-head", model, "--text", text, *option, "-o", tmp_path / "no.gguf"),
            words=words,
        )
    refused(
        tmp_path,
        *("train-head", made, "--text", text, "-o", tmp_path / "no.safetensors"),
        words=("expected a GGUF",),
    )


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads with embeddings and outputs of their own, of models whose tokens are characters."""
    folder = tmp_path_factory.mktemp("others")
    tokens = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    tokens += [f"<{i}>" for i in range(128 - len(tokens))]

    def read_text(keys: Metadata) -> None:
        keys["tokenizer.ggml.tokens"] = Value(ValueType.STRING, tokens)

    made = write_models(folder, ["glm4moe", "step35"])
    return {
        name: edited(path, folder / f"{name}-text.gguf", metadata=read_text)
        for name, path in made.items()
    }


@pytest.mark.parametrize("architecture", ["glm4moe", "step35"])
def test_a_head_with_matrices_of_its_own(
    architecture: str, others: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    """They stay as they are; step35 has a block for each of three drafts, which all learn."""
    model, made = others[architecture], tmp_path / "made.gguf"
    fields = trained(model, text, made, "--steps", 4, "--mtp-type", "F32", "--rate", 0.01)
    steps = 3 if architecture == "step35" else 4
    assert len(fields["acceptance"]["after"]) == steps
    assert fields["best_step"] > 0
    assert trunk_of(made) == trunk_of(model)
    with open_model(model) as before, open_model(made) as after:
        assert before.metadata().items() <= after.metadata().items()
        assert {*before.head.names} <= {*after.head.names}
        tables = own_tables(before)
        assert len(tables) == 2 * before.head.layers
        same = {n for n in before.head.names if before.read(n) == after.read(n)}
        blocks = {block_of(name) for name in {*before.head.names} - same}
        assert tables.keys() <= same
        assert len(blocks) == before.head.layers == (3 if architecture == "step35" else 1)
        # Counted with the block in PyTorch, and drafted from the file.
        found = after.first.array("mtp_gguf.train.acceptance_after")
        assert found == pytest.approx(fields["acceptance"]["after"], abs=0.02)
    assert drafts([made]) != [None]  # of stock llama.cpp
    for option in (("--from-scratch",), ("--head-from", model)):
        if architecture == "step35":
            words = (option[0], "expected a head of one block")
        elif option[0] == "--from-scratch":
            continue
        else:
            words = ("with its own (blk.2.nextn.embed_tokens.weight)", "graft it")
        command = ("train-head", model, "--text", text, "-o", tmp_path / "no.gguf", *option)
        refused(tmp_path, *command, words=words)


def test_the_head_of_another_file(demo: Path, text: Path, tmp_path: Path) -> None:
    succeed("strip", demo, "-o", tmp_path / "trunk.gguf")
    for start, name in ((demo, "from-gguf.gguf"), (DEMO, "from-checkpoint.gguf")):
        fields = trained(
            tmp_path / "trunk.gguf",
            text,
            tmp_path / name,
            "--head-from",
            start,
            *("--mtp-type", "Q4_K", "--rank", 4),
        )
        assert fields["acceptance"]["before"][0] > 0.6
        assert fields["head"]["types"] == {"Q4_K": 8}
        assert trunk_of(tmp_path / name) == trunk_of(demo)


def test_the_models_own_answers_and_a_head_alone(models: Models, tmp_path: Path) -> None:
    model = models.convert("demo", "--quant", "F16", "--mtp-f16", "--fastmtp", 700)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Write a Python function that counts the robots.\n\nWhat is a list?\n")
    fields = trained_on_prompts(model, prompts, tmp_path / "mtp-head.gguf", "--head-only")
    assert fields["head"]["draft"]["size"] == 700
    with open_model(tmp_path / "mtp-head.gguf") as head, open_model(model) as whole:
        assert head.head.is_alone
        assert head.first.scalar("mtp_gguf.train.source") == "own answers to prompts of 1 file"
        head.head.check_fit(whole.head)
    succeed(
        *("generate", model, "--head", tmp_path / "mtp-head.gguf", "-p", "def f("),
        *("-n", 8, "--ctx", 64, "--depth", 2),
    )


@pytest.mark.thorough
def test_texts_and_answers_teach_one_head(demo: Path, text: Path, tmp_path: Path) -> None:
    """And each evaluation is told of and drawn; the last one is the result."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is a list?\n\nWrite a loop.\n")
    data = ("--text", text, "--prompt-file", prompts)
    made = tmp_path / "made.gguf"
    chart = ("--chart", tmp_path / "made.png")
    result = invoke("train-head", demo, *data, "-o", made, "--json", *FAST, "--epochs", 24, *chart)
    assert result.exit_code == 0, result.output + repr(result.exception)
    with open_model(made) as model:
        source = model.first.scalar("mtp_gguf.train.source")
    assert source == "text and own answers to prompts of 2 files"
    history = json.loads(result.stdout)["acceptance"]["history"][1:-1]
    assert "tokens to learn from, up to 24 times; " in result.stderr
    told = [line for line in result.stderr.splitlines() if line.startswith("after ")]
    assert len(told) > 1
    for line, evaluated in zip(told, history, strict=True):
        rates = " / ".join(f"{rate:.0%}" for rate in evaluated["rates"])
        assert line.endswith(f": accepts {rates}")
    assert (tmp_path / "made.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_that_cannot_be_written_ends_no_training(
    demo: Path, text: Path, tmp_path: Path
) -> None:
    chart = tmp_path / f"{'x' * 245}.png"  # its unfinished file has a longer name than there can be
    made, words = tmp_path / "made.gguf", ("--text", text, "--chart", chart, "--no-check")
    result = invoke("train-head", demo, *words, "-o", made, *FAST)
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert f"warning: {chart}: " in result.stderr
    assert made.exists()
    assert not chart.exists()


def test_a_damaged_model_after_a_list_of_texts(text: Path, tmp_path: Path) -> None:
    """It is no further text."""
    (tmp_path / "bad.gguf").write_bytes(bytes(4096))
    words = ("bad.gguf: expected a GGUF file",)
    refused(tmp_path, "train-head", "--text", text, tmp_path / "bad.gguf", words=words)


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", ["same.gguf", "mtp-same.gguf", "mtp.safetensors"])
@pytest.mark.parametrize("start", ["own", "another"])
def test_a_head_that_did_not_change_shows_no_gain(
    target: str, start: str, demo: Path, text: Path, tmp_path: Path
) -> None:
    """Also if its draft vocabulary did."""
    changed = ("--fastmtp", 300) if target.endswith(".gguf") else ()
    alone = ("--head-only",) if target == "mtp-same.gguf" else ()
    donor = ("--head-from", demo) if start == "another" else ()
    options = (*changed, *alone, *donor, "--rate", 0)
    acceptance = trained(demo, text, tmp_path / target, *options)["acceptance"]
    assert acceptance["before"] == acceptance["after"]
    assert acceptance["before"][0] > 0.2


def test_a_draft_vocabulary_is_replaced_only_if_asked(
    models: Models, text: Path, tmp_path: Path
) -> None:
    by_id = models.convert("demo", "--quant", "F16", "--fastmtp", 700)
    kept, counted = tmp_path / "kept.gguf", tmp_path / "counted.gguf"
    fields = trained(by_id, text, kept, "--rate", 0)
    assert value_of(kept, IDS) == value_of(by_id, IDS)
    assert fields["head"]["draft"]["source"] == "by id (merge rank)"
    assert (fields["replaced_draft_vocabulary"], fields["warnings"]) == (None, [])
    report = succeed("train-head", by_id, "--text", text, "-o", counted, *FAST, "--fastmtp")
    assert len(value_of(counted, IDS)) == 700
    assert value_of(counted, IDS) != value_of(by_id, IDS)
    assert "replaced the draft vocabulary of 700 tokens, as --fastmtp asks\n" in report
    assert "tokens are too few to rank a draft vocabulary of 700: " in report
    assert "; count 2800 or more\n" in report


def test_an_invalid_draft_vocabulary_is_not_kept(
    models: Models, text: Path, tmp_path: Path
) -> None:
    twice = edited(
        models.convert("demo", "--quant", "F16", "--fastmtp", 700),
        tmp_path / "twice.gguf",
        metadata=lambda m: m.update({IDS: Value(ValueType.U32, [*range(699), 5])}),
    )
    target = ("-o", tmp_path / "out.gguf", *FAST)
    words = ("its draft vocabulary is invalid: 1 of its ids are repetitions", "pass --fastmtp")
    refused(tmp_path, "train-head", twice, "--text", text, *target, words=words)


def trained_on_prompts(
    model: Path, prompts: Path, target: Path, *options: object
) -> dict[str, Any]:
    result = invoke(
        *("train-head", model, "--prompts", prompts, "-o", target, "--json", *FAST, *options)
    )
    assert result.exit_code == 0, result.output + repr(result.exception)
    fields: dict[str, Any] = json.loads(result.stdout)
    return fields


def test_the_tensors_of_a_checkpoint(demo: Path, text: Path, tmp_path: Path) -> None:
    """A fine-tune without its head, to which the trained one is added: convert takes it."""
    folder = shutil.copytree(DEMO, tmp_path / "fine-tune")
    stored = load_file(folder / "model.safetensors")
    trunk = {name: array for name, array in stored.items() if not name.startswith("mtp.")}
    save_file(trunk, folder / "model.safetensors", {"format": "pt"})
    trained(demo, text, folder / "mtp.safetensors", "--head-from", DEMO)
    added = load_file(folder / "mtp.safetensors")
    assert added.keys() == {name for name in stored if name.startswith("mtp.")}
    succeed("convert", folder, "-o", tmp_path / "made.gguf", "--quant", "F16", "--mtp-f16")
    succeed("strip", demo, "-o", tmp_path / "trunk.gguf")
    succeed("graft", tmp_path / "trunk.gguf", "--from", folder, "-o", tmp_path / "grafted.gguf")
    assert measure_acceptance(tmp_path / "grafted.gguf").share > 0.4


@pytest.mark.parametrize("spec", ["dense-untied", "moe-mixed", "moe-fused"])
def test_checkpoint_names_are_the_converters(models: Models, spec: str, tmp_path: Path) -> None:
    """What the converter makes of the tensors is what they were made from."""
    path = models.gguf(spec, "F32", "F32")
    with open_model(path) as model:
        weights = read_weights(model)
    folder = models.copy(SPECS[spec], tmp_path)
    for file in folder.glob("*.safetensors*"):
        if file.suffix == ".json":
            file.unlink()
            continue
        rest = {n: a for n, a in load_file(file).items() if "mtp." not in n}
        file.unlink()
        if rest:
            save_file(rest, folder / f"model-{file.stem}.safetensors", {"format": "pt"})
    save_file(checkpoint_head(weights), folder / "mtp.safetensors")
    succeed(
        *("convert", folder, "-o", tmp_path / "again.gguf", "--quant", "F32", "--mtp-type", "F32")
    )
    with open_model(tmp_path / "again.gguf") as model:
        again = read_weights(model)
    assert again.keys() == weights.keys()
    for suffix, array in weights.items():
        assert np.allclose(again[suffix], array, rtol=0, atol=1e-6), suffix


# ----------------------------------------------------------------------------- refusals


def test_options_that_contradict_each_other(demo: Path, text: Path, tmp_path: Path) -> None:
    for options in (
        (),
        ("--text", text, "--from-scratch", "--head-from", demo),
        ("--text", text, "--mtp-f16", "--mtp-type", "Q8_0"),
        ("--text", text, "--head-only", "-o", tmp_path / "mtp.safetensors"),
        ("--text", text, "-o", tmp_path / "one.gguf", "--chart", tmp_path / "one.gguf"),
    ):
        refused(tmp_path, "train-head", demo, *options, code=2)


def test_bad_input(demo: Path, text: Path, tmp_path: Path, models: Models) -> None:
    short, empty, long = (tmp_path / f"{name}.txt" for name in ("short", "empty", "long"))
    short.write_text("x")
    empty.write_text(" \n")
    long.write_text(text.read_text()[:4000].replace("\n\n", "\n"))
    chart = tmp_path / "other.png"
    chart.write_text("x")
    unwritable: list[Any] = []
    if UNWRITABLE.is_dir():
        there = UNWRITABLE / "made.png"
        unwritable = [(("--text", text, "--chart", there), (f"{there}: cannot be written: ",))]
    other = models.gguf("dense-tied")
    moe = models.gguf("moe-mixed")
    target = ("-o", tmp_path / "out.gguf", *FAST)
    for options, words in (
        (("--text", empty), ("no text in",)),
        (("--text", tmp_path / "absent"), ("cannot be read",)),
        (("--text", text, "--head-from", other), ("its head does not fit",)),
        (("--text", text, "--head-from", moe), ("is qwen35moe", "does not fit")),
        (("--text", text, "--device", "tpu"), ("PyTorch can use here, found tpu",)),
        (("--text", text, "--device", "meta"), ("PyTorch can use here, found meta",)),
        (("--text", text, "--mtp-type", "Q3"), ("--mtp-type",)),
        (("--text", text, "--chart", chart), ("exists; pass --overwrite",)),
        *unwritable,
        (("--text", text, "--mtp-type", "IQ2_XS"), ("IQ2_XS needs an importance matrix",)),
    ):
        refused(tmp_path, "train-head", demo, *options, *target, words=words)
    # These are found once the tokenizer is loaded.
    for options, words in (
        (("--text", short), ("pieces of text from 16 tokens on", "found 0")),
        (("--prompt-file", long), ("a prompt has", "expected 1 to 48")),
    ):
        done = invoke("train-head", demo, *options, *target)
        assert done.exit_code == 1
        assert all(word in done.stderr for word in words), done.stderr
        assert not list(tmp_path.glob("out.gguf*"))
    refused(tmp_path, *("train-head", demo, "--text", text, "-o", demo), words=("is the input",))
    head_alone = tmp_path / "alone.gguf"
    succeed("extract", demo, "-o", head_alone)
    refused(tmp_path, "train-head", head_alone, "--text", text, *target, words=("only a head",))


def test_an_architecture_without_such_a_head(demo: Path, text: Path, tmp_path: Path) -> None:
    def rename(name: Value, keys: Metadata) -> None:
        keys["general.architecture"] = name

    target = ("-o", tmp_path / "out.gguf", *FAST)
    for name, words in (("gemma3", "of 'gemma3'"), ("llama", "it cannot be carried")):
        model = tmp_path / "model.gguf"
        edited(demo, model, metadata=partial(rename, Value(ValueType.STRING, name)))
        refused(tmp_path, "train-head", model, "--text", text, *target, words=(words,))


def test_longer_pieces_than_the_context(demo: Path, text: Path, tmp_path: Path) -> None:
    key = "qwen35.context_length"
    short = edited(
        demo, tmp_path / "short.gguf", metadata=lambda m: m.update({key: Value(ValueType.U32, 60)})
    )
    target = ("-o", tmp_path / "out.gguf", *FAST)
    words = ("--length: expected up to 60 tokens, the model's context, found 64",)
    refused(tmp_path, "train-head", short, "--text", text, *target, words=words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blk.4.nextn.enorm.weight", "nextn.enorm.weight: expected finite weights"),
        ("output_norm.weight", "expected logits to choose a token by, found NaN"),
    ],
)
def test_nan_in_the_file(demo: Path, text: Path, tmp_path: Path, name: str, words: str) -> None:
    def spoil(tensors: dict[str, TensorCopy]) -> None:
        data = np.full(256, np.nan, np.float32).tobytes()
        tensors[name] = TensorCopy(tensors[name].spec, data=data)

    broken = edited(demo, tmp_path / "broken.gguf", tensors=spoil)
    done = invoke("train-head", broken, "--text", text, "-o", tmp_path / "out.gguf", *FAST)
    assert done.exit_code == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["broken.gguf"]


def test_without_pytorch(
    demo: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_gguf.train.api.find_spec", lambda _: None)
    words = ("torch, which is not installed", 'pip install "mtp-gguf[train]"')
    refused(tmp_path, *("train-head", demo, "--text", text, "-o", tmp_path / "o.gguf"), words=words)


def test_too_little_memory_or_disk(
    demo: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ("train-head", demo, "--text", text, "-o", tmp_path / "out.gguf", *FAST)
    monkeypatch.setattr(process_memory, "free_memory", lambda: 1 << 20)
    refused(tmp_path, *target, words=("of memory", "are free", "--rank 16"))
    monkeypatch.undo()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused(tmp_path, *target, words=("are free on its disk", "smaller --tokens"))


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP, which says what it does")
def test_threads_sleep_where_they_wait(demo: Path, text: Path, tmp_path: Path) -> None:
    """Unless the user has said something else."""
    words = ("train-head", demo, "--text", text, "-o", tmp_path / "made.gguf", *FAST, "--no-check")
    for theirs in ({}, {"OMP_WAIT_POLICY": "active"}):
        environment = {n: v for n, v in os.environ.items() if n != "OMP_WAIT_POLICY"}
        environment |= {"OMP_DISPLAY_ENV": "verbose", **theirs}
        process = spawn(*words, "--overwrite", stderr=subprocess.PIPE, env=environment)
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        # llama.cpp and PyTorch may each load one.
        spins = re.findall(r"GOMP_SPINCOUNT = '(\w+)'", said)
        assert spins
        assert {spin == "0" for spin in spins} == {not theirs}


def test_minutes_are_a_budget(demo: Path, text: Path, tmp_path: Path) -> None:
    slow = ("--tokens", 9000, "--epochs", 1000, "--minutes", 0.02)
    fields = trained(demo, text, tmp_path / "out.gguf", *slow)
    assert fields["stopped"] == "the time is over"
    assert fields["seconds"] < 20


@pytest.mark.thorough
def test_a_killed_command_goes_on(demo: Path, text: Path, tmp_path: Path) -> None:
    """It is killed after the first checkpoint; then the same command writes the same bytes."""
    target = tmp_path / "out.gguf"
    chart = ("--chart", tmp_path / "out.png")
    words = ("train-head", demo, "--text", text, "-o", target, *FAST, "--epochs", 14, *chart)
    process = spawn(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = tmp_path / "out.gguf.train" / "checkpoint.pt"
    deadline = time.monotonic() + PATIENCE
    while not checkpoint.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGSTOP)
    second = invoke("train-head", demo, "--text", text, "-o", target, *FAST)
    process.kill()
    process.wait()
    check_refusal(second.exit_code, second.stderr, str(checkpoint.parent), "another training")
    assert not target.exists()
    left = torch.load(checkpoint, weights_only=True)["done"]["step"]
    chart[1].touch()  # it is killed before or after it draws
    fields = trained(demo, text, target, "--epochs", 14, *chart)
    assert chart[1].stat().st_size > 0
    assert 0 < left < fields["steps"]
    whole = trained(demo, text, tmp_path / "whole.gguf", "--epochs", 14)
    assert [h["step"] for h in fields["acceptance"]["history"]] == [
        h["step"] for h in whole["acceptance"]["history"]
    ]
    assert target.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_a_folder_that_cannot_be_locked(demo: Path, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    (tmp_path / "out.gguf.train" / "lock").mkdir(parents=True)
    command = ("train-head", demo, "--text", text, "-o", target, *FAST)
    refused(tmp_path, *command, words=("out.gguf.train", "lock: cannot be written"))


def test_a_file_system_without_locks(
    demo: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(os_files, "lock", lock)
    trained(demo, text, tmp_path / "out.gguf")


def test_an_interrupted_command_goes_on(
    demo: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.gguf"

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "run", stop)
        done = invoke("train-head", demo, "--text", text, "-o", target, *FAST)
    assert done.exit_code == 130
    assert f"what was done is in {target}.train; the same command goes on" in done.stderr
    assert not target.exists()
    monkeypatch.setattr("mtp_gguf.train.collect.Trunk", stop)  # the states are there
    trained(demo, text, target)
    assert target.exists()
