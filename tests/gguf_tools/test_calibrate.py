"""Calibration counts the tokens that the model generates."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from mtp_gguf.native.chat.generate import Generation, generate
from mtp_gguf.native.runtime import VARIABLE
from support.checkpoints import DENSE
from support.commands import check_refusal, refused, spawn, succeed
from support.gguf_files import value_of
from support.models import Models

IDS = "mtp_gguf.fastmtp.token_ids"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("def main():\n\n\n\nclass Point:\n    x = 1\n\n", encoding="utf-8")
    return path


def test_the_models_own_tokens_come_first(models: Models, prompts: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.gguf"
    options = ("--prompts", prompts, "--tokens", 40, "--temperature", 0, "--context", 256)
    output = succeed("fastmtp", "calibrate", models.convert(DENSE), *options, "--raw", "-o", made)
    settings = Generation(40, 0.0, 1, 256, chat=False)
    texts = ["def main():", "class Point:\n    x = 1"]
    answers = [a for _, a in generate(models.convert(DENSE), texts, settings)]
    written = {int(t) for answer in answers for t in answer}
    listed = list(value_of(made, IDS))
    special = 26
    assert written <= set(listed[: special + len(written)])
    assert f"counted on {sum(map(len, answers))} tokens of its own output" in output
    assert "coverage 256: 100.0%" in output
    few = f"warning: {sum(map(len, answers))} tokens are too few to rank a draft vocabulary of 256"
    assert few in output
    assert value_of(made, "mtp_gguf.fastmtp.coverage") == 1.0
    # Then what was asked.
    from mtp_gguf.native.runtime import llama_cpp  # noqa: PLC0415

    with closing(
        llama_cpp.Llama(str(models.convert(DENSE)), vocab_only=True, verbose=False)
    ) as llm:
        asked = {t for text in texts for t in llm.tokenize(text.encode(), False, True)}
    assert asked - written <= set(listed[: special + len(written | asked)])


def test_chat_template_and_seed(models: Models, prompts: Path, tmp_path: Path) -> None:
    outputs = []
    for name, options in (("a", ()), ("b", ()), ("c", ("--seed", 2)), ("d", ("--raw",))):
        made = tmp_path / f"{name}.gguf"
        arguments = ("--prompts", prompts, "--tokens", 30, "--context", 256, *options)
        succeed("fastmtp", "calibrate", models.convert(DENSE), *arguments, "-o", made)
        outputs.append(list(value_of(made, IDS)))
    assert outputs[0] == outputs[1]
    assert outputs[0] not in outputs[2:]


def test_in_place_and_refusals(models: Models, prompts: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.gguf"
    made.write_bytes(models.convert(DENSE).read_bytes())
    common = ("--tokens", 5, "--context", 64)
    first = succeed("fastmtp", "calibrate", made, "--prompts", prompts, *common, "--in-place")
    assert "written anew" in first
    again = succeed("fastmtp", "calibrate", made, "--prompts", prompts, *common, "--in-place")
    assert "changed in place" in again
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "long.txt").write_text("x = 1\n" * 100)
    target = tmp_path / "x.gguf"
    says = {"empty.txt": "no text", "absent.txt": "cannot be read", "long.txt": "expected 1 to 63"}
    for file, words in says.items():
        arguments = (made, "--prompts", tmp_path / file, *common, "-o", target)
        refused(tmp_path, "fastmtp", "calibrate", *arguments, words=(words,))
    trunk = models.convert(DENSE, "--no-mtp")
    arguments = (trunk, "--prompts", prompts, *common, "-o", target)
    refused(tmp_path, "fastmtp", "calibrate", *arguments, words=("belongs to an MTP head",))
    table = models.convert(DENSE, "--fastmtp", "100", "--fastmtp-layout", "table")
    arguments = (table, "--prompts", prompts, *common, "-o", target)
    on_stock = os.environ | {VARIABLE: "stock"}  # the fast libraries load this layout
    with spawn("fastmtp", "calibrate", *arguments, env=on_stock) as process:
        _, said = process.communicate(timeout=120)
    check_refusal(process.returncode, said, "llama.cpp cannot load it")
    assert not target.exists()
