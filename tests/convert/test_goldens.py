"""Our one pass gives the same bytes as upstream's two: every tensor and key equals the goldens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtp_gguf.cli import app
from support.checkpoints import SPECS, Spec
from support.models import Models
from support.upstream.compare import metadata_differences, tensor_differences
from support.upstream.describe import Tensor, describe
from support.upstream.imatrix import write_imatrix
from support.upstream.make_goldens import GOLDENS, checkpoint_digest, expected, read_golden
from support.upstream.variants import Variant, all_cases, variants

CASES = [
    pytest.param(
        spec,
        variant,
        id=f"{spec.name}-{variant.label}",
        marks=[pytest.mark.slow] if variant.slow else [],
    )
    for spec, variant in all_cases()
]

# Keys that may differ from upstream's file, each with its reason; docs/tensors.md has the list too.
INTERVAL = "{arch}.full_attention_interval"
ALLOWED_KEYS = {
    INTERVAL: (
        "where a config gives the interval alone, transformers 5 turns it into layer_types and "
        "drops it, and upstream's converter then writes 4 whatever it was; we write what the "
        "config says. llama.cpp looks at recurrent_layers first, which is right in both files."
    ),
    "quantize.imatrix.file": (
        "upstream writes the path as it was given, and so where the file lay on somebody's disk; "
        "we write its name. (The goldens were given a bare name: there the two are equal.)"
    ),
    "mtp_gguf.fastmtp.*": "a draft vocabulary, where one is asked for. Here none is.",
}


def test_the_documentation_lists_the_allowed_keys() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tensors.md").read_text(encoding="utf-8")
    table = text.partition("with these differences:")[2].partition("\n\n")[2].split("\n\n")[0]
    listed = [line.split("`")[1] for line in table.splitlines() if "`" in line.split("|")[1]]
    assert set(ALLOWED_KEYS) <= set(listed)


def allowed_keys(spec: Spec) -> dict[str, list[Any]]:
    """Give {key: [type, value]} of ours where it may differ from upstream's for this checkpoint."""
    if spec.layer_types:
        return {}
    return {INTERVAL.format(arch=spec.architecture): ["UINT32", spec.interval]}


def convert(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["convert", *arguments])
    if result.exit_code:
        raise AssertionError(f"exit code {result.exit_code}\n{result.output}") from result.exception


@pytest.mark.sample(15)
@pytest.mark.parametrize(("spec", "variant"), CASES)
def test_tensors_and_metadata_equal_upstreams(
    spec: Spec,
    variant: Variant,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    imatrix = Path("imatrix.gguf")
    if variant.imatrix:
        write_imatrix(imatrix, spec)
    out = tmp_path / "out.gguf"
    convert([str(models.checkpoint(spec)), "-o", str(out), *variant.our_arguments(imatrix)])
    want, have = expected(spec, variant), describe(out)
    found = [
        *tensor_differences(want.tensors, have.tensors),
        *metadata_differences(want, have, allowed_keys(spec)),
    ]
    assert not found, "\n".join(found)
    assert allowed_keys(spec).items() <= have.metadata.items()


def test_every_golden_belongs_to_a_checkpoint() -> None:
    assert {path.stem for path in GOLDENS.glob("*.json")} == set(SPECS)
    for spec in SPECS.values():
        assert len({v.label for v in variants(spec)}) == len(list(variants(spec)))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_checkpoint_is_the_one_upstream_saw(spec: Spec, models: Models) -> None:
    """If this fails, the generator drew other weights here, and no golden below can hold."""
    assert checkpoint_digest(models.checkpoint(spec)) == read_golden(spec)["checkpoint"]


class TestTheComparisonItself:
    want = expected(SPECS["dense-tied"], Variant("Q4_K_M"))

    def differences(self, name: str, tensor: Tensor) -> list[str]:
        return list(tensor_differences(self.want.tensors, {**self.want.tensors, name: tensor}))

    def test_equal(self) -> None:
        assert not list(tensor_differences(self.want.tensors, self.want.tensors))
        assert not list(metadata_differences(self.want, self.want))

    def test_one_flipped_bit(self) -> None:
        name = "blk.4.nextn.eh_proj.weight"
        tensor = self.want.tensors[name]
        other = replace(tensor, data=f"{int(tensor.data, 16) ^ 1:016x}")
        assert self.differences(name, other) == [
            f"{name}: F16 data differ ({tensor.data} expected, {other.data} found)"
        ]

    def test_type_and_shape(self) -> None:
        name = "output_norm.weight"
        other = Tensor("F16", (128,), self.want.tensors[name].data)
        assert self.differences(name, other) == [
            f"{name}: expected F32, found F16",
            f"{name}: expected [256], found [128]",
        ]

    def test_missing_extra_and_order(self) -> None:
        have = dict(self.want.tensors)
        first = next(iter(have))
        moved = have.pop(first)
        assert list(tensor_differences(self.want.tensors, have)) == [f"{first}: missing"]
        assert list(tensor_differences(have, self.want.tensors)) == [
            f"{first}: not in upstream's file"
        ]
        have[first] = moved
        assert next(tensor_differences(self.want.tensors, have)).startswith("order: ")

    @pytest.mark.parametrize(("steps", "differs"), [(1, False), (2, True)])
    def test_ssm_a_may_be_one_step_off(self, steps: int, differs: bool) -> None:
        name = "blk.0.ssm_a"
        data = bytes.fromhex(self.want.tensors[name].data)
        other = (int.from_bytes(data[:4], "little") + steps).to_bytes(4, "little") + data[4:]
        tensor = replace(self.want.tensors[name], data=other.hex())
        assert bool(self.differences(name, tensor)) == differs

    def test_metadata(self) -> None:
        key = "qwen35.block_count"
        have = replace(self.want, metadata={**self.want.metadata, key: ["UINT32", 4]})
        assert list(metadata_differences(self.want, have)) == [
            f"{key}: expected ['UINT32', 5], found ['UINT32', 4]"
        ]
        assert not list(metadata_differences(self.want, have, [key]))
