"""`pytorch_model.bin`: reads the tensors that torch.save wrote, and runs no code."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.files.torch_file import open_torch_file
from support.checkpoint_edits import read_tensors
from support.checkpoints import TINY
from support.commands import check_refusal, invoke
from support.conversions import converted, refused
from support.gguf_files import differing
from support.models import Models

with suppress(ImportError):
    import torch

needs_torch = [
    pytest.mark.upstream,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra"),
]


def state_dict(folder: Path) -> dict[str, Any]:
    """The tensors of a checkpoint as torch has them."""
    found = {}
    for name, array in read_tensors(folder / "model.safetensors").items():
        raw = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
        kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[str(array.dtype)]
        found[name] = raw.view(kind).reshape(array.shape)
    return found


class TestTorch:
    pytestmark = needs_torch

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_a_checkpoint_in_one_file(self, protocol: int, models: Models, tmp_path: Path) -> None:
        """With the attributes and parameters that a module's own state dict has."""
        model = models.copy(TINY, tmp_path)
        whole = converted(model, tmp_path / "a.gguf", "--quant", "F16")
        tensors = OrderedDict(state_dict(model))
        tensors["model.norm.weight"] = torch.nn.Parameter(tensors["model.norm.weight"])
        tensors._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
        torch.save(tensors, model / "pytorch_model.bin", pickle_protocol=protocol)
        (model / "model.safetensors").unlink()
        assert not differing(whole, converted(model, tmp_path / "b.gguf", "--quant", "F16"))
        listed = invoke("list-tensors", model)
        assert "can draft once converted: 15 mtp.* tensors" in listed.output

    def test_shards_with_an_index(self, models: Models, tmp_path: Path) -> None:
        model = models.copy(TINY, tmp_path)
        whole = converted(model, tmp_path / "a.gguf", "--quant", "F16")
        tensors = state_dict(model)
        (model / "model.safetensors").unlink()
        weight_map: dict[str, str] = {}
        for i in range(2):
            name = f"pytorch_model-{i + 1:05}-of-00002.bin"
            part = dict(list(tensors.items())[i::2])
            torch.save(part, model / name)
            weight_map |= dict.fromkeys(part, name)
        index = model / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        assert not differing(whole, converted(model, tmp_path / "b.gguf", "--quant", "F16"))
        second = model / "pytorch_model-00002-of-00002.bin"
        second.rename(tmp_path / "away.bin")
        words = ("pytorch_model-00002-of-00002.bin", "finish the download")
        (tmp_path / "out").mkdir()
        refused([model, "-o", tmp_path / "out" / "c.gguf"], *words, output=tmp_path / "out")
        index.unlink()
        words = ("expected 2 shards", "pytorch_model-00002-of-00002.bin")
        refused([model, "-o", tmp_path / "out" / "c.gguf"], *words, output=tmp_path / "out")

    def test_every_dtype_and_shape(self, tmp_path: Path) -> None:
        tensors = {
            "scalar": torch.tensor(3.0),
            "empty": torch.zeros(0, 4),
            "view": torch.arange(12, dtype=torch.int64).reshape(3, 4)[1:],
            "shared": (base := torch.arange(6, dtype=torch.float64)),
            "again": base,
            "half": torch.ones(2, 2, dtype=torch.float16),
            "byte": torch.ones(3, dtype=torch.uint8),
            "flag": torch.tensor([True, False]),
            "small": torch.ones(2, dtype=torch.int8),
            "word": torch.ones(2, dtype=torch.int16),
            "int": torch.ones(2, dtype=torch.int32),
            "fp8": torch.ones(2, dtype=torch.float8_e4m3fn),
            "unsigned": torch.ones(2, dtype=torch.uint16),
        }
        path = tmp_path / "x.bin"
        torch.save(tensors, path)
        file = open_torch_file(path)
        assert list(file.tensors) == list(tensors)
        for name, tensor in tensors.items():
            stored = file.tensors[name]
            assert stored.shape == tuple(tensor.shape)
            raw = tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1)
            wanted = raw.view(torch.uint8).numpy().tobytes()
            assert file.source.read(stored.offset, stored.nbytes) == wanted, name
        file.source.close()

    @pytest.mark.parametrize("kind", ["legacy", "transposed", "nested", "number", "complex"])
    def test_what_only_torch_reads(self, kind: str, models: Models, tmp_path: Path) -> None:
        """It is refused with a command, and the command makes a checkpoint of it."""
        tensors: dict[str, Any] = {"a": torch.ones(2, 3)}
        if kind == "transposed":
            tensors["a"] = tensors["a"].T
        if kind == "nested":
            tensors = {"state_dict": tensors, "epoch": 3}
        if kind == "number":
            tensors["n"] = 3
        if kind == "complex":
            tensors["a"] = torch.ones(2, dtype=torch.complex64)
        path = tmp_path / "pytorch_model.bin"
        torch.save(tensors, path, _use_new_zipfile_serialization=kind != "legacy")
        result = invoke("list-tensors", path)
        message = check_refusal(result.exit_code, result.stderr, "rewrite it", "torch.load(")
        if kind == "transposed":
            command = message.partition("rewrite it with PyTorch: python ")[2].strip()
            subprocess.run(f"{sys.executable} {command}", shell=True, check=True, timeout=120)
            assert invoke("list-tensors", tmp_path / "model.safetensors").exit_code == 0


