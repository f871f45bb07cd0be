"""Checkpoints with one invalid JSON value at a time, in every command that reads them.

Each run gives the correct file or one sentence, within seconds and little memory, and leaves
nothing else in the output's folder. A value that does not matter to the model gives the same file
as before; if upstream's converter accepts a value, our file equals its file.

Every value of every file, against every command and upstream, takes up to an hour:

    python -m pytest -m slow tests/gguf_tools/test_hostile_json.py
"""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_edits import edit_json
from support.checkpoints import TINY, Spec, write_checkpoint
from support.commands import deadline, held, invoke
from support.conversions import converted
from support.json_mutations import Mutation, mutations
from support.upstream.compare import differences, without_ones
from support.upstream.convert_upstream import convert
from support.upstream.converter_pool import UpstreamError
from support.upstream.describe import describe

SECONDS = 30  # of this process, whatever else the machine does
MEMORY = 600 << 20  # what a process may grow by during a sweep
SPOILED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)
SPECS = {
    "dense": replace(TINY, name="dense", nested=True, shards=2),
    "moe": replace(TINY, name="moe", experts=4, shards=2, rope="yarn", layer_types=False),
    "fp8": replace(TINY, name="fp8", hidden=256, fp8=True, shards=2, tied=True),
}
COMMANDS: dict[str, Callable[[Bench], list[object]]] = {
    "convert": lambda b: ["convert", b.model, "-o", b.out / "o.gguf", "--quant", "F16"],
    "dry-run": lambda b: ["convert", b.model, "-o", b.out / "o.gguf", "--dry-run"],
    "list-tensors": lambda b: ["list-tensors", b.model],
    "doctor": lambda b: ["doctor", b.model],
    "compare": lambda b: ["compare", b.whole, b.model],
    "graft": lambda b: ["graft", b.bare, "--from", b.model, "-o", b.out / "o.gguf", "--no-check"],
    "lend": lambda b: [
        *("convert", b.other, "--mtp-from", b.model, "-o", b.out / "o.gguf", "--quant", "F16")
    ],
    "fastmtp": lambda b: [
        *("convert", b.model, "-o", b.out / "o.gguf", "--quant", "F16"),
        *("--fastmtp-corpus", b.corpus),
    ],
}


@dataclass(frozen=True)
class Bench:
    """A checkpoint to spoil, and what the commands need besides."""

    model: Path
    other: Path
    bare: Path
    whole: Path
    corpus: Path
    out: Path


def write_model(folder: Path, spec: Spec) -> Path:
    """A checkpoint with the keys that transformers adds when it saves one."""
    model = write_checkpoint(folder, spec)

    def edit(config: dict[str, Any]) -> None:
        text = config.get("text_config", config)
        text.setdefault("architectures", ["Qwen3_5ForCausalLM"])
        text |= {"bos_token_id": 896, "pad_token_id": 896, "chunk_size_feed_forward": 0}

    edit_json(model / "config.json", edit)
    return model


def make_bench(root: Path, spec: Spec) -> Bench:
    model = write_model(root / spec.name, spec)
    other = write_checkpoint(root / "other", replace(spec, name="other", mtp=False))
    bare, whole = root / "bare.gguf", root / "whole.gguf"
    converted(model, bare, "--quant", "F16", "--no-mtp")
    converted(model, whole, "--quant", "F16", "--mtp-f16")
    corpus, out = root / "corpus.txt", root / "out"
    corpus.write_text("The draft head reads the hidden state.\n" * 50, encoding="utf-8")
    out.mkdir()
    return Bench(model, other, bare, whole, corpus, out)


