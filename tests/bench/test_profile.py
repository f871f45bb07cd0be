"""model.mtp.toml: round trips, and errors that name the invalid field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.errors import FormatError, OutputError
from mtp_gguf.gguf_tools.machine import system
from mtp_gguf.gguf_tools.machine.system import PATCHED, STOCK, Machine, this_machine
from mtp_gguf.gguf_tools.profile import (
    Candidate,
    Costs,
    DraftSettings,
    ModelIdentity,
    Profile,
    find_profile,
    identify,
    profile_path,
    read_profiles,
    write_profile,
)

PROFILE = Profile(
    ModelIdentity(4711, "ab" * 32),
    Machine('An "Odd" \\ CPU 😀', 2, PATCHED),
    DraftSettings(3, -1, "checkpoint", 2),
    "2026-01-31",
    "mtp-gguf 0.1.0",
    47.9,
    51.125,
    Costs((20.7, 36.1), (2.1,)),
    (Candidate(DraftSettings(0), 47.9), Candidate(DraftSettings("auto"), 50.0)),
)


def test_a_written_profile_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "m.mtp.toml"
    for profile in (PROFILE, replace(PROFILE, settings=DraftSettings(), costs=Costs())):
        write_profile(path, profile)
        assert read_profiles(path) == [profile]
    assert list(tmp_path.iterdir()) == [path]


def test_the_path_is_beside_the_model() -> None:
    assert profile_path(Path("a/m.gguf")) == Path("a/m.mtp.toml")
    assert profile_path(Path("a/m-00002-of-00003.gguf")) == Path("a/m.mtp.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format = 2", "format = 1", "format: expected 2, found 1"),
        ("format = 2", "", "format: expected a number from 0 to .*, found nothing"),
        ("depth = 3", "depth = 17", 'settings.depth: expected 0 to 16 or "auto", found 17'),
        ("depth = 3", "depth = true", "settings.depth: .* found True"),
        ("depth = 3", 'depth = "Auto"', "settings.depth: .* found 'Auto'"),
        ("depth = 3", "depht = 3", "settings.depth: .* found nothing"),
        ("depth = 3", "depth = 3\nextra = 1", "settings.extra: no such field"),
        ("cores = 2", "cores = true", "machine.cores: expected a number .*, found True"),
        ("tok_s = 51.125", "tok_s = true", "measured.tok_s: expected .*, found True"),
        ('"2026-01-31"', '"\\u001b[31m"', "measured.on: expected printable text, found"),
        ("cores = 2", "cores = 0", "machine.cores: expected a number from 1"),
        ("cores = 2", "cores = 2\ncoers = 2", "machine.coers: no such field"),
        ("fastmtp_size = -1", "fastmtp_size = -2", "settings.fastmtp_size: expected .* -1 to"),
        ('"checkpoint"', '"ckpt"', "settings.rollback: expected one of snapshot, .* found 'ckpt'"),
        ("tok_s = 51.125", "tok_s = nan", "measured.tok_s: expected a positive number, found nan"),
        ("tok_s = 51.125", "tok_s = -1", "measured.tok_s: expected a positive number, found -1"),
        ("[20.7, 36.1]", "[20.7, 0]", "costs.verify_ms: expected at most 17 positive numbers"),
        ("[20.7, 36.1]", f"{[1] * 18}", "costs.verify_ms: expected at most 17 positive numbers"),
        ("[profile.model]", "[[profile.model]]", "model: expected a table"),
        ("[[profile.candidates]]", "[profile.candidates]", "expected TOML"),
        ("[[profile]]", "[profile]", "profile: expected tables"),
        ("tok_s = 50", "tok_s = 'fast'", r"candidates\[1\].tok_s: expected a positive number"),
        ("[profile.costs]", "[profile.cost]", "costs: expected a table, found nothing"),
        ("format = 2", "format = 2\nformat = 2", "expected TOML"),
        ("format = 2", "\x00", "expected TOML"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "m.mtp.toml"
    write_profile(path, PROFILE)
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(FormatError, match=message) as caught:
        read_profiles(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"a" * (1 << 19), b"[" * 100_000, b""])
def test_files_that_are_no_profile(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "m.mtp.toml"
    path.write_bytes(raw)
    with pytest.raises(FormatError):
        read_profiles(path)


def test_a_profile_counts_for_its_file_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(bytes(range(256)) * 4096)
    assert find_profile(model, STOCK) == (None, None)
    mine = replace(PROFILE, model=identify(model), machine=this_machine(STOCK))
    write_profile(profile_path(model), mine)
    assert find_profile(model, STOCK) == (mine, None)
    assert find_profile(model, STOCK, None) == (mine, None)

    write_profile(profile_path(model), replace(mine, tok_s=3.99 * mine.plain_tok_s))
    assert find_profile(model, STOCK)[1] is None
    write_profile(profile_path(model), replace(mine, tok_s=4.5 * mine.plain_tok_s))
    assert find_profile(model, STOCK) == (
        None,
        "m.mtp.toml is ignored, other programs disturbed its measurement: depth 3 was measured "
        "at 4.50 times the speed of no drafting, and at most 4 times is possible; "
        "`mtp-gguf tune m.gguf` makes a new one",
    )
    write_profile(profile_path(model), mine)

    assert find_profile(model, STOCK, "CUDA0") == (
        None,
        "m.mtp.toml is ignored, it was measured on another machine: device 'CUDA0' instead of "
        "'CPU'; `mtp-gguf tune m.gguf` makes a new one",
    )
    assert find_profile(model, PATCHED) == (
        None,
        "m.mtp.toml is ignored, it was measured with stock kernels instead of patches/; "
        "`mtp-gguf tune m.gguf` on such libraries (MTP_GGUF_LIBS) adds a profile for them",
    )
    with monkeypatch.context() as patch:
        patch.setattr(system, "_cpu_name", lambda: "Another")
        _, note = find_profile(model, STOCK)
        assert note is not None
        assert "another machine: cpu 'Another' instead of" in note

    whole = bytearray(model.read_bytes())
    whole[-16384 + 100] ^= 1  # in the last sample
    model.write_bytes(whole)
    assert identify(model) != mine.model
    changed = bytearray(model.read_bytes())
    changed[512 * 1024 + 100] ^= 1  # in a sample, the size unchanged
    model.write_bytes(changed)
    found, note = find_profile(model, STOCK)
    assert found is None
    assert note is not None
    assert "measured with another file" in note


def test_one_profile_for_each_kind_of_kernels(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(bytes(range(256)) * 64)
    path = profile_path(model)
    stock, patched = (
        replace(PROFILE, model=identify(model), machine=this_machine(kernels), tok_s=tok_s)
        for kernels, tok_s in ((STOCK, 10.0), (PATCHED, 20.0))
    )
    for profile in (stock, patched):
        write_profile(path, profile)
    for kernels, profile in ((STOCK, stock), (PATCHED, patched)):
        assert find_profile(model, kernels) == (profile, None)

    faster = replace(stock, tok_s=11.0)
    write_profile(path, faster)
    assert read_profiles(path) == [faster, patched]

    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"patches/"', '"stock"'), encoding="utf-8")
    with pytest.raises(FormatError, match=r"one for each kind of kernels, found \['stock', 'sto"):
        read_profiles(path)
    write_profile(path, patched)  # what cannot be read is replaced
    assert read_profiles(path) == [patched]

    model.write_bytes(bytes(1000))  # another model: what was measured with the old one goes
    anew = replace(stock, model=identify(model))
    write_profile(path, anew)
    assert read_profiles(path) == [anew]


def test_identity_is_of_all_shards(tmp_path: Path) -> None:
    shards = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for shard in shards:
        shard.write_bytes(shard.name.encode() * 1000)
    both = identify(shards[0])
    assert both == identify(shards[1])
    assert both.size == sum(shard.stat().st_size for shard in shards)
    shards[1].write_bytes(shards[1].read_bytes()[:-1] + b"?")
    assert identify(shards[0]) != both


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        write_profile(tmp_path / "none" / "m.mtp.toml", PROFILE)
