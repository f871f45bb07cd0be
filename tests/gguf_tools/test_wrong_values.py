"""Keys with values of an unexpected type give an error of one sentence or a result."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.files.format import Value, ValueType, open_gguf
from mtp_gguf.gguf_tools.model import Metadata
from support.checkpoints import DENSE
from support.commands import invoke, refused
from support.gguf_files import edited
from support.models import Models

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


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(len(VALUES)))
def test_wrong_values(number: int, models: Models, tmp_path: Path) -> None:
    whole = models.convert(DENSE, "--quant", "Q8_0", "--fastmtp", "128")
    trunk = models.convert(DENSE, "--quant", "Q8_0", "--no-mtp")
    with open_gguf(whole) as file:
        # All values for the keys that count most, every third one for the others.
        read = [k for k in file.keys if not k.startswith("general.") or "arch" in k or "size" in k]
    always = ("block_count", "nextn_predict_layers", "recurrent_layers", "token_ids", "head_count")
    keys = [k for i, k in enumerate(read) if k.endswith(always) or (i + number) % 3 == 0]
    target = tmp_path / "out.gguf"
    for key in keys:

        def put(metadata: Metadata, key: str = key) -> None:
            metadata[key] = VALUES[number]

        broken = edited(whole, tmp_path / "broken.gguf", metadata=put)
        headless = edited(trunk, tmp_path / "headless.gguf", metadata=put)
        for arguments in (
            ("strip", broken, "-o", target),
            ("graft", "--no-check", trunk, "--from", broken, "-o", target),
            ("graft", "--no-check", headless, "--from", whole, "-o", target),
            ("doctor", broken),
            ("doctor", headless),
            ("fastmtp", "show", broken),
        ):
            result = invoke(*arguments)
            assert result.exit_code in (0, 1), (key, arguments, result.output)
            assert result.exception is None or isinstance(result.exception, SystemExit), (
                key,
                arguments,
                repr(result.exception),
            )
            assert target.exists() == (result.exit_code == 0 and "-o" in arguments)
            target.unlink(missing_ok=True)


def test_generate_says_what_to_do_without_a_file(tmp_path: Path) -> None:
    words = ("none.gguf: expected a GGUF file, found none; create one with mtp-gguf convert",)
    refused(tmp_path, "generate", tmp_path / "none.gguf", "-p", "x", words=words)
    refused(tmp_path, "generate", tmp_path, "-p", "x", words=("found a folder",))
