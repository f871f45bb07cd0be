"""Make the goldens: what upstream's converter and quantizer turn the tiny checkpoints into.

    python -m support.upstream.make_goldens [--check] [SPEC ...]        (from the folder tests/)

writes `goldens/SPEC.json`, or with --check compares with it and exits 1 at a difference. The
same machine and the same pinned upstream give the same bytes.

A golden:

    upstream       version of the sdist, commit of llama.cpp
    architecture   as `general.architecture` names it
    checkpoint     hash over the files of the checkpoint
    intermediate   `--outtype` of the file between upstream's two steps. It is chosen to lose
                   nothing: bf16, f16 and f32 for sources of that kind, f32 for quantized ones:
                   the products of FP8 weight and block scale need 12 bits of mantissa. (Only values
                   that upstream itself computes before writing are at stake: it adds 1 to F16
                   norms in F16, and to BF16 ones in F32.)
    variants       {label: types of the tensors in file order of the quantized file, as one
                   string; "-" where the variant has no such tensor}
    tensors        {name: {"shape": [fastest first], TYPE: hash of the data at that type}};
                   "TYPE+imatrix" where an imatrix was at work; `blk.N.ssm_a` has its bytes in hex
    metadata       {key: [type, value]} common to all variants, as far as `goldens/metadata` has
                   another value for most models of the architecture; null where it has one and
                   these variants do not; long arrays as length and hash
    differing      {key: {label: [type, value]}} where variants have their own

The files of `goldens/metadata` are written by hand: any values there give the same expectations
after all goldens are made anew.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from support.checkpoints import SPECS, Spec, write_checkpoint

from .convert_upstream import convert, quantize
from .describe import Description, Tensor, describe, digest
from .imatrix import imatrix_entries, write_imatrix
from .sdist import LLAMA_CPP_COMMIT, VERSION
from .variants import Variant, variants

GOLDENS = Path(__file__).parents[2] / "goldens"


def intermediate(spec: Spec) -> str:
    """Name the `--outtype` that keeps every bit of this checkpoint's weights."""
    if spec.layout and not spec.keeps_blocks:
        return "f32"
    return "f32" if spec.fp8 else spec.dtype.lower()


def upstreams(spec: Spec, variant: Variant, folder: Path, scratch: Path) -> Description:
    """What upstream makes of this variant, described; the file is gone."""
    out = run_upstream(spec, variant, folder, scratch)
    found = describe(out)
    out.unlink()
    return as_quantized(found) if spec.keeps_blocks else found


def as_quantized(found: Description) -> Description:
    """A file of the converter as the quantizer would write it: sorted, no trailing dimension of 1.

    llama.cpp sees neither.
    """

    def place(name: str) -> tuple[int, str]:
        block = name.split(".")[1] if name.startswith("blk.") else "-1"
        return int(block), name

    tensors = {
        name: replace(t, shape=t.shape[:1]) if t.shape[1:] == (1,) else t
        for name, t in sorted(found.tensors.items(), key=lambda item: place(item[0]))
    }
    return Description(tensors, found.metadata)


def run_upstream(spec: Spec, variant: Variant, folder: Path, scratch: Path) -> Path:
    """Take a checkpoint through both steps; intermediate files are kept in `scratch`.

    Where upstream keeps the checkpoint's blocks, its second step would refuse them: there is none.
    """
    between = scratch / f"{spec.name}-{variant.part}-{intermediate(spec)}.gguf"
    if not between.is_file():
        convert(folder, between, intermediate(spec), variant.converter_flags())
    if spec.keeps_blocks:
        return between
    imatrix = scratch / "imatrix.gguf"
    if variant.imatrix:
        write_imatrix(imatrix, spec)
    out = scratch / f"{spec.name}-{variant.label}.gguf"
    return quantize(
        between,
        out,
        variant.quant,
        variant.tensor_types(spec),
        imatrix if variant.imatrix else None,
    )


def data_key(name: str, tensor: Tensor, variant: Variant, spec: Spec) -> str:
    """Say under which key of a golden's tensor its hash stands."""
    used = variant.imatrix and name in imatrix_entries(spec)
    return f"{tensor.type}+imatrix" if used else tensor.type


def checkpoint_digest(folder: Path) -> str:
    """Hash names and contents of a folder's files."""
    files = sorted(folder.iterdir())
    return digest(b"".join(f.name.encode() + digest(f.read_bytes()).encode() for f in files))


