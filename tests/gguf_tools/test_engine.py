"""The splice engine: few large copies, every way of copying, nothing left behind on failure."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.errors import FormatError, OutputError
from mtp_gguf.gguf_tools.files import output as output_module
from mtp_gguf.gguf_tools.files.format import TensorSpec, Value, ValueType, open_gguf
from mtp_gguf.gguf_tools.files.output import OutputFile
from mtp_gguf.gguf_tools.files.rewrite import OutputSpec, TensorCopy, copies, write
from mtp_gguf.gguf_tools.files.tensor_types import F32
from mtp_gguf.gguf_tools.heads.transplant import graft
from mtp_gguf.gguf_tools.hub.sources import FileSource
from mtp_gguf.gguf_tools.model import Metadata, open_model
from support.checkpoints import DENSE
from support.commands import held, refused, succeed
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


def failing(code: int) -> Callable[..., int]:
    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("broken", [["copy_file_range"], ["copy_file_range", "sendfile"]])
def test_every_way_of_copying(
    broken: list[str], models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in broken:
        monkeypatch.setattr(os, name, failing(errno.EXDEV))
    whole = models.convert(DENSE, *UNIFORM)
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    succeed("graft", "--no-check", trunk, "--from", whole, "-o", tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == whole.read_bytes()


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


def test_a_source_that_shrinks_while_it_is_copied(models: Models, tmp_path: Path) -> None:
    source = tmp_path / "source.gguf"
    source.write_bytes(models.convert(DENSE, *UNIFORM).read_bytes())
    with open_model(source) as model:
        spec = OutputSpec(model.metadata(), copies(model))
        os.truncate(source, 500_000)
        before = held(tmp_path)
        with pytest.raises(FormatError, match=r"source.gguf: the file ends at byte 500000"):
            write(tmp_path / "x.gguf", spec)
    assert held(tmp_path) == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fills_up(
    code: int, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", failing(code))
    words = ("no space",) if code == errno.ENOSPC else ("cannot be written",)
    whole = models.convert(DENSE, *UNIFORM)
    refused(tmp_path, "strip", whole, "-o", tmp_path / "x.gguf", words=words)


def test_an_interrupt_leaves_nothing(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "copy_file_range", interrupt)
    whole = models.convert(DENSE, *UNIFORM)
    refused(tmp_path, "strip", whole, "-o", tmp_path / "x.gguf", words=("interrupted",), code=130)


def test_tensors_given_as_bytes_and_another_alignment(models: Models, tmp_path: Path) -> None:
    data = bytes(range(64))

    def align(keys: Metadata) -> None:
        keys["general.alignment"] = Value(ValueType.U32, 256)

    def add(tensors: dict[str, TensorCopy]) -> None:
        tensors["extra"] = TensorCopy(TensorSpec("extra", (16,), F32), data=data)

    whole = models.convert(DENSE, *UNIFORM)
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
    succeed("strip", made, "-o", tmp_path / "trunk.gguf")
    succeed(
        "graft",
        "--no-check",
        tmp_path / "trunk.gguf",
        "--from",
        whole,
        "-o",
        tmp_path / "again.gguf",
    )
    with open_gguf(tmp_path / "again.gguf") as file:
        assert file.alignment == 256
        assert "extra" in file.by_name


def test_sources_without_a_descriptor(tmp_path: Path) -> None:
    class Memory:
        name, size = "memory", 100

        def read(self, offset: int, length: int) -> bytes:
            return bytes(range(100))[offset : offset + length]

        def close(self) -> None:
            pass

    with OutputFile(tmp_path / "x", 40) as output:
        output.copy(10, Memory(), 50, 30)
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


# ----------------------------------------------------------------------------- shards


def test_shards_that_do_not_belong_together(models: Models, tmp_path: Path) -> None:
    first = models.convert(DENSE, *UNIFORM, "--split-max-size", "1M")
    shards = sorted(first.parent.iterdir())
    assert len(shards) > 2

    def copy(*order: int) -> Path:
        for path in tmp_path.iterdir():
            path.unlink()
        for name, index in zip(shards, order, strict=True):
            (tmp_path / name.name).write_bytes(shards[index].read_bytes())
        return tmp_path / shards[0].name

    order = list(range(len(shards)))
    succeed("strip", copy(*order), "-o", tmp_path / "ok.gguf")
    (tmp_path / "ok.gguf").unlink()

    swapped = copy(0, 2, 1, *order[3:])
    words = ("split.no: expected 1 by the file's name, found 2",)
    refused(tmp_path, "strip", swapped, "-o", tmp_path / "x.gguf", words=words)
    twice = copy(0, 1, 1, *order[3:])
    words = ("split.no: expected 2 by the file's name, found 1",)
    refused(tmp_path, "strip", twice, "-o", tmp_path / "x.gguf", words=words)
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(shards[0].read_bytes())
    words = (f"split.count: expected 1 by the file's name, found {len(shards)}",)
    refused(tmp_path, "strip", alone, "-o", tmp_path / "x.gguf", words=words)
    missing = copy(*order)
    (tmp_path / shards[-1].name).unlink()
    refused(tmp_path, "strip", missing, "-o", tmp_path / "x.gguf", words=("is missing",))
