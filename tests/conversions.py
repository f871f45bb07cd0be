"""What the tests of `mtp-gguf convert` share: a checkpoint to break, and the command to run on it.

`refused` holds every failure to the same promise: its exit code, one sentence on standard error
that has the given words, no traceback, and an output folder in which nothing changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import checkpoints
import numpy as np
from checkpoints import NUMPY_DTYPES, Array, Spec, write_checkpoint, write_safetensors
from click.testing import Result
from gguf import GGUFReader, ReaderTensor
from typer.testing import CliRunner

from mtp_gguf.cli import app
from mtp_gguf.native.runtime import VARIABLE

# The smallest model with all kinds of layers; only blocks of 32 divide its rows of 64 and 96.
TINY = Spec(
    "tiny",
    hidden=64,
    intermediate=96,
    layers=2,
    interval=2,
    heads=2,
    kv_heads=1,
    head_dim=32,
    k_heads=1,
    v_heads=2,
    linear_dim=32,
)
# The same with rows that blocks of 256 divide, for what is about types.
SMALL = Spec("small", layers=2, interval=2, kv_heads=1)
MAIN = "import sys; from mtp_gguf.cli import main; sys.argv[0] = 'mtp-gguf'; main()"


@cache
def _written(spec: Spec, root: Path) -> Path:
    return write_checkpoint(root / spec.name, spec)


class Checkpoints:
    """Checkpoints by spec: `get` one to read, or a `copy` of one to break."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def get(self, spec: Spec) -> Path:
        return _written(spec, self._root)

    def copy(self, spec: Spec, parent: Path) -> Path:
        return shutil.copytree(self.get(spec), parent / spec.name)


def write_repeating(folder: Path, spec: Spec) -> Path:
    """A large checkpoint at little cost: its matrices repeat one short run of weights."""
    run = np.random.default_rng(0).standard_normal(4099).astype(np.float32) / 32
    with patch.object(checkpoints, "_bell", lambda _name, shape, *_: np.resize(run, shape)):
        return write_checkpoint(folder, spec)


def read_tensors(path: Path) -> dict[str, Array]:
    """Every tensor of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            data[8 + length + e["data_offsets"][0] : 8 + length + e["data_offsets"][1]],
            NUMPY_DTYPES[e["dtype"]],
        ).reshape(e["shape"])
        for name, e in header.items()
    }


def edit_tensors(folder: Path, edit: Callable[[dict[str, Array]], object]) -> None:
    """Rewrite model.safetensors after `edit` had its way with the tensors."""
    path = folder / "model.safetensors"
    tensors = read_tensors(path)
    edit(tensors)
    write_safetensors(path, tensors)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the header of a safetensors file and leave its data as they are."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a JSON file after `edit` had its way with the object in it."""
    value = json.loads(path.read_text(encoding="utf-8"))
    edit(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def invoke(*arguments: object) -> Result:
    """Run `mtp-gguf ARGUMENTS` in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


def converted(model: Path, output: Path, *options: object) -> dict[str, ReaderTensor]:
    """Convert, which must succeed; the tensors of the one file written."""
    result = invoke("convert", model, "-o", output, *options)
    assert result.exit_code == 0, result.output
    return tensors_of(output)


def tensors_of(path: Path) -> dict[str, ReaderTensor]:
    """The tensors of a GGUF file, read with the gguf package."""
    return {t.name: t for t in GGUFReader(path).tensors}


def value_of(path: Path, key: str) -> Any:
    """What stands under a key of a GGUF file; None when the key is absent."""
    field = GGUFReader(path).get_field(key)
    return None if field is None else field.contents()


_LOAD = """
import sys
from mtp_gguf.native.runtime import llama_cpp
params = llama_cpp.llama_model_default_params()
sys.exit(0 if llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params) else 3)
"""


def loads(path: Path) -> bool:
    """Whether an unpatched llama.cpp loads a file, weights and all: in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, path],
        env=os.environ | {VARIABLE: "stock"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr
    return done.returncode == 0


def differing(a: Mapping[str, ReaderTensor], b: Mapping[str, ReaderTensor]) -> list[str]:
    """Names of tensors that are not in both, or not of the same type, shape and bytes."""
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a
        or name not in b
        or a[name].tensor_type != b[name].tensor_type
        or [*a[name].shape] != [*b[name].shape]
        or a[name].data.tobytes() != b[name].data.tobytes()
    )


def held(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, hidden files included."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}


def refused(arguments: Sequence[object], *words: str, output: Path, code: int = 1) -> str:
    """Run a conversion that must fail, and give its message.

    words: what the message must say. output: the folder that must stay as it is.
    """
    before = held(output)
    result = invoke("convert", *arguments)
    message = check_refusal(result.exit_code, result.stderr, *words, code=code)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert held(output) == before
    return message


def check_refusal(exit_code: int | None, stderr: str, *words: str, code: int = 1) -> str:
    """Hold exit code and standard error to what was promised; the message in one line."""
    assert exit_code == code, stderr
    assert "Traceback" not in stderr
    if code != 2:
        assert stderr.startswith("mtp-gguf: "), stderr
        assert stderr.count("\n") == 1, stderr
    message = re.sub(r"[\s│]+", " ", stderr)  # usage errors come in a box, wrapped
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"
    return message


def spawn(*arguments: object, prelude: str = "", **options: Any) -> subprocess.Popen[str]:
    """Start `mtp-gguf ARGUMENTS` as a process of its own, after the Python code of `prelude`."""
    command = [sys.executable, "-c", f"{prelude}\n{MAIN}", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **{**pipes, **options})
