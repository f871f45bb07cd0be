"""`convert --target-size` and its like, and `--recipe`: types that are chosen by measuring."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from mtp_gguf.convert.checkpoints.checkpoint import open_checkpoint
from mtp_gguf.convert.checkpoints.source_rows import SourceRows
from mtp_gguf.convert.plans import mix, target_mix
from mtp_gguf.convert.plans.mix import (
    Choice,
    Errors,
    Knapsack,
    groups,
    measure_errors,
    read_recipe,
    recipe_lines,
    write_recipe,
)
from mtp_gguf.convert.plans.plan import RECIPE_KEY
from mtp_gguf.convert.plans.recipe import Recipe, Target
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.format import Value, ValueType, lay_out
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.gguf_tools.imatrix import Imatrix
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native.runtime import plugged_kernels
from mtp_gguf.quantize import ggml
from support.commands import invoke, refused, succeed
from support.gguf_files import tensors_of
from support.models import Models

KINDS = [BY_NAME[name] for name in ("Q3_K", "Q4_K", "Q6_K", "Q8_0")]


def targets(sizes: dict[str, int]) -> dict[str, Target]:
    return {name: Target(name, (256, rows), Recipe((name,))) for name, rows in sizes.items()}


@pytest.mark.parametrize("seed", range(3))
def test_no_choice_is_better(seed: int) -> None:
    """Of all choices, that of a size has the least damage, and that of a damage the least size."""
    source = np.random.default_rng(seed)
    # The type of the large tensor makes a gap in what a Lagrange multiplier finds.
    sizes = {"a": 3, "b": 40, "c": 5, "d": 7, "e": 11}
    decline = np.array([1, 0.25, 0.02, 0.001])
    errors: Errors = {
        name: dict(zip(KINDS, (decline * source.uniform(0.7, 1.3, 4)).tolist(), strict=True))
        for name in sizes
    }
    factors = {name: float(source.random()) for name in sizes}
    found = targets(sizes)
    knapsack = Knapsack(found, errors, factors)
    every = []
    for kinds in itertools.product(KINDS, repeat=len(sizes)):
        nbytes = sum(rows * k.row_bytes(256) for rows, k in zip(sizes.values(), kinds, strict=True))
        damage = sum(factors[n] * errors[n][k] for n, k in zip(sizes, kinds, strict=True))
        every.append((nbytes, damage))
    every.sort()
    front = [one for i, one in enumerate(every) if all(one[1] < before[1] for before in every[:i])]
    assert 4 < len(knapsack.curve) < len(front), "there are choices that the multiplier misses"
    damages = dict(front)
    for choice in knapsack.curve:
        assert choice.damage == pytest.approx(damages[choice.nbytes])
    for nbytes, damage in front:
        assert knapsack.of_size(nbytes).damage == pytest.approx(damage)
        assert knapsack.of_size(nbytes).nbytes == nbytes
        assert knapsack.of_damage(damage * (1 + 1e-9)).nbytes == nbytes
    assert knapsack.curve[0].nbytes == every[0][0]
    with pytest.raises(RequestError, match="the smallest possible file is 1 bytes larger"):
        mix.check_size(found, errors, knapsack.curve[0].nbytes - 1, "--target-size")
    mix.check_size(found, errors, knapsack.curve[0].nbytes, "--target-size")
    with pytest.raises(RequestError, match="choose a larger target"):
        knapsack.of_damage(knapsack.curve[-1].damage / 2)


@pytest.mark.parametrize("weighted", [False, True])
def test_errors_are_those_of_the_quantized_rows(weighted: bool, models: Models) -> None:
    """Relative squared errors, by gguf-py's reading of the types."""
    from safetensors.torch import load_file  # noqa: PLC0415  (slow)

    folder = models.checkpoint("dense-tied")
    tensors = {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}
    name = next(name for name in tensors if name.endswith("layers.0.mlp.gate_proj.weight"))
    values = tensors[name].float().numpy()
    picked = np.unique(np.linspace(0, len(values) - 1, min(len(values), 64)).astype(int))
    shape = values.shape[::-1]
    importance = np.linspace(0.5, 4.0, shape[0], dtype=np.float32)
    imatrix = Imatrix(folder, {"t": importance[None]}, [], 1) if weighted else None
    with open_checkpoint(folder) as checkpoint:
        target = Target("t", shape, Recipe((name,)))
        found = measure_errors({"t": target}, SourceRows(checkpoint), imatrix, KINDS)["t"]
    scale = importance if weighted else np.float32(1)
    for kind in KINDS:
        raw = ggml.quantize(kind, values[picked], importance if weighted else None)
        data = raw.reshape(len(picked), -1).view(np.uint8)
        read = dequantize(data, GGMLQuantizationType[kind.name])
        error = (np.square(read - values[picked]) * scale).sum()
        error /= (np.square(values[picked]) * scale).sum()
        assert found[kind] == pytest.approx(error, rel=1e-4), kind.name
    assert found[KINDS[0]] > found[KINDS[1]] > found[KINDS[2]] > found[KINDS[3]] > 0


