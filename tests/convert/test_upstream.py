"""The goldens equal upstream's output, and our tokenizer section equals upstream's.

These tests run upstream's converter (torch, transformers, the pinned sdist through pip); the
others compare with what it once made. `support/upstream/make_goldens.py --check` does all of them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from gguf import GGUFReader

from support.checkpoints import SPECS, Spec, tokenizer_json, write_checkpoint, write_tokenizer
from support.commands import succeed
from support.upstream.compare import (
    differences,
    metadata_differences,
    tensor_differences,
    without_ones,
)
from support.upstream.convert_upstream import convert
from support.upstream.describe import describe
from support.upstream.make_goldens import expected, run_upstream
from support.upstream.sdist import llama_cpp_source
from support.upstream.variants import Variant

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra"),
]

REMADE = [
    ("dense-3v", Variant("Q4_K_M")),
    ("dense-deep", Variant("IQ4_XS", imatrix=True)),
    ("dense-f16", Variant("F16")),
    ("dense-fp8", Variant("Q6_K")),
    ("dense-tied", Variant("Q4_K_M", part="head-only")),
    ("moe-mixed", Variant("Q4_K_M", imatrix=True)),
    ("moe-fp8", Variant("Q8_0")),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "variant"), REMADE, ids=lambda x: getattr(x, "label", x))
def test_goldens_are_what_upstream_makes(name: str, variant: Variant, tmp_path: Path) -> None:
    spec = SPECS[name]
    folder = write_checkpoint(tmp_path / spec.name, spec)
    have, want = describe(run_upstream(spec, variant, folder, tmp_path)), expected(spec, variant)
    found = [*tensor_differences(want.tensors, have.tensors), *metadata_differences(want, have)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("outtype", ["f16", "bf16"])
def test_sixteen_bits_in_one_step_are_those_of_two(outtype: str, tmp_path: Path) -> None:
    """`--outtype f16` of the converter alone gives the file that the goldens take two steps to.

    But for two things that llama.cpp does not see: the converter keeps the checkpoint's order of
    tensors and a trailing dimension of 1, the quantizer sorts and drops it.
    """
    spec = SPECS["moe-mixed"]
    variant = Variant(outtype.upper(), mtp=outtype.upper())
    folder = write_checkpoint(tmp_path / spec.name, spec)
    have = describe(convert(folder, tmp_path / "out.gguf", outtype))
    want = expected(spec, variant)
    found = differences(want, without_ones(have))
    assert not found, "\n".join(found)


# ------------------------------------------------------------ a vocabulary of full size

VOCABULARY = "models/ggml-vocab-qwen35.gguf"
NORMAL, CONTROL = 1, 3  # llama_token_type


@pytest.fixture(scope="module")
def full_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with next to no weights and the 151,936 tokens that upstream tests with."""
    fields = GGUFReader(llama_cpp_source() / VOCABULARY).fields
    tokens, kinds, merges = (
        fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "merges")
    )
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    rows = list(enumerate(zip(tokens, kinds, strict=True)))
    vocab = {token: i for i, (token, kind) in rows if kind == NORMAL}
    added = [
        {"id": i, "content": token, **flags, "special": True}
        for i, (token, kind) in rows
        if kind == CONTROL
    ]
    pairs = [(a, b) for a, b in (merge.split(" ") for merge in merges)]

    spec = Spec("full-vocab", hidden=32, layers=1, interval=1, vocab_size=len(tokens), tied=True)
    folder = write_checkpoint(tmp_path_factory.mktemp("vocabulary") / spec.name, spec)
    write_tokenizer(folder, tokenizer_json(vocab, pairs, added))
    return folder


@pytest.mark.thorough
def test_tokenizer_section_equals_the_unpatched_converters(
    full_vocabulary: Path, tmp_path: Path
) -> None:
    """Tokens, types, merges, special ids and flags; and the pre-tokenizer, which we read better.

    Upstream names the pre-tokenizer by the ids of one test string. On this vocabulary the splits
    of Qwen2 and Qwen3.5 give that string the same ids, so it says qwen2; we go by the split
    itself. On the family's own 248,320 tokens its hash says qwen35 (no copy of them is at hand).
    """
    theirs = describe(convert(full_vocabulary, tmp_path / "theirs.gguf", "f16", pre=None))
    out = tmp_path / "ours.gguf"
    succeed("convert", full_vocabulary, "-o", out, "--quant", "F16", "--mtp-f16")
    ours = describe(out)
    assert ours.metadata["tokenizer.ggml.tokens"][1] == 151936
    assert ours.metadata["tokenizer.ggml.merges"][1] == 151387
    pre = "tokenizer.ggml.pre"
    assert not list(metadata_differences(theirs, ours, [pre]))
    assert (theirs.metadata[pre][1], ours.metadata[pre][1]) == ("qwen2", "qwen35")
