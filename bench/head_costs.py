"""What drafting with several heads costs on one machine, measured or read from a file.

The file is TOML (toml_table.py), so that a head can be chosen for another machine:

    format = 1
    [machine] cpu, cores, kernels, device  that was measured
    [model]   architecture, layers, width, vocabulary, mix    of the trunk
    [costs]   verify_ms, rollback_ms       of a batch of 1, 2, … tokens; of rejected drafts
    [[heads]] type, rows, draft_ms         of a chain of 1, 2, … drafts; rows 0 for all
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from mtp_gguf.gguf_tools.errors import FormatError, RequestError
from mtp_gguf.gguf_tools.files.output import OutputFile
from mtp_gguf.gguf_tools.machine.system import Machine
from mtp_gguf.gguf_tools.machine.toml_table import Table, read_table, toml_value
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.profile import read_machine

FORMAT = 1
_LARGEST = 1 << 18  # bytes; a few thousand are usual
_MEASURE = "delete it, and the costs are measured here"
_ROWS_BELOW = 2**31
_LEAST = 1e-6  # ms; a field is positive


@dataclass(frozen=True)
class TrunkShape:
    """What the costs of a trunk depend on. mix: of its types, such as Q4_K_M."""

    architecture: str
    layers: int
    width: int
    vocabulary: int
    mix: str


@dataclass(frozen=True)
class HeadCosts:
    """Milliseconds. verify[i]: of a batch of i + 1 tokens. rollback: of rejected drafts.

    drafts: by a head's type and the rows of its draft vocabulary, 0 for all; [i] of i + 1 drafts.
    """

    machine: Machine
    trunk: TrunkShape
    verify: tuple[float, ...]
    rollback: float
    drafts: Mapping[tuple[str, int], tuple[float, ...]]

    def draft(self, kind: str, rows: int, where: Path | None = None) -> tuple[float, ...]:
        """The costs of drafts with a head.

        A draft vocabulary changes them by what it changes with any other type, because its matrix
        has the type of the trunk's. RequestError, about the file `where`, if one is unknown.
        """
        whole = self.drafts.get((kind, 0))
        if whole is None:
            raise RequestError(f"{where}: expected the costs of a head in {kind}, found none")
        if rows == 0:
            return whole
        for (other, size), short in self.drafts.items():
            if size == rows and (other, 0) in self.drafts:
                parts = zip(whole, short, self.drafts[other, 0], strict=True)
                return tuple(max(own + part - rest, 0.0) for own, part, rest in parts)
        raise RequestError(
            f"{where}: expected the costs of a draft vocabulary of {rows} tokens, found none; "
            "measure them with --fastmtp"
        )

    def joined(self, other: "HeadCosts") -> "HeadCosts":
        """These, and the drafts of other heads on the same machine."""
        return replace(self, drafts={**self.drafts, **other.drafts})


def shape_of(trunk: Path, mix: str) -> TrunkShape:
    """The shape of a written trunk."""
    with open_model(trunk) as model:
        architecture = str(model.architecture)
        layers, width = (
            int(str(model.first.scalar(f"{architecture}.{key}")))
            for key in ("block_count", "embedding_length")
        )
        return TrunkShape(architecture, layers, width, model.vocabulary_size or 0, mix)


def write_costs(path: Path, costs: HeadCosts) -> None:
    """Write a file that `read_costs` reads, atomically."""
    sections = [
        ("", {"format": FORMAT}),
        ("[machine]", asdict(costs.machine)),
        ("[model]", asdict(costs.trunk)),
        ("[costs]", {"verify_ms": costs.verify, "rollback_ms": max(costs.rollback, _LEAST)}),
        *(
            ("[[heads]]", {"type": kind, "rows": rows, "draft_ms": draft})
            for (kind, rows), draft in costs.drafts.items()
        ),
    ]
    lines = ["# What drafts cost on this machine: made by `mtp-gguf convert --head-costs`."]
    for heading, values in sections:
        lines += ["", heading] if heading else []
        lines += [f"{key} = {toml_value(value)}" for key, value in values.items()]
    text = ("\n".join(lines) + "\n").encode()
    with OutputFile(path, len(text)) as out:
        out.write(0, text)
        out.commit()


def read_costs(path: Path, trunk: TrunkShape) -> HeadCosts:
    """Read the costs of a trunk of this shape.

    FormatError, naming the field, if the file is not as `write_costs` writes it, or is of another
    trunk.
    """
    root = read_table(path, _LARGEST, _MEASURE)
    if (found := root.integer("format", 0, 2**31)) != FORMAT:
        raise FormatError(f"{path}: format: expected {FORMAT}, found {found}; {_MEASURE}")
    machine, model, costs = (root.table(name) for name in ("machine", "model", "costs"))
    measured = read_machine(machine)
    for field in fields(TrunkShape):
        want = getattr(trunk, field.name)
        have = (
            model.text(field.name)
            if isinstance(want, str)
            else model.integer(field.name, 1, _ROWS_BELOW)
        )
        if have != want:
            raise FormatError(
                f"{path}: model.{field.name}: expected {want}, as this model has it, found {have}; "
                "the costs of another model say nothing about this one"
            )
    verify, rollback = _chain(path, "costs", costs, "verify_ms"), costs.number("rollback_ms")
    drafts = {}
    for number, head in enumerate(root.tables("heads")):
        key = head.text("type"), head.integer("rows", 0, _ROWS_BELOW)
        if key in drafts:
            raise FormatError(
                f"{path}: heads[{number}]: expected each head once, found {key[0]} with "
                f"{key[1]} rows again"
            )
        drafts[key] = _chain(path, f"heads[{number}]", head, "draft_ms", len(verify) - 1)
        head.done()
    root.done(machine, model, costs)
    return HeadCosts(measured, trunk, verify, rollback, drafts)


def _chain(path: Path, where: str, table: Table, key: str, length: int = 0) -> tuple[float, ...]:
    """Numbers of batches or drafts; as many as `length`, or for at least one draft if it is 0."""
    values = table.numbers(key, 32)
    if len(values) < 2 if length == 0 else len(values) != length:
        raise FormatError(
            f"{path}: {where}.{key}: expected {length or 'two or more'} numbers, found "
            f"{len(values)}"
        )
    return values
