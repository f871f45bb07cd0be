"""`convert --mtp-type auto`: the head's type and draft vocabulary by what they yield here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtp_gguf.bench import head_speed
from mtp_gguf.bench.head_costs import TrunkShape, read_costs, write_costs
from mtp_gguf.bench.head_speed import HeadFile, HeadSpeed, measure_heads, speeds_of
from mtp_gguf.bench.quality import best_depth
from mtp_gguf.convert.api import convert
from mtp_gguf.convert.plans import head_choice
from mtp_gguf.convert.plans.head_choice import fastest
from support.commands import held, invoke, refused, succeed
from support.models import DEMO, Models


def speeds(*values: float) -> list[HeadSpeed]:
    return [HeadSpeed(str(i), (), 1, value) for i, value in enumerate(values)]


def heads_in(told: str) -> list[str]:
    """The lines of the table of heads, without what was measured anew."""
    return [line for line in told.splitlines() if "%" in line]


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


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer heads, and short measurements."""
    monkeypatch.setattr(head_choice, "_TYPES", ("F16", "Q8_0", "Q4_0"))
    monkeypatch.setattr(head_choice, "_HALVINGS", 1)
    monkeypatch.setattr(head_speed, "_ROUNDS", 1)
    monkeypatch.setattr(head_speed, "_SECONDS", 0)
    monkeypatch.setattr(head_speed, "_ANSWERS", 8)


@pytest.mark.usefixtures("few")
def test_the_file_is_that_of_the_fastest(tmp_path: Path) -> None:
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
    monkeypatch.setattr(head_speed, "_SECONDS", 0)
    monkeypatch.setattr(head_speed, "_ANSWERS", 8)
    convert(DEMO, tmp_path / "trunk.gguf", no_mtp=True)
    head = tmp_path / "head.gguf"
    convert(DEMO, head, head_only=True, fastmtp=True)
    steps: list[float] = []
    heads = [HeadFile("Q8_0", head), HeadFile("Q8_0", head, 64)]
    measured = measure_heads(
        tmp_path / "trunk.gguf", "Q4_K_M", heads, 1, step=lambda d, _: steps.append(d)
    )
    assert measured.costs is not None
    whole, short = speeds_of(heads, measured, measured.costs)
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


@pytest.mark.thorough
@pytest.mark.usefixtures("few")
def test_costs_of_another_machine(tmp_path: Path) -> None:
    """The costs are written once, and decide afterwards; acceptance is measured each time."""
    costs = tmp_path / "laptop.toml"
    output = ("-o", tmp_path / "x.gguf", "--dry-run")
    words = ("convert", DEMO, *output, "--mtp-type", "auto", "--fastmtp", "--head-costs", costs)
    measured = succeed(*words)
    written = costs.read_text(encoding="utf-8")
    found = read_costs(costs, TrunkShape("qwen35", 4, 256, 4096, "Q4_K_M"))
    assert [kind for kind, rows in found.drafts if not rows] == ["F16", "Q8_0", "Q4_0"]
    assert [rows for _, rows in found.drafts if rows], "and draft vocabularies"
    again = succeed(*words)
    assert heads_in(again) == heads_in(measured), "the same costs again"
    assert costs.read_text(encoding="utf-8") == written

    slow = {
        (kind, rows): draft if kind == "Q4_0" else tuple(9 * ms for ms in draft)
        for (kind, rows), draft in found.drafts.items()
    }
    machine = replace(found.machine, cpu="Another")
    costs.unlink()
    write_costs(costs, replace(found, machine=machine, drafts=slow))
    told = succeed(*words)
    assert "laptop.toml: Another, " in told
    assert next(line for line in heads_in(told) if "fastest" in line).startswith("Q4_0")


FEW_COSTS = """\
format = 1

[machine]
cpu = "A laptop"
cores = 4
kernels = "patches/"
device = "CPU"

[model]
architecture = "qwen35"
layers = 4
width = 256
vocabulary = 4096
mix = "Q4_K_M"

[costs]
verify_ms = [1, 1.1, 1.2, 1.3]
rollback_ms = 0.01
"""


@pytest.fixture
def few_costs() -> str:
    """Costs of the demo model that can be read."""
    heads = (
        f'[[heads]]\ntype = "{name}"\nrows = 0\ndraft_ms = [0.1, 0.2, 0.3]\n'
        for name in ("F16", "Q8_0", "Q4_0")
    )
    return "\n".join((FEW_COSTS, *heads))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "width = 256",
            "width = 512",
            "model.width: expected 256, as this model has it, found 512",
        ),
        ('mix = "Q4_K_M"', 'mix = "Q8_0"', "model.mix: expected Q4_K_M, as this model has it"),
        ("format = 1", "format = 2", "format: expected 1, found 2"),
        ('type = "Q8_0"', 'type = "F16"', "heads[1]: expected each head once, found F16"),
        ('type = "Q8_0"', 'type = "Q5_1"', "expected the costs of a head in Q8_0, found none"),
        ("draft_ms = [", "draft_ms = [1.0, ", "heads[0].draft_ms: expected 3 numbers, found 4"),
        ("verify_ms = [", "verify_ms = [-1, ", "costs.verify_ms: expected at most 32 positive"),
        ("format = 1", "format = ", "expected TOML, found"),
        ("[costs]", "[prices]", "costs: expected a table, found nothing"),
    ],
)
def test_costs_that_do_not_fit(
    few_costs: str, tmp_path: Path, before: str, after: str, message: str
) -> None:
    costs = tmp_path / "costs.toml"
    assert before in few_costs
    costs.write_text(few_costs.replace(before, after, 1), encoding="utf-8")
    done = invoke(
        *("convert", DEMO, "-o", tmp_path / "x.gguf", "--mtp-type", "auto"),
        *("--head-costs", costs, "--dry-run"),
    )
    assert done.exit_code == 1
    assert message in done.stderr
    assert held(tmp_path).keys() == {"costs.toml"}


def test_costs_that_cannot_be_written_are_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_speed, "measure_heads", None)  # nothing is measured
    costs = tmp_path / "nowhere" / "costs.toml"
    words = ("-o", tmp_path / "x.gguf", "--mtp-type", "auto", "--head-costs", costs)
    refused(tmp_path, "convert", DEMO, *words, words=("expected its folder to exist, found no",))