@pytest.fixture(scope="module", params=SPECS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp(request.param), SPECS[request.param])


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of outputs wait for no disk; none has to survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@contextmanager
def spoiled(path: Path, mutation: Mutation) -> Iterator[None]:
    """The file with this change, and as it was afterwards."""
    text = path.read_text(encoding="utf-8")
    path.write_text(json.dumps(mutation.of(json.loads(text))), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def broken_promise(bench: Bench, command: str) -> str | None:
    """Run a command; what it did against the promise, or None."""
    with deadline(SECONDS, computing=True):
        result = invoke(*COMMANDS[command](bench))
    try:
        if not isinstance(result.exception, SystemExit | None):
            return f"raised {result.exception!r}"
        if result.exit_code not in (0, 1) or "Traceback" in result.output:
            return f"exit code {result.exit_code}: {result.output[-300:]}"
        said = result.stderr
        answered = command in ("doctor", "compare") and not said  # with findings, not an error
        sentence = said.startswith("mtp-gguf: ") and said.count("\n") == 1
        if result.exit_code == 1 and not (answered or sentence):
            return f"said {said[:300]!r}"
        left = {*held(bench.out)}
        if left and (result.exit_code or left != {"o.gguf"}):
            return f"left {sorted(left)}"
        return None
    finally:
        for path in bench.out.iterdir():
            path.unlink()


def peak() -> int:
    """Peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def file_mutations(model: Path, file: str) -> list[Mutation]:
    return [*mutations(json.loads((model / file).read_text(encoding="utf-8")))]


def sweep(bench: Bench, file: str, commands: list[str], picked: list[Mutation]) -> list[str]:
    """What went wrong, as one line each."""
    began, found = peak(), []
    for mutation in picked:
        with spoiled(bench.model / file, mutation):
            for command in commands:
                if fault := broken_promise(bench, command):
                    found.append(f"{file}: {mutation}: {command} {fault}")
    if peak() - began > MEMORY:
        found.append(f"{file}: grew by {(peak() - began) >> 20} MiB")
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("file", SPOILED)
def test_some_values(file: str, bench: Bench) -> None:
    """A seeded sample of the sweep below: each command sees some values of each file."""
    chosen = random.Random(f"{bench.model.name} {file}")
    every = file_mutations(bench.model, file)
    found = []
    for command in COMMANDS:
        found += sweep(bench, file, [command], chosen.sample(every, 3))
    assert not found, "\n".join(found)


@pytest.mark.thorough
@pytest.mark.sample(1)
def test_every_null_of_the_config(bench: Bench) -> None:
    """What `to_dict()` writes for a value that is not set."""
    nulls = [m for m in file_mutations(bench.model, "config.json") if m.value is None]
    found = sweep(bench, "config.json", ["dry-run", "doctor"], nulls)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("command", ["convert", "doctor"])
@pytest.mark.parametrize("file", SPOILED)
def test_values_nested_too_deeply(file: str, command: str, bench: Bench) -> None:
    path = bench.model / file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("{", '{"deep": ' + "[" * 100_000 + "]" * 100_000 + ",", 1))
    try:
        assert broken_promise(bench, command) is None
    finally:
        path.write_text(text, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("file", SPOILED)
def test_every_value(file: str, command: str, bench: Bench) -> None:
    found = sweep(bench, file, [command], file_mutations(bench.model, file))
    assert not found, "\n".join(found)


# transformers 5 takes full_attention_interval out of a config that has no layer_types, as that of
# `moe`; which layers are full attention is in attention.recurrent_layers, and there we agree.
ALWAYS = ("qwen35.full_attention_interval", "qwen35moe.full_attention_interval")
# Keys that may differ where something under the given name was spoiled, and why ours is right.
DEVIATIONS: dict[str, tuple[str, ...]] = {
    # Null is not set, so the default counts: what llama.cpp takes where upstream writes no key.
    "rope_theta": ("qwen35.rope.freq_base", "qwen35moe.rope.freq_base"),
    # Here transformers forgets the tokens of tokenizer.json that the settings do not repeat.
    "added_tokens_decoder": ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"),
    # Without a type upstream leaves the list of layers to full_attention_interval, which says it.
    "model_type": ("qwen35moe.attention.recurrent_layers",),
}


def compared(model: Path, out: Path, mutation: Mutation) -> list[str]:
    """How our file differs from upstream's, where both write one."""
    ours, theirs = out / "ours.gguf", out / "theirs.gguf"
    result = invoke("convert", model, "-o", ours, "--quant", "BF16", "--mtp-type", "BF16")
    if result.exit_code:
        return []
    try:
        want = without_ones(describe(convert(model, theirs, "bf16")))
        keys = (key for name in mutation.path for key in DEVIATIONS.get(str(name), ()))
        found = differences(want, describe(ours), [*ALWAYS, *keys])
        return [f"{mutation}: {line}" for line in found]
    except UpstreamError:
        return []
    finally:
        for path in out.iterdir():
            path.unlink()


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra")
@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("file", SPOILED)
def test_every_value_as_upstream(file: str, name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / name, SPECS[name])
    out = tmp_path / "out"
    out.mkdir()
    found: list[str] = []
    for mutation in file_mutations(model, file):
        with spoiled(model / file, mutation):
            found += compared(model, out, mutation)
    assert not found, "\n".join(found)


def test_mutations_reach_every_value() -> None:
    """Each place once removed, and once holding each other value; the original is left alone."""
    whole: dict[str, Any] = {"a": {"b": [1, {"c": None}]}, "d": "x"}
    before = json.dumps(whole)
    made = [mutation.of(whole) for mutation in mutations(whole)]
    assert json.dumps(whole) == before
    for expected in (
        {"d": "x"},
        {"a": {}, "d": "x"},
        {"a": {"b": [1, {}]}, "d": "x"},
        {"a": {"b": [None, {"c": None}]}, "d": "x"},
        {"a": {"b": [1, {"c": -1}]}, "d": "x"},
    ):
        assert expected in made
