"""`mtp-gguf compare`."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_gguf.convert.options import check_revision
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.heads.fastmtp import find_draft_vocabulary
from mtp_gguf.gguf_tools.heads.head import part_of
from mtp_gguf.gguf_tools.hub.resolve import names_gguf, open_any_model
from mtp_gguf.gguf_tools.machine.text import printable
from mtp_gguf.gguf_tools.model import Model

from .console import CONSOLE
from .options import AsJson, Filter, Revision, parse_filter
from .progress import byte_progress, reports_errors

if TYPE_CHECKING:
    from mtp_gguf.gguf_tools.compare import MetadataDifference, Side, TensorDifference

_LINES = 20
# Version of the JSON: 2 renamed the result of each tensor to `outcome`.
_FORMAT = 2
# Metadata that describes the file and not the model.
_OF_THE_FILE = re.compile(
    r"general\.(file_type|quantization_version)|quantize\.|split\.|mtp\.acceptance\."
)


@reports_errors
def compare(
    first: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="GGUF (any shard), local, on the hub or https://…."),
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="OTHER",
            help="Another GGUF, or the checkpoint that it was made from (folder, OWNER/NAME).",
        ),
    ],
    show_all: Annotated[
        bool, typer.Option("--all", help=f"Show all tensors, not only the worst {_LINES}.")
    ] = False,
    pattern: Filter = None,
    max_error: Annotated[
        float | None,
        typer.Option(
            "--max-error",
            min=0,
            help="Exit with 1 if a relative error is above this (default: no limit).",
        ),
    ] = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Compare two models tensor by tensor, the worst first.

    Tensors of different types are decoded by ggml and compared as numbers. The error is relative
    (root mean square). Rounding causes about 0.07 for Q4_K and 0.006 for Q8_0; a missing transform
    causes 0.5 or more. For a Hugging Face checkpoint every transform of the converter is applied,
    so any publisher's GGUF can be verified.

    The exit code is 1 if a tensor is missing, has another shape, or a larger error than rounding
    to its type causes.

    **Examples**

    mtp-gguf compare Qwen3.5-9B-Q4_K_M.gguf Qwen3.5-9B-Q8_0.gguf

    mtp-gguf compare Qwen3.5-9B-Q4_K_M.gguf Qwen/Qwen3.5-9B --filter nextn
    """
    from mtp_gguf.gguf_tools.compare import (  # noqa: PLC0415
        GgufSide,
        Outcome,
        compare_metadata,
        compare_tensors,
        compared_bytes,
    )
    from mtp_gguf.quantize import ggml  # noqa: PLC0415  (NumPy)

    wanted = parse_filter(pattern)
    with ExitStack() as stack:
        model = stack.enter_context(open_any_model(first))
        one: Side = GgufSide(model, ggml.dequantize)
        keys = _plain_metadata(model)
        if names_gguf(second):
            check_revision(second, revision)
            other = stack.enter_context(open_any_model(second))
            two: Side = GgufSide(other, ggml.dequantize)
            metadata = compare_metadata(keys, _plain_metadata(other))
        else:
            two, expected = stack.enter_context(_checkpoint(model, second, revision))
            shared = {
                k: v for k, v in keys.items() if k in expected or k.startswith(("qwen", "clip."))
            }
            metadata = compare_metadata(shared, expected)
        hidden = _draft_rows(model) if two.exact else set()
        one, two = _Filtered(one, wanted, hidden), _Filtered(two, wanted, hidden)
        try:
            with byte_progress("compare", compared_bytes(two, one)) as progress:
                # The reference comes first: errors are relative to it.
                found = compare_tensors(two, one, progress)
        except ggml.GgmlError as error:
            raise RequestError(f"{first}: cannot be compared: {error}") from None
    if pattern is not None and not found:
        raise RequestError(f"--filter: no tensor has a name that matches {pattern!r}")
    bad = [
        d
        for d in found
        if d.outcome not in (Outcome.SAME, Outcome.ROUNDED)
        or (max_error is not None and d.error is not None and d.error > max_error)
    ]
    if as_json:
        typer.echo(json.dumps(_fields(found, metadata), indent=1))
    else:
        for line in _report(found, metadata, len(found) if show_all else _LINES):
            typer.echo(line)
    if bad:
        raise typer.Exit(1)


