"""`convert --mtp-type auto`: the head's type and draft vocabulary by what they yield here."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_gguf.bench import head_speed
from mtp_gguf.bench.head_speed import HeadFile, HeadSpeed, measure_heads
from mtp_gguf.bench.quality import best_depth
from mtp_gguf.convert import head_choice
from mtp_gguf.convert.api import convert
from mtp_gguf.convert.head_choice import fastest
from support.commands import held, invoke
from support.models import DEMO, Models


def speeds(*values: float) -> list[HeadSpeed]:
    return [HeadSpeed(str(i), (), 1, value) for i, value in enumerate(values)]


def test_another_type_has_to_promise_more_than_scatter() -> None:
    assert fastest(speeds(100, 99, 101, 50)) == 0
    assert fastest(speeds(99, 100, 101)) == 1
    assert fastest(speeds(100, 99, 103, 102.5)) == 2
    assert fastest(speeds(100, 101.5), usual=1) == 0


def test_the_best_depth() -> None:
    rates, verify = (0.5, 0.5, 0.0), (10.0, 11.0, 12.0, 13.0)
    depth, speed = best_depth(rates, verify, (1.0, 2.0, 3.0), 1.0)
    assert depth == 2
    assert speed == pytest.approx(2000 / 15)
    assert best_depth((0, 0, 0), verify, (1.0, 2.0, 3.0), 1.0) == (0, 100)
    assert best_depth((0, 0, 0), verify, (1.0, 2.0, 3.0), 1.0, least=1)[0] == 1


def test_the_file_is_that_of_the_fastest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_choice, "_TYPES", ("F16", "Q8_0", "Q4_0"))
    monkeypatch.setattr(head_choice, "_HALVINGS", 1)
    monkeypatch.setattr(head_speed, "_ROUNDS", 1)
    monkeypatch.setattr(head_speed, "_ANSWERS", 2)
    output = tmp_path / "out" / "auto.gguf"
    output.parent.mkdir()
    made = convert(DEMO, output, mtp_type="auto", fastmtp=True, no_check=True)
    types, sizes = made.heads[:3], made.heads[3:]
    assert [head.label for head in types] == ["F16", "Q8_0", "Q4_0"]
    assert all(0 < head.acceptance[0] < 1 for head in made.heads)
    kind = types[fastest(types)].label
    assert [head.label.partition(",")[0] for head in sizes] == [kind, kind]
    size = int(sizes[fastest(sizes, usual=1)].label.split()[1])
    assert {*held(output.parent)} == {"auto.gguf"}, "nothing else is left"
    convert(DEMO, tmp_path / "same.gguf", mtp_type=kind, fastmtp=size, no_check=True)
    assert output.read_bytes() == (tmp_path / "same.gguf").read_bytes()


def test_a_slow_head_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft vocabulary of a few tokens accepts fewer drafts than the whole."""
    monkeypatch.setattr(head_speed, "_ROUNDS", 1)
    monkeypatch.setattr(head_speed, "_ANSWERS", 2)
    convert(DEMO, tmp_path / "trunk.gguf", no_mtp=True)
    head = tmp_path / "head.gguf"
    convert(DEMO, head, head_only=True, fastmtp=True)
    steps: list[float] = []
    heads = [HeadFile("whole", head), HeadFile("short", head, 64)]
    whole, short = measure_heads(
        tmp_path / "trunk.gguf", heads, 1, step=lambda d, _: steps.append(d)
    )
    assert short.acceptance[0] < whole.acceptance[0]
    assert steps == [0.0, 0.5]


def test_what_cannot_be_chosen(models: Models, tmp_path: Path) -> None:
    for words in (("--head-only",), ("--fastmtp", "--fastmtp-layout", "sidecar")):
        done = invoke("convert", DEMO, "-o", tmp_path / "x.gguf", "--mtp-type", "auto", *words)
        assert done.exit_code in (1, 2)
        assert "--mtp-type auto needs the trunk" in done.stderr
    bare = models.gguf("dense-no-mtp")
    done = invoke("convert", bare, "-o", tmp_path / "x.gguf", "--mtp-type", "auto")
    assert done.exit_code == 1
    assert not held(tmp_path)


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    text, out = tmp_path / "short.txt", tmp_path / "o.gguf"
    text.write_text("hello", encoding="utf-8")
    done = invoke("convert", DEMO, "-o", out, "--mtp-type", "auto", "--target-text", text)
    assert done.exit_code == 1
    assert "--target-text: expected at least 128 tokens, found " in done.stderr
    assert held(tmp_path).keys() == {"short.txt"}
