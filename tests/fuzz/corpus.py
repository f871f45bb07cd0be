"""Where fuzzing starts: the golden files, their malformed variants and the odd ones."""

from __future__ import annotations

from pathlib import Path

from support import golden_gguf, golden_safetensors

MOST_BYTES = 4096

# Numbers and words that random changes would hardly find, in libFuzzer's notation.
DICTIONARY = r"""
"\xff\xff\xff\xff\xff\xff\xff\xff"
"\x00\x00\x00\x00\x00\x00\x00\x80"
"\xff\xff\xff\xff\xff\xff\xff\x7f"
"\x00\x00\x00\x00\x00\x01\x00\x00"
"general.alignment"
"qwen35.nextn_predict_layers"
"qwen35.block_count"
"blk.3.nextn.eh_proj.weight"
"mtp_gguf.fastmtp.token_ids"
"d2t"
"\"__metadata__\":"
"\"dtype\":"
"\"shape\":"
"\"data_offsets\":"
"9223372036854775807"
"\\ud800"
"""


def starts(name: str) -> list[bytes]:
    """The corpus of a target."""
    if name == "gguf":
        files = [case.data for case in golden_gguf.CASES]
        files += [golden_gguf.assembled(changes) for changes in golden_gguf.SOUND.values()]
    else:
        files = [case.data for case in golden_safetensors.CASES]
        files += [*golden_safetensors.SOUND.values(), golden_safetensors.GOLDEN]
    return [data for data in files if len(data) <= MOST_BYTES]


def write_corpus(name: str, folder: Path) -> None:
    """Write the corpus of a target into a new folder."""
    folder.mkdir()
    for index, data in enumerate(starts(name)):
        (folder / f"{index:03}").write_bytes(data)