def golden(spec: Spec, folder: Path, found: dict[Variant, Description]) -> dict[str, Any]:
    """Put the descriptions of all variants of one checkpoint into one golden."""
    names = max((d.tensors for d in found.values()), key=len)
    tensors: dict[str, dict[str, Any]] = {}
    for variant, description in found.items():
        order = [name for name in names if name in description.tensors]
        assert list(description.tensors) == order, f"{spec.name} {variant.label}: another order"
        for name, tensor in description.tensors.items():
            entry = tensors.setdefault(name, {"shape": list(tensor.shape)})
            assert entry["shape"] == list(tensor.shape)
            key = data_key(name, tensor, variant, spec)
            kept = entry.setdefault(key, tensor.data)
            assert kept == tensor.data, f"{name}: two results for {key}"
    by_label = {variant.label: d.metadata for variant, d in found.items()}
    first, *others = by_label.values()
    common = {k: v for k, v in first.items() if all(m.get(k) == v for m in others)}
    architecture = common["general.architecture"][1]
    usual = usual_metadata(architecture)
    changed = {key for key in {*common, *usual} if common.get(key) != usual.get(key)}
    own = {key for metadata in by_label.values() for key in metadata} - common.keys()
    return {
        "upstream": f"llama-cpp-python {VERSION}, llama.cpp {LLAMA_CPP_COMMIT}",
        "architecture": architecture,
        "checkpoint": checkpoint_digest(folder),
        "intermediate": intermediate(spec),
        "variants": {
            variant.label: " ".join(d.tensors[n].type if n in d.tensors else "-" for n in names)
            for variant, d in found.items()
        },
        "tensors": {name: tensors[name] for name in names},
        "metadata": {key: common.get(key) for key in sorted(changed)},
        "differing": {
            key: {label: m[key] for label, m in by_label.items() if key in m} for key in sorted(own)
        },
    }


def usual_metadata(architecture: str) -> dict[str, Any]:
    """What stands under the keys of most models of an architecture."""
    path = GOLDENS / "metadata" / f"{architecture}.json"
    usual: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return usual


def to_text(value: dict[str, Any]) -> str:
    """Format a golden: one line per variant, tensor and key, so that diffs can be read."""
    parts = []
    for key, entry in value.items():
        if entry and isinstance(entry, dict):
            lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entry.items()]
            parts.append(f" {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n }")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(entry)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@lru_cache
def read_golden(spec: Spec) -> dict[str, Any]:
    """Read the committed golden of a checkpoint."""
    kept: dict[str, Any] = json.loads((GOLDENS / f"{spec.name}.json").read_text(encoding="utf-8"))
    return kept


def expected(spec: Spec, variant: Variant) -> Description:
    """Read from the committed golden what upstream makes of this variant."""
    kept = read_golden(spec)
    types = kept["variants"][variant.label].split()
    tensors = {}
    for (name, entry), kind in zip(kept["tensors"].items(), types, strict=True):
        if kind == "-":
            continue
        tensor = Tensor(kind, tuple(entry["shape"]), "")
        data = entry[data_key(name, tensor, variant, spec)]
        tensors[name] = Tensor(kind, tensor.shape, data)
    common = usual_metadata(kept["architecture"]) | kept["metadata"]
    metadata = {key: value for key, value in common.items() if value is not None}
    for key, values in kept["differing"].items():
        if variant.label in values:
            metadata[key] = values[variant.label]
    return Description(tensors, metadata)


def make(spec: Spec) -> str:
    """Run upstream on every variant of a checkpoint and return the golden's text."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(Path(scratch) / spec.name, spec)
        found = {}
        for variant in variants(spec):
            found[variant] = upstreams(spec, variant, folder, Path(scratch))
        return to_text(golden(spec, folder, found))


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the goldens from upstream.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="names of checkpoints (all)")
    options = parser.parse_args()
    GOLDENS.mkdir(exist_ok=True)
    bad = 0
    for name in options.specs or SPECS:
        text = make(SPECS[name])
        path = GOLDENS / f"{name}.json"
        if not options.check:
            path.write_text(text, encoding="utf-8")
            print(f"{path.name}: {len(text) / 1000:.0f} KB")
            continue
        kept = path.read_text(encoding="utf-8") if path.is_file() else ""
        diff = list(difflib.unified_diff(kept.splitlines(), text.splitlines(), lineterm="", n=0))
        print(f"{path.name}: {'differs' if diff else 'as committed'}")
        print("\n".join(diff[:40]))
        bad += bool(diff)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
