"""`mtp-gguf list-tensors`."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.safetensors import read_safetensors
from mtp_gguf.gguf_tools.heads.acceptance import Stored, read_stored
from mtp_gguf.gguf_tools.machine.text import count_types, human_bytes, printable
from mtp_gguf.gguf_tools.model import (
    ListedTensor,
    Listing,
    list_model,
    list_safetensors,
    open_model,
)
from mtp_gguf.gguf_tools.model import list_tensors as read_listing

from .file_report import describe_drafter, describe_head, describe_tower
from .options import AsJson, Filter, parse_filter
from .progress import reports_errors

# Types of weights that are not quantized.
_PLAIN = ("F64", "F32", "F16", "BF16")


class SortKey(str, Enum):
    """Sort orders."""

    FILE = "file"
    NAME = "name"
    SIZE = "size"
    TYPE = "type"


@reports_errors
def list_tensors(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="GGUF (any shard), safetensors file or folder; also OWNER/NAME[:QUANT] "
            "or hf://OWNER/NAME/FILE on the hub, https://….",
        ),
    ],
    mtp: Annotated[
        bool, typer.Option("--mtp", help="Show only the MTP head and draft vocabulary.")
    ] = False,
    pattern: Filter = None,
    sort: Annotated[
        SortKey, typer.Option("--sort", help="Sort by this; sizes are largest first.")
    ] = SortKey.FILE,
    as_json: AsJson = False,
) -> None:
    """List the tensors of a model, and say whether it can draft.

    Only headers are read, so a file of any size is listed at once; from the hub or a web server
    only the first bytes are fetched. Shapes are in ggml order (row length first) for GGUF, and
    outermost dimension first for safetensors.
    """
    wanted = parse_filter(pattern)
    listing, stated = _listing(model)
    shown = _chosen(listing.tensors, mtp, wanted, sort)
    if pattern is not None and not shown:
        raise RequestError(f"--filter: no tensor of {model} has a name that matches {pattern!r}")
    if as_json:
        report = asdict(listing.head) if listing.head else None
        fields = {"tensors": [asdict(t) for t in shown], "head": report}
        if listing.tower:
            fields["tower"] = asdict(listing.tower)
        if listing.drafter:
            fields["drafter"] = asdict(listing.drafter)
        if stated:
            fields["acceptance"] = stated.fields()
        typer.echo(json.dumps(fields, indent=1))
        return
    for line in _table(shown):
        typer.echo(line)
    for line in _parts(listing.tensors):
        typer.echo(line)
    typer.echo(_conclusion(listing, _refusal(model, listing)))
    if stated and stated.text:
        typer.echo(printable(f"acceptance: {stated.text}"))


def _refusal(model: str, listing: Listing) -> str | None:
    """Return why the quantized checkpoint at `model` cannot be converted; None if it can."""
    if all(t.type in _PLAIN for t in listing.tensors) or listing.head is not None:
        return None
    folder = Path(model) if Path(model).is_dir() else Path(model).parent
    if not (folder / "config.json").is_file():
        return None
    from mtp_gguf.convert.checkpoints.checkpoint import read_config, read_quantization  # noqa: PLC0415
    from mtp_gguf.convert.checkpoints.quantized import unsupported_reason  # noqa: PLC0415  (NumPy)

    quantization = read_quantization(folder, read_config(folder))
    return unsupported_reason(quantization) if quantization else None


def _listing(model: str) -> tuple[Listing, Stored | None]:
    """Return the tensors, and the acceptance that a GGUF states; None for other files."""
    from mtp_gguf.gguf_tools.hub import remote  # noqa: PLC0415
    from mtp_gguf.gguf_tools.hub.resolve import open_any_model  # noqa: PLC0415

    if hub := remote.hub_model(model):
        from mtp_gguf.convert.checkpoints.hub_checkpoint import hub_shards  # noqa: PLC0415  (NumPy)

        files = hub_shards(*hub)
        try:
            return list_safetensors(files), None
        finally:
            for file in files:
                file.source.close()
    if not remote.is_remote(model) and not remote.hub_gguf(model):
        listing = read_listing(Path(model))
        if listing.head is None:
            return listing, None
        with open_model(Path(model)) as local:
            return listing, read_stored(local)
    if model.partition("?")[0].endswith(".safetensors"):
        source = remote.RemoteSource(model)
        with closing(source):
            return list_safetensors([read_safetensors(source)]), None
    with open_any_model(model) as opened:
        return list_model(opened), read_stored(opened)


def _chosen(
    tensors: Sequence[ListedTensor], mtp: bool, wanted: re.Pattern[str], sort: SortKey
) -> list[ListedTensor]:
    chosen = [t for t in tensors if wanted.search(t.name) and (not mtp or t.part != "base")]
    if sort is SortKey.NAME:
        chosen.sort(key=lambda t: t.name)
    elif sort is SortKey.SIZE:
        chosen.sort(key=lambda t: (-t.nbytes, t.name))
    elif sort is SortKey.TYPE:
        chosen.sort(key=lambda t: (t.type, t.name))
    return chosen


def _table(tensors: Sequence[ListedTensor]) -> list[str]:
    rows = [
        (printable(t.name), t.type, str(list(t.shape)), human_bytes(t.nbytes), str(t.offset))
        for t in tensors
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(5)]
    return [
        f"{n:{widths[0]}}  {kind:{widths[1]}}  {shape:{widths[2]}}  "
        f"{size:>{widths[3]}}  @ {offset:>{widths[4]}}"
        for n, kind, shape, size, offset in rows
    ]


def _parts(tensors: Sequence[ListedTensor]) -> list[str]:
    lines = []
    for part in ("base", "head", "draft vocabulary"):
        members = [t for t in tensors if t.part == part]
        if members:
            types = count_types(Counter(t.type for t in members))
            size = human_bytes(sum(t.nbytes for t in members))
            lines.append(f"{part}: {len(members)} tensors, {size} ({types})")
    return lines


def _conclusion(listing: Listing, refusal: str | None) -> str:
    if listing.head is None:
        head = [t for t in listing.tensors if t.part == "head"]
        count = len(head)
        if refusal:
            lent = "; its MTP head is in 16 bits and can be taken from it (graft --from)"
            whole = count and all(t.type in _PLAIN for t in head)
            return f"cannot be converted: {printable(refusal)}{lent if whole else ''}"
        if count:
            return f"can draft once converted: {count} mtp.* tensors found"
        return "cannot draft: no mtp.* tensors found"
    if listing.drafter:
        return describe_drafter(listing.drafter)
    return describe_tower(listing.tower) if listing.tower else describe_head(listing.head)