def archive(path: Path, pickled: bytes, data: bytes = bytes(64), root: str = "x/") -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{root}data.pkl", pickled)
        file.writestr(f"{root}data/0", data)
    return path


class FloatStorage:
    """Stands for torch's where that is not installed."""


FloatStorage.__module__ = "torch"


def pickled(tensors: Any, protocol: int = 2) -> bytes:
    """What torch.save would write: tensors are ("t", start, shape, stride) here."""

    pickler: Any = pickle._Pickler  # the one in Python, which can be extended

    class Pickler(pickler):  # type: ignore[misc]
        def save(self, value: Any, save_persistent_id: bool = True) -> Any:
            if isinstance(value, tuple) and value[:1] == ("t",):
                self.write(b"ctorch._utils\n_rebuild_tensor_v2\n(")
                self.write(b"(")
                super().save("storage")
                self.write(b"ctorch\nFloatStorage\n")
                for item in ("0", "cpu", 16):
                    super().save(item)
                self.write(b"tQ")
                for item in (*value[1:], False, None):
                    super().save(item)
                self.write(b"tR")
                return None
            return super().save(value, save_persistent_id)

    out = io.BytesIO()
    Pickler(out, protocol).dump(tensors)
    return out.getvalue()


GOOD = {"a": ("t", 0, (2, 3), (3, 1)), "b": ("t", 6, (4,), (1,))}


def test_the_files_of_these_tests_are_read(tmp_path: Path) -> None:
    # torch keeps the stride of the tensor that a row was cut from.
    tensors = GOOD | {"row": ("t", 4, (1, 4), (99, 1))}
    file = open_torch_file(archive(tmp_path / "x.bin", pickled(tensors)))
    file.source.close()
    assert {t.name: (t.dtype, t.shape, t.nbytes) for t in file.tensors.values()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("F32", (4,), 16),
        "row": ("F32", (1, 4), 16),
    }


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (os.mkdir, (str(self.path),))


