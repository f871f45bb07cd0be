"""What depth "auto" has learned is there for the next process that runs the same model."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.depth_file import VARIABLE
from support.generation import load, take
from support.models import Dial

PROMPT = [5, 6, 7, 8]
TOKENS = 120


def decode(model: Path, **options: Any) -> tuple[list[int], int]:
    """The tokens of a greedy answer, and how many drafts were made for it."""
    with load(model, lookup=False, **options) as llm:
        return take(llm, TOKENS, PROMPT), sum(llm.mtp_stats.drafted)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is kept, in a folder that does not exist yet."""
    path = tmp_path / "not yet" / "model.depth"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_a_head_that_is_never_right_is_known(dial: Dial, file: Path) -> None:
    model = dial("tiny", hit=0.0)
    tokens, learning = decode(model)
    assert file.is_file()
    again, drafted = decode(model)
    assert again == tokens
    assert drafted <= 2  # probes, of which the first one is made at once
    assert learning > 2 * drafted
    assert not list(file.parent.glob("*.part"))


def test_a_file_in_the_working_folder(
    dial: Dial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "model.depth")
    decode(dial("tiny", hit=0.0))
    assert Path("model.depth").is_file()


def test_a_text_of_a_few_tokens_is_not_worth_a_file(dial: Dial, file: Path) -> None:
    with load(dial("tiny"), lookup=False) as llm:
        take(llm, 4, PROMPT)
    assert not file.exists()


def test_a_fixed_depth_keeps_nothing(dial: Dial, file: Path) -> None:
    decode(dial("tiny"), depth=2)
    assert not file.exists()


def test_each_model_has_a_file_in_the_cache(
    dial: Dial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for hit in (0.0, 0.7):
        decode(dial("tiny", hit=hit))
    assert len(list((tmp_path / "mtp-gguf" / "depth").iterdir())) == 2


def with_checksum(data: bytes) -> bytes:
    return data[:8] + zlib.crc32(data[12:]).to_bytes(4, "little") + data[12:]


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "short": lambda data: data[:-1],
    "short, with a checksum": lambda data: with_checksum(data[:-1]),
    "long, with a checksum": lambda data: with_checksum(data + b"\0"),
    "another byte": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "not ours": lambda data: b"x" + data[1:],
    "huge": lambda data: data + bytes(10_000_000),
    "of another head": lambda data: with_checksum(data[:20] + bytes(8) + data[28:]),
    "of a newer version": lambda data: with_checksum(data[:28] + b"\xff" + data[29:]),
    "not a number": lambda data: with_checksum(data[:44] + b"\xff" * 8 + data[52:]),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_what_is_damaged_is_learned_anew(dial: Dial, file: Path, how: str) -> None:
    model = dial("tiny", hit=0.0)
    tokens, learning = decode(model)
    good = file.read_bytes()
    assert with_checksum(good) == good
    file.write_bytes(DAMAGED[how](good))
    again, drafted = decode(model)
    assert again == tokens
    assert drafted > learning // 2
    assert file.stat().st_size < 2 * len(good)
    assert decode(model)[1] <= 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_and_a_folder_are_left_alone(dial: Dial, file: Path) -> None:
    file.parent.mkdir()
    os.mkfifo(file)
    decode(dial("tiny", hit=0.0))
    file.unlink()
    file.mkdir()
    decode(dial("tiny", hit=0.0))
    assert file.is_dir()
    assert list(file.parent.iterdir()) == [file]