def test_groups_are_of_one_role_and_of_neighbours() -> None:
    names = ["output.weight", *(f"blk.{i}.{role}.weight" for i in range(8) for role in ("q", "k"))]
    found = groups(names)
    assert ("output.weight",) in found
    assert ("blk.2.q.weight", "blk.3.q.weight") in found
    assert sorted(itertools.chain(*found)) == sorted(names)
    assert len(found) == 9


def test_recipes(tmp_path: Path) -> None:
    path = tmp_path / "recipe.txt"
    write_recipe(path, Choice({"a.weight": BY_NAME["Q4_K"], "b": BY_NAME["Q8_0"]}, 1, 0.01))
    assert {n: k.name for n, k in read_recipe(path).items()} == {"a.weight": "Q4_K", "b": "Q8_0"}
    for text, words in {
        "a": "line 1: expected a tensor and its type, found 'a'",
        "# x\na q4_k\na Q8_0": "line 3: expected each tensor once, found a again",
        "a Q4_KM": "line 1: expected one of",
        "# nothing": "expected lines with a tensor and its type",
    }.items():
        path.write_text(text, encoding="utf-8")
        with pytest.raises(RequestError, match=re.escape(words)):
            read_recipe(path)
    with pytest.raises(RequestError, match="cannot be read"):
        read_recipe(tmp_path / "absent")


@pytest.mark.thorough
def test_a_target_is_met_and_its_recipe_repeats_the_file(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mix, "_PARTS", 1)  # fewer passes, on less text
    monkeypatch.setattr(target_mix, "_WINDOWS", 1)
    path = models.gguf("dense-tied")
    recipe, out, again = (tmp_path / name for name in ("recipe.txt", "a.gguf", "b.gguf"))
    words = ("convert", path, "--mtp-type", "Q8_0", "-t", 1, "--tensor-type", "attn|ssm=Q8_0")
    succeed(*words, "-o", out, "--target-bpw", 7.2, "--recipe", recipe)
    tensors = tensors_of(out)
    bits = 8 * sum(t.n_bytes for t in tensors.values())
    weights = sum(t.n_elements for t in tensors.values())
    assert 6.5 < bits / weights <= 7.2
    types = read_recipe(recipe)
    assert {n: tensors[n].tensor_type.name for n in types} == {n: k.name for n, k in types.items()}
    assert len({kind.name for kind in types.values()}) > 1
    succeed(*words, "-o", again, "--recipe", recipe)
    assert again.read_bytes() == out.read_bytes()
    with open_model(out) as model:
        assert model.first.array("mtp_gguf.recipe") == [
            line for line in recipe.read_text("utf-8").splitlines() if line[0] != "#"
        ]
    # The factors are in the cache, and the best file is the last point of the curve.
    cached = next((tmp_path / "cache").rglob("mixes/*.json"))
    before = cached.stat().st_mtime_ns
    shown = succeed(*words, "--target-size", f"{out.stat().st_size // 1000 + 1}K", "--dry-run")
    assert cached.stat().st_mtime_ns == before
    assert re.search(r"expected mean KL divergence of these types: 0\.\d+ nats", shown)
    assert all(value >= 0 for value in json.loads(cached.read_text("utf-8")).values())
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".mtp-gguf-")]
    # Of types with kernels, and on another text.
    kinds = frozenset({"Q4_0", "Q8_0", "F16"})
    monkeypatch.setattr(type(plugged_kernels), "types", lambda _: kinds)
    fast = invoke(*words, "--target-bpw", 7.2, "--prefer", "speed", "--dry-run", "--json")
    chosen = {
        t["name"]: t["type"] for t in json.loads(fast.stdout)["tensors"] if t["name"] in types
    }
    assert {*chosen.values()} <= {"Q4_0", "Q8_0"}
    text = tmp_path / "text.txt"
    text.write_text("words of another text, again and again. " * 40, encoding="utf-8")
    other = ("--target-bpw", 7.2, "--dry-run", "--target-text", text)
    succeed(*words, *other)
    [another] = {*(tmp_path / "cache").rglob("mixes/*.json")} - {cached}
    first, second = (json.loads(path.read_text("utf-8")) for path in (cached, another))
    assert all(second[name] != value for name, value in first.items() if name in second)
    assert {*first} & {*second}
    refused(
        out.parent,
        *words,
        "-o",
        tmp_path / "c.gguf",
        "--target-size",
        "1K",
        words=("--target-size: the smallest possible file is",),
    )