def test_nothing_is_run(tmp_path: Path) -> None:
    for protocol in (2, 4):
        made = tmp_path / "made"
        path = archive(tmp_path / "x.bin", pickle.dumps({"a": Runs(made)}, protocol))
        pickle.loads(pickle.dumps(Runs(made)))
        made.rmdir()  # the pickle is one that works
        with pytest.raises(FormatError, match=r"found posix\.mkdir; rewrite it"):
            open_torch_file(path)
        assert not made.exists()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a": ("t", 0, (5, 4), (4, 1))}, "expected 80 bytes"),
        ({"a": ("t", 12, (8,), (1,))}, "expected 80 bytes"),
        ({"a": ("t", 0, (1 << 62, 1 << 62), (1 << 62, 1))}, "bytes of data"),
        ({"a": ("t", -1, (2,), (1,))}, "impossible shape"),
        ({"a": ("t", 0, (2,), (1, 1))}, "impossible shape"),
        ({"a": ("t", 0, (1,) * 65, (1,) * 65)}, "impossible shape"),
        ({"a": ("t", 0, 3, 1)}, "expected a pickle"),
        ({"a": ("t", 0, (2, 2), (1, 2))}, "a view of another"),
        ({"a": ("t", 0, (4,), (0,))}, "a view of another"),
        ({3: ("t", 0, (4,), (1,))}, "tensors by name"),
        ({("a", "b"): 1}, "a key of type tuple"),
        ([], "found list"),
        ({"a": 1.5}, "found float"),
        ({"a": {1, 2}}, "found __builtin__.set"),
    ],
)
def test_invalid_tensors(tensors: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=words):
        open_torch_file(archive(tmp_path / "x.bin", pickled(tensors)))


def test_damaged_files(tmp_path: Path) -> None:
    """Every prefix and hundreds of changed bytes end in a FormatError or in sound tensors."""
    path = tmp_path / "x.bin"
    program = pickled(GOOD)
    whole = archive(path, program).read_bytes()
    rng = random.Random(0)
    cases = [whole[:n] for n in range(0, len(whole), 7)]
    for _ in range(600):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        cases.append(bytes(changed))
    size = len(whole)
    for case in cases:
        path.write_bytes(case)
        try:
            file = open_torch_file(path)
        except FormatError:
            continue
        for tensor in file.tensors.values():
            assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= size
        file.source.close()


def test_hostile_programs(tmp_path: Path) -> None:
    """A memo of two thousand million entries, lists in lists, marks without end.

    And names of tuples in tuples, whose text would be too deep for Python or too long for memory.
    """
    start = b"\x80\x02"
    far = open_torch_file(archive(tmp_path / "far.bin", start + b"}r\xff\xff\xff\x7f."))
    far.source.close()
    assert not far.tensors
    programs = (
        start + b"]" + b"q\x00h\x00a" * 1000 + b".",
        start + b"(" * 100_000 + b".",
        start + b"}" + b"(" * 3 + b"u.",
        start + b"h\x07.",
        start + b"0.",
        b"",
        b"." * 3,
        start + b"(" * 100_000 + b"t" * 100_000 + b".",
        start + b")" + b"\x85" * 100_000 + b"X\x01\0\0\0a\x93.",
        start + b")" + b"q\x00h\x00\x86" * 40 + b"X\x01\0\0\0a\x93.",
        start + b"\x8a\xff" + b"\x01" * 255 + b".",
    )
    for i, program in enumerate(programs):
        with pytest.raises(FormatError):
            open_torch_file(archive(tmp_path / f"{i}.bin", program)).source.close()


def test_other_archives(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", pickled(GOOD))
    with pytest.raises(FormatError, match=r"one data\.pkl"):
        open_torch_file(path)
    archive(path, pickled(GOOD))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("x/byteorder", "big")
    with pytest.raises(FormatError, match="little-endian"):
        open_torch_file(path)
    archive(path, pickled(GOOD), root="x/y/")
    open_torch_file(path).source.close()


def test_an_adapter_is_named(models: Models, tmp_path: Path) -> None:
    model = models.copy(replace(TINY, name="adapter"), tmp_path)
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    (tmp_path / "out").mkdir()
    words = ("a LoRA adapter", "merge_and_unload")
    refused([model, "-o", tmp_path / "out" / "c.gguf"], *words, output=tmp_path / "out")
