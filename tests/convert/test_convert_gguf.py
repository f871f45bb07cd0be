"""`mtp-gguf convert` of a GGUF in 16 or 32 bits gives the same bytes as llama-quantize.

The reference is `llama_model_quantize` of the libllama that llama_cpp ships, called as
llama-quantize calls it, on the same file.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gguf import ReaderTensor

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import TensorCopy
from mtp_gguf.gguf_tools.files.tensor_types import F16
from mtp_gguf.gguf_tools.model import Metadata
from support.checkpoints import SMALL, SPECS, TINY, Spec
from support.commands import held, invoke, succeed
from support.conversions import converted, refused
from support.gguf_files import differing, edited, numbers_of, tensors_of, value_of
from support.models import Models
from support.upstream.convert_upstream import convert as convert_upstream
from support.upstream.convert_upstream import quantize
from support.upstream.describe import describe
from support.upstream.imatrix import write_imatrix

BARE = replace(SMALL, name="bare", mtp=False)
WIDE = replace(SMALL, name="wide", hidden=512)
HEAD = SMALL.layers  # the MTP block
TIED, MIXTURE = SPECS["dense-tied"], SPECS["moe-fused"]


class Files:
    """GGUF files in 16 or 32 bits by spec and options, made when they are first asked for."""

    def __init__(self, models: Models) -> None:
        self.models = models

    def get(self, spec: Spec, quant: str = "BF16", *options: str) -> Path:
        options = options or ("--mtp-type", quant)
        return self.models.convert(spec, "--quant", quant, *(options if spec.mtp else ()))


@pytest.fixture(scope="module")
def files(models: Models) -> Files:
    return Files(models)


def ours(source: Path, output: Path, *options: object) -> bytes:
    """Convert a GGUF, which must succeed."""
    succeed("convert", source, "-o", output / "ours.gguf", *options)
    return (output / "ours.gguf").read_bytes()


def head_types(spec: Spec, kind: str) -> list[tuple[str, str]]:
    """The override that gives the head its type in llama-quantize."""
    return [(rf"blk\.{spec.layers}\.", kind)]


class TestSameBytes:
    @pytest.mark.sample(4)
    @pytest.mark.parametrize(
        ("kind", "quant"),
        [
            *(("BF16", q) for q in ("Q4_K_M", "Q8_0", "Q6_K", "IQ4_XS", "F16", "BF16", "F32")),
            *((kind, q) for kind in ("F16", "F32") for q in ("Q4_K_M", "F16", "BF16")),
        ],
    )
    def test_dense(self, kind: str, quant: str, files: Files, output: Path) -> None:
        """A file that is not quantized gives the head no type of its own in llama-quantize."""
        source = files.get(TIED, kind)
        head = quant if quant in ("F16", "BF16", "F32") else "Q8_0"
        theirs = quantize(source, output / "theirs.gguf", quant, head_types(TIED, head))
        assert ours(source, output, "--quant", quant, "--mtp-type", head) == theirs.read_bytes()

    @pytest.mark.parametrize("quant", ["Q4_K_M", "Q3_K_M", "MXFP4_MOE"])
    def test_mixture_of_experts(self, quant: str, files: Files, output: Path) -> None:
        source = files.get(MIXTURE)
        theirs = quantize(source, output / "theirs.gguf", quant, head_types(MIXTURE, "F16"))
        assert ours(source, output, "--quant", quant, "--mtp-f16") == theirs.read_bytes()

    def test_rows_that_blocks_do_not_divide(self, files: Files, output: Path) -> None:
        spec = SPECS["dense-ragged"]
        source = files.get(spec)
        theirs = quantize(source, output / "theirs.gguf", "Q4_K_M", head_types(spec, "Q4_K"))
        assert ours(source, output, "--mtp-type", "Q4_K") == theirs.read_bytes()

    def test_without_a_head(self, files: Files, output: Path) -> None:
        source = files.get(BARE)
        theirs = quantize(source, output / "theirs.gguf", "Q5_K_M")
        assert ours(source, output, "--quant", "Q5_K_M") == theirs.read_bytes()
        assert ours(source, output, "--no-mtp", "--quant", "Q5_K_M", "--overwrite") == (
            theirs.read_bytes()
        )

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("quant", ["Q4_K_M", "IQ4_XS"])
    @pytest.mark.parametrize("spec", [TIED, MIXTURE], ids=lambda spec: spec.name)
    def test_imatrix(
        self, spec: Spec, quant: str, files: Files, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(output)
        imatrix = write_imatrix(Path("imatrix.gguf"), spec)
        source = files.get(spec)
        types = [*head_types(spec, "Q8_0"), ("ffn_gate", "Q6_K")]
        theirs = quantize(source, output / "theirs.gguf", quant, types, imatrix)
        options = "--quant", quant, "--imatrix", imatrix, "--tensor-type", "ffn_gate=Q6_K"
        first = ["--tensor-type", rf"^blk\.{spec.layers}\.=Q8_0"]
        made = ours(source, output, *first, *options)
        assert made == theirs.read_bytes()
        # Keys that stand there already move to the end, as llama-quantize moves them.
        again = quantize(files.get(spec, "F16"), output / "again.gguf", "F16", [], imatrix)
        theirs = quantize(again, output / "theirs.gguf", "Q4_K_M", head_types(spec, "F16"))
        assert ours(again, output, "--mtp-f16", "--overwrite") == theirs.read_bytes()

    def test_types_mixed_in_one_file(self, files: Files, output: Path) -> None:
        mixed = "--mtp-f16", "--tensor-type", "ffn_=F32", "--tensor-type", "attn_k=F16"
        source = files.get(SMALL, "BF16", *mixed)
        kinds = {t.tensor_type.name for t in tensors_of(source).values() if len(t.shape) > 1}
        assert kinds == {"F32", "F16", "BF16"}
        theirs = quantize(source, output / "theirs.gguf", "Q4_K_M", head_types(SMALL, "Q8_0"))
        assert ours(source, output) == theirs.read_bytes()
        theirs = quantize(source, output / "theirs.gguf", "BF16")
        options = "--quant", "BF16", "--mtp-type", "BF16", "--overwrite"
        assert ours(source, output, *options) == theirs.read_bytes()

    def test_norms_that_are_not_in_f32(self, files: Files, output: Path) -> None:
        """Tensors that llama-quantize never quantizes keep their type."""

        def halve(tensors: dict[str, TensorCopy]) -> None:
            for name in [name for name in tensors if name.endswith("_norm.weight")]:
                spec = replace(tensors[name].spec, type=F16)
                data = numbers_of(tensors[name]).astype("<f2").tobytes()
                tensors[name] = TensorCopy(spec, data=data)

        source = edited(files.get(BARE), output / "half-norms.gguf", tensors=halve)
        for quant in ("Q4_K_M", "F32"):
            theirs = quantize(source, output / "theirs.gguf", quant)
            options = "--quant", quant, "--overwrite", "--tensor-type", "norm=F32"
            assert ours(source, output, *options) == theirs.read_bytes()

    def test_shards_as_source_and_as_output(self, files: Files, output: Path) -> None:
        whole = files.get(SMALL)
        split = invoke(
            *("convert", files.models.checkpoint(SMALL), "--quant", "BF16", "--mtp-type", "BF16"),
            *("-o", output / "s.gguf", "--split-max-size", "1M"),
        )
        assert split.exit_code == 0, split.output
        first, *others = sorted(output.glob("s-*.gguf"))
        assert len(others) > 2
        theirs = quantize(first, output / "theirs.gguf", "Q4_K_M", head_types(SMALL, "F16"))
        for source in (first, others[-1], whole):  # any shard names the model
            assert ours(source, output, "--mtp-f16", "--overwrite") == theirs.read_bytes()
        parts = output / "parts.gguf"
        options = "-o", parts, "--mtp-f16", "--split-max-size", "500K"
        assert invoke("convert", first, *options).exit_code == 0
        tensors: dict[str, ReaderTensor] = {}
        for path in sorted(output.glob("parts-*.gguf")):
            tensors |= tensors_of(path)
        assert not differing(tensors, tensors_of(theirs))


class TestHead:
    def test_left_out(self, files: Files, output: Path) -> None:
        """As llama-quantize after strip, and as converting a checkpoint that never had one."""
        source = files.get(SMALL)
        assert invoke("strip", source, "-o", output / "bare.gguf").exit_code == 0
        theirs = quantize(output / "bare.gguf", output / "theirs.gguf", "Q4_K_M")
        assert ours(source, output, "--no-mtp") == theirs.read_bytes()

    def test_alone(self, files: Files, output: Path) -> None:
        source = files.get(SMALL)
        assert invoke("extract", source, "-o", output / "head.gguf").exit_code == 0
        theirs = quantize(
            output / "head.gguf", output / "theirs.gguf", "Q4_K_M", head_types(SMALL, "F16")
        )
        assert ours(source, output, "--head-only", "--mtp-f16") == theirs.read_bytes()
        options = "--head-only", "--mtp-f16", "--overwrite"  # of what is a head already
        assert ours(output / "head.gguf", output, *options) == theirs.read_bytes()

    @pytest.mark.thorough
    @pytest.mark.parametrize("lender", ["gguf", "head", "checkpoint"])
    def test_borrowed(self, lender: str, files: Files, output: Path) -> None:
        """As llama-quantize after graft; and all of it as converting with the head."""
        base, whole = files.get(BARE), files.get(SMALL)
        donor = {"gguf": whole, "checkpoint": files.models.checkpoint(SMALL)}.get(lender)
        if donor is None:
            donor = output / "mtp-head.gguf"
            assert invoke("extract", whole, "-o", donor).exit_code == 0
        grafted = output / "grafted.gguf"
        options = ["--mtp-type", "BF16"] if lender == "checkpoint" else []
        assert invoke("graft", base, "--from", donor, "-o", grafted, *options).exit_code == 0
        theirs = quantize(grafted, output / "theirs.gguf", "Q4_K_M", head_types(SMALL, "Q6_K"))
        made = ours(base, output, "--mtp-from", donor, "--mtp-type", "Q6_K")
        assert made == theirs.read_bytes()
        direct = converted(
            files.models.checkpoint(SMALL), output / "direct.gguf", "--mtp-type", "Q6_K"
        )
        assert not differing(tensors_of(output / "ours.gguf"), direct)

    def test_borrowed_from_eight_bits(self, files: Files, output: Path) -> None:
        """An FP8 checkpoint can be a donor like one in BF16; its weights are dequantized."""
        eight = replace(SPECS["dense-fp8"], name="fp8")
        bare = files.get(replace(eight, name="bare-fp8", mtp=False), "F32")
        donor = files.models.checkpoint(eight)
        made = ours(bare, output, "--mtp-from", donor, "--mtp-f16")
        direct = converted(donor, output / "direct.gguf", "--mtp-f16")
        assert made
        assert not differing(tensors_of(output / "ours.gguf"), direct)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("layout", ["ids", "table", "sidecar"])
    def test_draft_vocabulary(self, layout: str, files: Files, output: Path) -> None:
        """The same tensors and keys as from the checkpoint."""
        options = "--mtp-f16", "--fastmtp", "100", "--fastmtp-layout", layout
        ours(files.get(SMALL), output, *options)
        direct = output / "direct.gguf"
        converted(files.models.checkpoint(SMALL), direct, *options)
        assert describe(output / "ours.gguf") == describe(direct)

    @pytest.mark.thorough
    def test_draft_vocabulary_with_a_borrowed_head(self, files: Files, output: Path) -> None:
        options = "--mtp-f16", "--fastmtp", "100", "--fastmtp-layout", "table"
        ours(files.get(BARE), output, "--mtp-from", files.get(SMALL), *options)
        whole = output / "whole"
        whole.mkdir()
        ours(files.get(SMALL), whole, *options)
        have, want = describe(output / "ours.gguf"), describe(whole / "ours.gguf")
        assert have.tensors == want.tensors
        differing = {k for k in want.metadata if want.metadata[k] != have.metadata.get(k)}
        assert differing <= {"general.name", "general.basename"}  # after the checkpoint's folder

    @pytest.mark.thorough
    @pytest.mark.sample(1)
    @pytest.mark.parametrize("layout", ["ids", "table", "sidecar"])
    def test_draft_vocabulary_that_is_there(self, layout: str, files: Files, output: Path) -> None:
        """It stays, quantized like the rest of its part; a new one takes its place."""
        made = "--mtp-type", "BF16", "--fastmtp", "100", "--fastmtp-layout", layout
        source = files.get(SMALL, "BF16", *made)
        theirs = quantize(source, output / "theirs.gguf", "Q4_K_M", head_types(SMALL, "Q8_0"))
        assert ours(source, output) == theirs.read_bytes()
        if layout == "sidecar":
            arguments = [source, "--fastmtp", 64, "-o", output / "x.gguf"]
            refused(arguments, "100 rows of its draft vocabulary", output=output)
            return
        ours(source, output, "--fastmtp", 64, "--overwrite")
        options = "--fastmtp", 64, "-o", output / "plain.gguf"
        assert invoke("convert", files.get(SMALL), *options).exit_code == 0
        assert describe(output / "ours.gguf") == describe(output / "plain.gguf")


class TestOptions:
    def test_plan_is_what_gets_written(self, files: Files, output: Path) -> None:
        arguments = [files.get(SMALL), "-o", output / "x.gguf", "--mtp-f16", "--json"]
        plan = json.loads(invoke("convert", *arguments, "--dry-run").stdout)
        assert not held(output)
        written = json.loads(invoke("convert", *arguments).stdout)
        assert plan.items() <= written.items()
        tensors = tensors_of(output / "x.gguf")
        assert {t["name"]: t["type"] for t in plan["tensors"]} == {
            name: t.tensor_type.name for name, t in tensors.items()
        }
        assert all(t["sources"] == [t["name"]] for t in plan["tensors"])

    def test_name_by_convention(self, files: Files, output: Path) -> None:
        assert invoke("convert", files.get(SMALL), "-o", output).exit_code == 0
        (name,) = held(output)
        assert name.endswith("-Q4_K_M.gguf")

    @pytest.mark.parametrize("option", ["--revision", "--tokenizer-pre"])
    def test_for_checkpoints_alone(self, option: str, files: Files, output: Path) -> None:
        arguments = [files.get(SMALL), option, "x", "-o", output / "x.gguf"]
        refused(arguments, "for checkpoints", output=output, code=2)


class TestRefused:
    @pytest.mark.parametrize(
        ("model", "options", "said"),
        [
            (
                *((SMALL, "Q8_0", "--mtp-f16"), ()),
                "found Q8_0 … expected F32, F16 or BF16 … quantizing quantized weights again … "
                "mtp-gguf graft",
            ),
            ((SMALL,), ("--mtp-from", (SMALL,)), "has an MTP head … mtp-gguf strip"),
            ((BARE,), ("--mtp-from", (WIDE,)), "embedding_length … 512 … 256"),
            ((BARE,), ("--mtp-from", WIDE), "embedding_length … 512 … 256"),
            ((BARE,), ("--head-only",), "head"),
            ((BARE,), ("--fastmtp",), "head"),
            (
                *((BARE,), ("--head-only", "--mtp-from", (SMALL,))),
                "mtp-gguf convert DONOR --head-only",
            ),
            (
                *(BARE, ("--mtp-from", (SMALL,))),
                "expected a checkpoint like … found the GGUF … mtp-gguf graft",
            ),
        ],
        ids=["quantized", "second", "wide", "folder", "alone", "drafts", "donor alone", "donor"],
    )
    def test_heads_and_types(
        self, model: Any, options: tuple[Any, ...], said: str, files: Files, output: Path
    ) -> None:
        """Specs stand for checkpoints, and tuples for GGUF files."""

        def path(word: Any) -> Any:
            known = files.models.checkpoint(word) if isinstance(word, Spec) else word
            return files.get(*word) if isinstance(word, tuple) else known

        words = [path(word) for word in (model, *options)]
        message = refused([*words, "-o", output / "x.gguf"], output=output)
        assert all(word.replace("DONOR", str(words[-1])) in message for word in said.split(" … "))

    @pytest.mark.thorough
    def test_quantized_head(self, files: Files, output: Path) -> None:
        """It may be left out, and then what remains can be quantized."""
        source = files.get(SMALL, "BF16", "--mtp-type", "Q4_K")
        arguments = [source, "-o", output / "x.gguf"]
        words = (f"blk.{HEAD}.", "found Q4_K", "again without --mtp-type, or leave out the head")
        refused(arguments, *words, output=output)
        assert ours(source, output, "--no-mtp")
        arguments = [files.get(BARE), "--mtp-from", source, "-o", output / "x.gguf"]
        refused(arguments, source.name, "found Q4_K", output=output)

    def test_missing_or_no_gguf(self, files: Files, output: Path) -> None:
        refused([output / "none.gguf"], "none.gguf", "cannot be opened", output=output)
        (output / "x.gguf").write_bytes(b"not one")
        refused([output / "x.gguf", "-o", output / "y.gguf"], "expected a GGUF file", output=output)

    def test_another_architecture(self, files: Files, output: Path) -> None:
        imatrix = write_imatrix(output / "imatrix.gguf", SMALL)
        refused([imatrix, "-o", output / "y.gguf"], "architecture", "found none", output=output)

    @pytest.mark.parametrize(
        ("key", "value", "word"),
        [
            ("embedding_length", None, "embedding_length"),
            ("block_count", 0, "n_layer"),  # where llama.cpp aborts
            ("block_count", (1 << 32) - 1, "n_layer"),
            ("nextn_predict_layers", (1 << 31) - 1, "n_layer"),
        ],
    )
    def test_metadata_that_llama_cpp_does_not_bear(
        self, key: str, value: int | None, word: str, files: Files, output: Path
    ) -> None:
        def change(keys: Metadata) -> None:
            del keys[f"qwen35.{key}"]
            if value is not None:
                keys[f"qwen35.{key}"] = Value(ValueType.U32, value)

        source = edited(files.get(TINY), output / "x.gguf", metadata=change)
        arguments = [source, "-o", output / "y.gguf"]
        refused(arguments, "x.gguf", word, "mtp-gguf doctor", output=output)

    def test_the_input_as_output(self, files: Files, output: Path) -> None:
        source = output / "x.gguf"
        source.write_bytes(files.get(TINY).read_bytes())
        refused([source, "-o", source, "--overwrite"], "is the input", output=output)

    def test_not_finite(self, files: Files, output: Path) -> None:
        source = output / "x.gguf"
        source.write_bytes(files.get(TINY).read_bytes())
        with source.open("r+b") as file:
            file.seek(-40, 2)
            file.write(b"\xff\x7f" * 4)  # NaN in BF16
        refused([source, "-o", output / "y.gguf"], "found NaN or infinity", output=output)


@pytest.mark.thorough
@pytest.mark.upstream
@pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra")
@pytest.mark.parametrize("outtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["dense-tied", "moe-mixed"])
def test_a_publishers_file(name: str, outtype: str, files: Files, output: Path) -> None:
    """One that upstream's converter made: its order of tensors, its trailing dimensions of 1."""
    spec = SPECS[name]
    source = convert_upstream(files.models.checkpoint(spec), output / "theirs-16.gguf", outtype)
    for quant in ("Q4_K_M", "Q8_0"):
        theirs = quantize(source, output / "theirs.gguf", quant, head_types(spec, "F16"))
        options = "--quant", quant, "--mtp-f16", "--overwrite"
        assert ours(source, output, *options) == theirs.read_bytes()
    assert value_of(output / "ours.gguf", "general.file_type") == 7


@pytest.mark.thorough
@pytest.mark.upstream
@pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra")
def test_a_vocabulary_alone(files: Files, output: Path) -> None:
    """What upstream's converter writes with --vocab-only has no tensors."""
    source = output / "vocab.gguf"
    convert_upstream(files.models.checkpoint(TINY), source, "f16", ["--vocab-only"])
    words = ("vocab.gguf: expected tensors", "found a vocabulary alone")
    for options in ((), ("--dry-run",)):
        refused([source, "-o", output / "x.gguf", *options], *words, output=output)
    for command in ("strip", "extract"):
        result = invoke(command, source, "-o", output / "x.gguf")
        assert result.exit_code == 1
        assert not (output / "x.gguf").exists()
