"""Damaged headers, and keys of unexpected types, give an error of one sentence or a result."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.files.format import Value, ValueType, open_gguf
from support.checkpoints import DENSE, MOE
from support.commands import held, invoke
from support.gguf_files import edited
from support.golden_gguf import mutant
from support.models import Models

ROUNDS = 8
VALUES = (
    Value(ValueType.STRING, "x"),
    Value(ValueType.U32, 0),
    Value(ValueType.U64, 2**64 - 1),
    Value(ValueType.I32, -5),
    Value(ValueType.F32, float("nan")),
    Value(ValueType.BOOL, True),
    Value(ValueType.U32, []),
    Value(ValueType.STRING, ["a", "b"]),
    Value(ValueType.F64, [1.5, float("inf")]),
    Value(ValueType.BOOL, [True] * 5),
)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "out.gguf"


def refusing(target: Path, *commands: tuple[object, ...]) -> set[object]:
    """Run commands that write `target` or nothing; those that refused their input."""
    found = set()
    for words in commands:
        result = invoke(*words)
        assert isinstance(result.exception, SystemExit | None), (words, repr(result.exception))
        assert result.exit_code in (0, 1), (words, result.output)
        if result.exit_code and words[0] != "doctor":
            assert result.stderr.count("\n") == 1, (words, result.stderr)
            found.add(words[0])
        written = result.exit_code == 0 and "-o" in words
        assert [*held(target.parent)] == [target.name] * written, words
        target.unlink(missing_ok=True)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_mutations(seed: int, models: Models, tmp_path: Path, target: Path) -> None:
    spec = (DENSE, MOE)[seed % 2]
    options = ("--fastmtp", "128", "--fastmtp-layout", ("ids", "table")[seed // 2])
    whole = models.convert(spec, "--quant", "Q8_0", *options)
    trunk = models.convert(spec, "--quant", "Q8_0", "--no-mtp")
    data = whole.read_bytes()
    with open_gguf(whole) as file:
        header = file.data_offset
    source = random.Random(seed)
    broken, refused = tmp_path / "broken.gguf", set[object]()
    for _ in range(ROUNDS):
        # Names, types and keys of the tensors are the header's last part; tokens most of the rest.
        start = source.choice((0, header - 6000))
        changed = mutant(data[start:header], source)
        end = source.choice((len(data),) * 7 + (source.randrange(len(data)),))
        broken.write_bytes((data[:start] + changed + data[header:])[:end])
        refused |= refusing(
            target,
            ("strip", broken, "-o", target),
            ("extract", broken, "-o", target),
            ("graft", trunk, "--from", broken, "-o", target),
            ("graft", broken, "--from", whole, "-o", target),
            ("doctor", broken),
            ("fastmtp", "show", broken),
            ("fastmtp", "remove", broken, "-o", target),
            ("fastmtp", "add", broken, "-n", "64", "-o", target),
        )
    assert refused >= {"strip", "extract", "graft"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(len(VALUES)))
def test_wrong_values(number: int, models: Models, tmp_path: Path, target: Path) -> None:
    whole = models.convert(DENSE, "--quant", "Q8_0", "--fastmtp", "128")
    trunk = models.convert(DENSE, "--quant", "Q8_0", "--no-mtp")
    with open_gguf(whole) as file:
        # All values for the keys that count most, every third one for the others.
        read = [k for k in file.keys if not k.startswith("general.") or "arch" in k or "size" in k]
    always = ("block_count", "nextn_predict_layers", "recurrent_layers", "token_ids", "head_count")
    for key in [k for i, k in enumerate(read) if k.endswith(always) or (i + number) % 3 == 0]:
        value = {key: VALUES[number]}
        broken = edited(whole, tmp_path / "broken.gguf", metadata=value)
        headless = edited(trunk, tmp_path / "headless.gguf", metadata=value)
        refusing(
            target,
            ("strip", broken, "-o", target),
            ("graft", "--no-check", trunk, "--from", broken, "-o", target),
            ("graft", "--no-check", headless, "--from", whole, "-o", target),
            ("doctor", broken),
            ("doctor", headless),
            ("fastmtp", "show", broken),
        )
