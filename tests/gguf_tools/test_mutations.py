"""Damaged GGUF headers give an error of one sentence or a result, never a crash."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.format import open_gguf
from support.checkpoints import DENSE, MOE
from support.commands import held, invoke
from support.models import Models

ROUNDS = 8
TELLING = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def mutated(data: bytes, header: int, random: np.random.Generator) -> bytes:
    """Change bytes of the header, insert special values, or truncate the file."""
    copy = bytearray(data)
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(0, header))
        kind = random.integers(0, 4)
        if kind == 0:
            copy[at] ^= 1 << int(random.integers(0, 8))
        elif kind == 1:
            copy[at] = int(random.integers(0, 256))
        elif kind == 2:
            copy[at : at + 8] = TELLING[int(random.integers(0, len(TELLING)))].to_bytes(8, "little")
        else:
            other = int(random.integers(0, header))
            copy[at : at + 4] = copy[other : other + 4]
    if random.integers(0, 8) == 0:
        del copy[int(random.integers(0, len(copy))) :]
    return bytes(copy)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_mutations(seed: int, models: Models, tmp_path: Path) -> None:
    spec = (DENSE, MOE)[seed % 2]
    options = ("--fastmtp", "128", "--fastmtp-layout", ("ids", "table")[seed // 2])
    whole = models.convert(spec, "--quant", "Q8_0", *options)
    trunk = models.convert(spec, "--quant", "Q8_0", "--no-mtp")
    data = whole.read_bytes()
    with open_gguf(whole) as file:
        header = file.data_offset
    # Names, types and keys of the tensors are the header's last part; tokens are most of the rest.
    random = np.random.default_rng(seed)
    broken, target = tmp_path / "broken.gguf", tmp_path / "out" / "out.gguf"
    target.parent.mkdir()
    outcomes = set()
    for _ in range(ROUNDS):
        start = 0 if random.integers(0, 2) else header - 6000
        changed = mutated(data[start:], header - start, random)
        broken.write_bytes(data[:start] + changed)
        for arguments in (
            ("strip", broken, "-o", target),
            ("extract", broken, "-o", target),
            ("graft", trunk, "--from", broken, "-o", target),
            ("graft", broken, "--from", whole, "-o", target),
            ("doctor", broken),
            ("fastmtp", "show", broken),
            ("fastmtp", "remove", broken, "-o", target),
            ("fastmtp", "add", broken, "-n", "64", "-o", target),
        ):
            result = invoke(*arguments)
            assert result.exit_code in (0, 1), result.output
            assert result.exception is None or isinstance(result.exception, SystemExit), (
                arguments,
                repr(result.exception),
            )
            if result.exit_code and arguments[0] != "doctor":
                assert result.stderr.count("\n") == 1, result.stderr
                assert held(target.parent) == {}
            outcomes.add((arguments[0], result.exit_code))
            target.unlink(missing_ok=True)
    assert {command for command, code in outcomes if code} >= {"strip", "extract", "graft"}