class _Filtered:
    """A side of which only some tensors are compared."""

    def __init__(self, side: "Side", wanted: re.Pattern[str], hidden: set[str]) -> None:
        self.name, self.exact = side.name, side.exact
        self.raw, self.values = side.raw, side.values
        tensors = side.tensors().items()
        self._tensors = {n: t for n, t in tensors if wanted.search(n) and n not in hidden}

    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return shape and type of the tensors to compare."""
        return self._tensors


def _draft_rows(model: Model) -> set[str]:
    """Return the tensors of a stored draft vocabulary, which checkpoints do not have."""
    draft = find_draft_vocabulary(model.first, model.tensors)
    layout = draft.layout if draft else None
    return {n for n in model.tensors if part_of(n, None, layout) == "draft vocabulary"}


@contextmanager
def _checkpoint(
    model: Model, source: str, revision: str | None
) -> Iterator[tuple["Side", dict[str, Any]]]:
    """Open the checkpoint as a side, with the metadata that the file should have."""
    from mtp_gguf.convert.checkpoints.checkpoint_side import CheckpointSide  # noqa: PLC0415
    from mtp_gguf.convert.families.target_model import HeadChoice  # noqa: PLC0415
    from mtp_gguf.convert.resolve import open_model as open_checkpoint  # noqa: PLC0415

    part = HeadChoice.NONE
    if model.tower:
        part = HeadChoice.VISION
    elif model.head.is_alone:
        part = HeadChoice.ALONE
    elif model.head.names:
        part = HeadChoice.WITH_TRUNK
    check_revision(source, revision)
    with open_checkpoint(source, revision, part, None, say=CONSOLE.download) as checkpoint:
        side = CheckpointSide(checkpoint, part)
        yield side, side.metadata


def _plain_metadata(model: Model) -> dict[str, Any]:
    from mtp_gguf.gguf_tools.compare import all_metadata  # noqa: PLC0415

    return {k: v for k, v in all_metadata(model).items() if not _OF_THE_FILE.match(k)}


def _report(
    found: list["TensorDifference"], metadata: list["MetadataDifference"], lines: int
) -> Iterator[str]:
    shown = [d for d in found if d.outcome.value != "same"][:lines]
    width = max((len(printable(d.name)) for d in shown), default=0)
    for d in shown:
        error = "" if d.error is None else f"  error {d.error:.2e}, largest {d.largest:.2e}"
        kinds = " / ".join(kind or "—" for kind in d.types[::-1])
        note = f"  ({d.note})" if d.note else ""
        yield f"{printable(d.name):{width}}  {_outcome(d):18}  {kinds:13}{error}{note}"
    hidden = sum(d.outcome.value != "same" for d in found) - len(shown)
    if hidden:
        yield f"… and {hidden} more; --all shows them"
    for m in metadata:
        ours, theirs = (printable(v) if v is not None else "missing" for v in m.values)
        yield f"{printable(m.key)}: {ours} / {theirs}"
    counts = Counter(_outcome(d) for d in found)
    yield f"{len(found)} tensors: " + ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
    yield f"{len(metadata)} keys of the metadata differ"


def _outcome(found: "TensorDifference") -> str:
    """Return the result with the sides as the user named them (the reference comes first)."""
    swapped = {"only in the first": "only in OTHER", "only in the second": "only in MODEL"}
    return swapped.get(found.outcome.value, found.outcome.value)


def _fields(
    found: list["TensorDifference"], metadata: list["MetadataDifference"]
) -> dict[str, Any]:
    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    tensors = [
        {
            "name": d.name,
            "outcome": _outcome(d),
            "types": list(d.types[::-1]),
            "error": finite(d.error),
            "largest": finite(d.largest),
            "note": d.note,
        }
        for d in found
    ]
    return {"format": _FORMAT, "tensors": tensors, "metadata": [asdict(m) for m in metadata]}
