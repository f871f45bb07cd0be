"""llama-cpp-python's own tests over MTPLlama, on local models, with the texts that Llama writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.server.upstream_source import base, fetch_archive
from support.checkpoints import NARROW
from support.gguf_files import Rewrite
from support.models import Dial
from support.upstream.random_models import vocabulary, write_random_model
from support.upstream.sdist import llama_cpp_source

pytestmark = pytest.mark.upstream

TESTS = Path(__file__).parents[1]

# Statements about texts, in which `stated` takes their place.
_STATEMENTS = (
    (r'assert (\w+)\["choices"\]\[0\]\["text"\] == "[^"]*"', r"stated(\1)"),
    (r'assert (\w+)\["choices"\]\[0\]\["text"\]\.lower\(\)\.startswith\("[^"]*"\)', r"stated(\1)"),
    (r"assert (number_1) != number_2", r"stated(number_1 + number_2)"),
    (r"assert tokens == \[9419, [^\]]*\]", "stated(str(tokens))"),  # of a later vocabulary
)
STATEMENTS = 6  # that the suite makes


def adapted(source: str) -> str:
    """The suite with statements about texts replaced; AssertionError if they are other ones."""
    total = 0
    for pattern, replacement in _STATEMENTS:
        source, n = re.subn(pattern, replacement, source)
        total += n
    assert total == STATEMENTS, total
    return "from support.upstream.llama_cpp_suite import stated\n" + source


@pytest.fixture
def local_models(dial: Dial, rewrite: Rewrite, tmp_path: Path) -> dict[str, str]:
    """A file for each that the suite downloads; those of Qwen3.5 and the hybrid one can draft."""
    words = vocabulary("qwen35")
    tokens: Any = words["tokenizer.ggml.tokens"].data
    spec = replace(
        NARROW,
        name="suite",
        vocab_size=len(tokens),
    )
    folder = dial.models.root / spec.name
    dial.module.write_dial_model(folder, spec, 0.7, dial.LAYER_SCALE)
    drafting = rewrite(dial.models.gguf(folder, "F16", "F16"), keys=words)
    made = {name: write_random_model(tmp_path / name, name) for name in ("llama", "mamba", "bert")}
    return {
        "Qwen3.5-0.8B-Q8_0.gguf": str(drafting),
        "Falcon-H1-Tiny-90M-Instruct-Q2_K.gguf": str(dial("tiny")),
        "stories15M-q4_0.gguf": str(made["llama"]),
        "mamba-130m-hf.Q2_K.gguf": str(made["mamba"]),
        "bge-small-en-v1.5-q4_k_m.gguf": str(made["bert"]),
    }


def run_suite(suite: Path, settings: dict[str, Any]) -> str:
    """The end of what pytest says of the suite, in a process of its own, beside llama.cpp."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "support.upstream.llama_cpp_suite", "-c", os.devnull]
    command += ["--rootdir", str(suite.parent)]
    done = subprocess.run(
        [*command, str(suite)],
        cwd=suite.parent,
        env={**os.environ, "SUITE": json.dumps(settings), "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.thorough
def test_the_suite_passes_whole(local_models: dict[str, str], tmp_path: Path) -> None:
    with tarfile.open(fetch_archive()) as archive:
        member = archive.extractfile(f"{base().stem}/tests/test_llama.py")
        assert member is not None
        source = member.read().decode()
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "llama.cpp").symlink_to(llama_cpp_source())
    settings = {"models": local_models, "texts": str(tmp_path / "texts.json")}
    suite = tmp_path / "test_suite.py"
    suite.write_text(adapted(source), encoding="utf-8")
    theirs = run_suite(suite, {**settings, "class": "Llama"})
    ours = run_suite(suite, {**settings, "class": "MTPLlama"})
    passed = [int(said.split(" passed")[0]) for said in (theirs, ours)]
    assert passed[0] == passed[1] > 15
