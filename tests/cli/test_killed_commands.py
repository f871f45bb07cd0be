"""Commands that are killed, or whose disk fills or input changes: no half-written file, no loss.

Everyday runs do one round of each; the sweep:

    MTP_KILLING_ROUNDS=100 pytest -m slow tests/cli/test_killed_commands.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtp_gguf.convert.checkpoints.checkpoint import open_checkpoint
from mtp_gguf.convert.checkpoints.source_rows import SourceRows
from mtp_gguf.convert.families.target_model import HeadChoice
from mtp_gguf.convert.pipeline import run
from mtp_gguf.convert.plans.plan import Request
from mtp_gguf.convert.plans.plan_checkpoint import make_plans
from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.files.rewrite import write
from mtp_gguf.gguf_tools.files.tensor_types import F16
from mtp_gguf.gguf_tools.heads.transplant import strip
from mtp_gguf.gguf_tools.model import open_model
from support.checkpoints import SMALL, write_checkpoint
from support.commands import invoke

ROUNDS = int(os.environ.get("MTP_KILLING_ROUNDS", "20"))
HARMS = {"kill", "stop", "starve", "shorten", "rewrite"}


def harmed(folder: Path, rounds: int, seed: int) -> dict[str, int]:
    """The counts of killed_commands.py, which forks: in a process of its own."""
    words = [sys.executable, "-m", "support.killed_commands", str(folder), str(rounds), str(seed)]
    done = subprocess.run(
        words, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


@pytest.mark.thorough
def test_each_kind_of_harm_once(tmp_path: Path) -> None:
    counts = harmed(tmp_path / "scene", 1, 0)
    assert {harm for harm, _, _ in (key.partition(":") for key in counts)} == HARMS


@pytest.mark.slow
def test_many_rounds(tmp_path: Path) -> None:
    counts = harmed(tmp_path / "scene", ROUNDS, 1)
    assert set(counts) == {f"{harm}: {what}" for harm in HARMS for what in ("done", "not done")}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, files changed in place, and temporary folders on it."""
    source = write_checkpoint(tmp_path / "hf", SMALL)
    made = tmp_path / "made.gguf"
    assert invoke("convert", source, "-o", made, "--quant", "Q4_0").exit_code == 0
    trunk = tmp_path / "trunk.gguf"
    assert invoke("strip", made, "-o", trunk).exit_code == 0
    for name in ("a", "b"):
        (small_disk / name).write_bytes(bytes(450 << 10))
    out = small_disk / "out.gguf"
    for words in (
        ("convert", source, "-o", out, "--quant", "F16"),
        ("strip", made, "-o", out),
        ("graft", trunk, "--from", made, "-o", out),
        ("fastmtp", "add", made, "-n", "64", "-o", out),
    ):
        result = invoke(*words)
        assert result.exit_code == 1, words
        assert result.stderr.count("mtp-gguf: ") == 1
        assert "bytes" in result.stderr
        assert sorted(p.name for p in small_disk.iterdir()) == ["a", "b"]

    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    (small_disk / "c").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    result = invoke("graft", trunk, "--from", source, "-o", tmp_path / "out.gguf", "--no-check")
    assert result.exit_code == 1
    assert result.stderr.count("mtp-gguf: ") == 1
    assert not (tmp_path / "out.gguf").exists()
    assert sorted(p.name for p in small_disk.iterdir()) == ["a", "b", "c"]


def test_sources_that_change_while_they_are_read(tmp_path: Path) -> None:
    """The header of one file and the weights of another make no file."""
    source = write_checkpoint(tmp_path / "hf", SMALL)
    (weights,) = source.glob("*.safetensors")
    target = tmp_path / "out" / "model.gguf"
    target.parent.mkdir()
    request = Request("F16", HeadChoice.WITH_TRUNK, F16, output=target)

    def change(_count: int) -> None:
        with weights.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")

    with open_checkpoint(source) as checkpoint:
        plans = make_plans(checkpoint, request)
        with pytest.raises(FormatError, match="changed while it was read"):
            run(plans, SourceRows(checkpoint), change)
    assert list(target.parent.iterdir()) == []
    with open_checkpoint(source) as checkpoint:
        run(make_plans(checkpoint, request), SourceRows(checkpoint), lambda _: None)

    weights = target
    copy = target.with_name("copy.gguf")
    with open_model(target) as model, pytest.raises(FormatError, match="changed while it was read"):
        write(copy, strip(model), change)
    assert not copy.exists()


@pytest.mark.parametrize("words", [("--help",), ("list-tensors", "MODEL"), ("doctor", "MODEL")])
def test_standard_output_that_is_full(words: tuple[str, ...], tmp_path: Path) -> None:
    """`> file` on a full disk, which is /dev/full."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    model = tmp_path / "empty.gguf"
    model.write_bytes(b"GGUF\3\0\0\0" + bytes(16))
    command = [sys.executable, "-c", "from mtp_gguf.cli import main; main()"]
    given = [str(model) if word == "MODEL" else word for word in words]
    with full.open("wb") as output:
        done = subprocess.run(
            [*command, *given], stdout=output, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("mtp-gguf: ")
    assert line.endswith("No space left on device")