def test_the_recipe_counts_for_a_size() -> None:
    names = [f"blk.{i}.ffn_down.weight" for i in range(50)]
    types = dict.fromkeys(names, BY_NAME["IQ3_XXS"])
    recorded = {RECIPE_KEY: Value(ValueType.STRING, recipe_lines(types))}
    added = lay_out(recorded, []).size - lay_out({}, []).size
    assert added <= mix.recipe_bytes(names) <= added + 64


def test_the_prediction_of_the_chosen_types_is_what_was_measured() -> None:
    found = targets({"a": 3, "b": 11})
    errors: Errors = {
        "a": dict(zip(KINDS, (0.4, 0.2, 0.1, 0.05), strict=True)),
        "b": dict(zip(KINDS, (0.8, 0.3, 0.1, 0.01), strict=True)),
    }
    knapsack = Knapsack(found, errors, {"a": 2.0, "b": 1.0})
    chosen = knapsack.curve[2]
    scaled = knapsack.calibrated(chosen.types, chosen.damage / 4)
    assert [c.types for c in scaled.curve] == [c.types for c in knapsack.curve]
    for before, after in zip(knapsack.curve, scaled.curve, strict=True):
        assert after.damage == pytest.approx(before.damage / 4)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--prefer", "speed"), "--prefer needs a target"),
        (("--target-text", __file__), "--target-text needs a target"),
        (("--target-bpw", 5, "--prefer", "size"), "expected quality or speed, found size"),
        (("--target-bpw", 5, "--target-text", "/absent"), "--target-text: /absent: cannot be read"),
    ],
)
def test_wrong_preferences(
    words: tuple[object, ...], told: str, models: Models, tmp_path: Path
) -> None:
    done = invoke("convert", models.gguf("dense-tied"), "-o", tmp_path / "o.gguf", *words)
    assert done.exit_code in (1, 2)
    assert told in " ".join(done.stderr.replace("│", " ").split())


def test_what_cannot_be_measured(models: Models, tmp_path: Path) -> None:
    folder = models.checkpoint("dense-tied")
    refused(
        tmp_path,
        *("convert", folder, "-o", tmp_path / "o.gguf", "--target-bpw", 5),
        words=("expected a GGUF in 16 or 32 bits", "--quant BF16"),
    )
    path = models.gguf("dense-tied")
    refused(
        tmp_path,
        *("convert", path, "-o", tmp_path / "o.gguf", "--target-bpw", 5, "--quant", "F16"),
        words=("--quant F16: expected a mix with quantized tensors",),
    )
