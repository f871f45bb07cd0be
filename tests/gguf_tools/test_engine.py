"""The splice engine: few large copies, every way of copying, nothing left behind on failure."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.errors import OutputError
from mtp_gguf.gguf_tools.files import output as output_module
from mtp_gguf.gguf_tools.files.format import TensorSpec, Value, ValueType, open_gguf
from mtp_gguf.gguf_tools.files.output import OutputFile
from mtp_gguf.gguf_tools.files.rewrite import OutputSpec, TensorCopy, copies, write
from mtp_gguf.gguf_tools.files.tensor_types import F32
from mtp_gguf.gguf_tools.heads.transplant import graft
from mtp_gguf.gguf_tools.hub.sources import FileSource
from mtp_gguf.gguf_tools.model import open_model
from support.byte_source import ByteSource
from support.checkpoints import DENSE
from support.commands import refused, succeed
from support.failing_files import failing
from support.gguf_files import edited
from support.models import Models

UNIFORM = ("--quant", "Q8_0")


def test_the_base_moves_in_one_copy(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    copy = OutputFile.copy

    def counted(self: OutputFile, *arguments: Any) -> None:
        copies.append(arguments[3])
        copy(self, *arguments)

    monkeypatch.setattr(OutputFile, "copy", counted)
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    with open_model(trunk) as base, open_model(models.convert(DENSE, *UNIFORM)) as donor:
        write(tmp_path / "x.gguf", graft(base, donor))
        assert len(copies) == 2
        last = base.first.tensors[-1]
        assert copies[0] == last.offset + last.nbytes - base.first.data_offset


def test_copies_in_parts(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may copy less than requested, and each call requests a bounded part."""
    monkeypatch.setattr(output_module, "_COPY_BYTES", 10_007)
    real = os.copy_file_range

    def less(source: int, target: int, count: int, *offsets: int) -> int:
        assert count <= 10_007
        return real(source, target, max(count // 2, 1), *offsets)

    monkeypatch.setattr(os, "copy_file_range", less)
    whole = models.convert(DENSE, *UNIFORM)
    done: list[int] = []
    with open_model(whole) as model:
        tensors = copies(model)
        write(tmp_path / "x.gguf", OutputSpec(model.metadata(), tensors), done.append)
        last = model.first.tensors[-1]
        assert sum(done) == last.offset + last.nbytes - model.first.data_offset
    assert (tmp_path / "x.gguf").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fills_up(
    code: int, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", failing(code))
    words = ("no space",) if code == errno.ENOSPC else ("cannot be written",)
    whole = models.convert(DENSE, *UNIFORM)
    refused(tmp_path, "strip", whole, "-o", tmp_path / "x.gguf", words=words)


def test_tensors_given_as_bytes_and_another_alignment(models: Models, tmp_path: Path) -> None:
    data = bytes(range(64))

    def add(tensors: dict[str, TensorCopy]) -> None:
        tensors["extra"] = TensorCopy(TensorSpec("extra", (16,), F32), data=data)

    whole = models.convert(DENSE, *UNIFORM)
    align = {"general.alignment": Value(ValueType.U32, 256)}
    made = edited(whole, tmp_path / "x.gguf", metadata=align, tensors=add)
    with open_gguf(made) as file, open_gguf(whole) as original:
        assert file.alignment == 256
        for tensor in file.tensors:
            assert (tensor.offset - file.data_offset) % 256 == 0
            if tensor.name in original.by_name:
                held_there = original.by_name[tensor.name]
                assert file.source.read(tensor.offset, tensor.nbytes) == original.source.read(
                    held_there.offset, held_there.nbytes
                )
        extra = file.by_name["extra"]
        assert file.source.read(extra.offset, 64) == data
    # Grafting keeps the alignment of the base.
    trunk, again = tmp_path / "trunk.gguf", tmp_path / "again.gguf"
    succeed("strip", made, "-o", trunk)
    succeed("graft", "--no-check", trunk, "--from", whole, "-o", again)
    with open_gguf(again) as file:
        assert file.alignment == 256
        assert "extra" in file.by_name


def test_sources_without_a_descriptor(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "x", 40) as output:
        output.copy(10, ByteSource(bytes(range(100))), 50, 30)
        output.commit()
    assert (tmp_path / "x").read_bytes() == bytes(10) + bytes(range(50, 80))


def test_a_copy_into_a_full_file_system_is_no_format_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    for name in ("copy_file_range", "sendfile"):
        monkeypatch.setattr(os, name, failing(errno.EINVAL))
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    source = FileSource(tmp_path / "a")
    with OutputFile(tmp_path / "b", 100) as output, pytest.raises(OutputError, match="no space"):
        output.copy(0, source, 0, 100)
    source.close()
