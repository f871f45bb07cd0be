"""Our one pass gives the same bytes as upstream's two: every tensor and key equals the goldens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import SPECS, Spec
from support.commands import succeed
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


@pytest.mark.sample(15)
@pytest.mark.parametrize(("spec", "variant"), CASES)
def test_tensors_and_metadata_equal_upstreams(
    spec: Spec, variant: Variant, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    imatrix = Path("imatrix.gguf")
    if variant.imatrix:
        write_imatrix(imatrix, spec)
    out = tmp_path / "out.gguf"
    succeed("convert", models.checkpoint(spec), "-o", out, *variant.our_arguments(imatrix))
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


WANT = expected(SPECS["dense-tied"], Variant("Q4_K_M"))
HEAD, NORM, DECAY = "blk.4.nextn.eh_proj.weight", "output_norm.weight", "blk.0.ssm_a"
FIRST = next(iter(WANT.tensors))
BIT = f"{int(WANT.tensors[HEAD].data, 16) ^ 1:016x}"


def moved(steps: int) -> Tensor:
    """The decays, the first of them so many floats away."""
    data = bytes.fromhex(WANT.tensors[DECAY].data)
    other = (int.from_bytes(data[:4], "little") + steps).to_bytes(4, "little") + data[4:]
    return replace(WANT.tensors[DECAY], data=other.hex())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        (
            {HEAD: replace(WANT.tensors[HEAD], data=BIT)},
            [f"{HEAD}: F16 data differ ({WANT.tensors[HEAD].data} expected, {BIT} found)"],
        ),
        (
            {NORM: Tensor("F16", (128,), WANT.tensors[NORM].data)},
            [f"{NORM}: expected F32, found F16", f"{NORM}: expected [256], found [128]"],
        ),
        ({DECAY: moved(1)}, []),
        ({FIRST: None}, [f"{FIRST}: missing"]),
        ({"x": WANT.tensors[NORM]}, ["x: not in upstream's file"]),
    ],
    ids=["equal", "bit", "shape", "step", "missing", "extra"],
)
def test_the_comparison_of_tensors(changes: dict[str, Tensor | None], said: list[str]) -> None:
    have = {name: t for name, t in (WANT.tensors | changes).items() if t is not None}
    assert list(tensor_differences(WANT.tensors, have)) == said


def test_the_comparison_of_the_rest() -> None:
    assert list(tensor_differences(WANT.tensors, {**WANT.tensors, DECAY: moved(2)}))
    have = dict(WANT.tensors)
    have[FIRST] = have.pop(FIRST)
    assert next(tensor_differences(WANT.tensors, have)).startswith("order: ")
    key = "qwen35.block_count"
    other = replace(WANT, metadata={**WANT.metadata, key: ["UINT32", 4]})
    said = [f"{key}: expected ['UINT32', 5], found ['UINT32', 4]"]
    assert list(metadata_differences(WANT, other)) == said
    assert not list(metadata_differences(WANT, WANT))
    assert not list(metadata_differences(WANT, other, [key]))
