"""A program that llama.cpp crashes prints one sentence and exits with code 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fuzz.native_corpus import DENSE

from mtp_gguf.gguf_tools.files.format import ValueType
from support.commands import MAIN
from support.generation import in_another_process
from support.gguf_mutations import Mutation, Retype, SetKey, mutated, read_content
from support.models import Models

# Goes on after the end of the text, so that the file is still in use when it is cut off.
ENDLESS = """
import sys
from mtp_gguf.native.crashes import tell_crashes
from mtp_gguf.native.llama.mtp_llama import MTPLlama
tell_crashes()
with MTPLlama(sys.argv[1], n_ctx=32768, n_threads=1, depth=0) as llm:
    for token in llm.generate(llm.tokenize(b"a"), temp=0.0):
        print(token, flush=True)
"""
# Overflows the stack of the calling thread, as a text can that is nested too deep.
OVERFLOW = """
import ctypes, sys
from mtp_gguf.native.crashes import tell_crashes
tell_crashes()
ctypes.CDLL(sys.argv[1]).overflow(0)
"""
UNCHECKED = (
    "import mtp_gguf.gguf_tools.files.loadable as loadable\nloadable.load_faults = lambda _: []\n"
)


@pytest.fixture(scope="module")
def sound(models: Models) -> Path:
    return models.gguf(DENSE)


def generate(
    sound: Path, mutation: Mutation, folder: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    """Run `generate` with a model that the checks, which are switched off, do not keep out."""
    (folder / "sitecustomize.py").write_text(UNCHECKED)
    path = folder / "hostile.gguf"
    path.write_bytes(mutated(read_content(sound), [mutation]))
    words = ("-c", MAIN, "generate", path, "-p", "a", "-t", "1", "--depth", "0")
    env = os.environ | {"PYTHONPATH": str(folder)}
    pipes: Any = {"capture_output": True, "text": True}
    return subprocess.run([sys.executable, *flags, *words], env=env, check=False, **pipes)


ODD = SetKey("qwen35.rope.dimension_count", ValueType.U32, 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mutation", "says"),
    [
        (ODD, "GGML_ASSERT(n_dims % 2 == 0)"),
        (SetKey("qwen35.block_count", ValueType.U32, 1025), "GGML_ASSERT(hparams.n_layer_all > 0"),
        (Retype("blk.1.attn_k.weight", "I8"), "(SIGSEGV)"),
    ],
    ids=["while running", "while loading", "by a signal"],
)
def test_crash_is_reported_in_one_sentence(
    mutation: Mutation, says: str, sound: Path, tmp_path: Path
) -> None:
    done = generate(sound, mutation, tmp_path)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("mtp-gguf: the model ended the process: ")
    assert says in line
    assert line.endswith("tries a model in a process of its own")


def test_a_traceback_is_printed_if_faulthandler_is_enabled(sound: Path, tmp_path: Path) -> None:
    """As a developer wants it: `python -X faulthandler` is not overridden."""
    done = generate(sound, ODD, tmp_path, "-X", "faulthandler")
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "Fatal Python error: Aborted" in done.stderr
    assert "the model ended the process" not in done.stderr


def test_model_file_truncated_while_in_use(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(sound.read_bytes())
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)], **pipes) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(1)
        os.truncate(path, 4096)
        running.stdout.read()
        stderr = running.stderr.read().decode()
    assert running.returncode == 1, stderr
    assert "a file was cut off while it was in use" in stderr
    assert "Traceback" not in stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no stack for signals")
def test_a_stack_overflow_is_reported(tmp_path: Path) -> None:
    source, library = tmp_path / "overflow.c", tmp_path / "overflow.so"
    source.write_text(
        "long overflow(long n) {\n"
        "    volatile char here[4096];\n"
        "    here[0] = (char) n;\n"
        "    return overflow(n + 1) + here[0];\n"
        "}\n"
    )
    subprocess.run(["cc", "-O0", "-shared", "-fPIC", "-o", library, source], check=True)
    done = in_another_process(OVERFLOW, library)
    assert done.returncode == 1, done.stderr
    assert "the model ended the process: an invalid memory access (SIGSEGV)" in done.stderr
