"""`mtp-gguf info`."""

import json
import os
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.gguf_tools.heads.acceptance import read_stored
from mtp_gguf.gguf_tools.hub.resolve import local_gguf
from mtp_gguf.gguf_tools.machine.system import cache_root, this_machine
from mtp_gguf.gguf_tools.machine.text import printable
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.server.build import find_build
from mtp_gguf.server.find import VARIABLE, ask

from .file_report import describe_head
from .progress import reports_errors


@reports_errors
def info(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Print what this GGUF states about itself instead."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print which libraries, kernels and devices are used, and why.

    With FILE it prints instead whether this GGUF can draft, and the acceptance rate that it states,
    if that was measured with these tensors.

    MTP_GGUF_LIBS=stock selects llama-cpp-python's own libraries, =fast requires those that the
    package ships, and =FOLDER selects others.

    **Examples**

    mtp-gguf info

    mtp-gguf info model.gguf

    MTP_GGUF_LIBS=stock mtp-gguf info --json
    """
    if model is not None:
        _print_file(model, as_json=as_json)
        return
    fields = _fields()
    if as_json:
        typer.echo(json.dumps(fields, indent=1))
        return
    libraries = fields["libraries"]
    lines = [
        f"mtp-gguf {fields['version']}, {libraries['llama.cpp']}",
        f"libraries: {libraries['kind']}, {libraries['folder']} ({libraries['reason']})",
        f"compiled for: {fields['cpu_features']}",
        f"kernels: {_kernels_text(fields['plugged_kernels'])}",
        *_choices_lines(fields["plugged_kernels"]),
        *(f"device: {device['name']}, {device['description']}" for device in fields["devices"]),
        f"llama-server: {_server_text(fields)}",
        *(f"missing: {text}" for text in fields["missing"]),
    ]
    for line in lines:
        typer.echo(printable(line))


def _print_file(path: Path, *, as_json: bool) -> None:
    """Print what a GGUF states."""
    with open_model(path) as model:
        report, stated = model.report, read_stored(model)
    beside = None if report.ready else local_gguf(str(path)).head
    if as_json:
        fields = {
            "path": str(path),
            "head": asdict(report),
            "head_beside": None if beside is None else str(beside),
            "acceptance": stated.fields(),
        }
        typer.echo(json.dumps(fields, indent=1))
        return
    typer.echo(f"{printable(str(path))}: {describe_head(report)}")
    if beside is not None:
        name = printable(str(beside))
        typer.echo(f"a head is beside it, with which generate, chat and serve draft: {name}")
    if stated.text:
        typer.echo(printable(f"acceptance: {stated.text}"))


def say_note() -> None:
    """Print on standard error why stock libraries run, unless the user selected them."""
    from mtp_gguf.native.runtime import runtime  # noqa: PLC0415  (loads llama.cpp)

    if runtime.note:
        typer.echo(f"mtp-gguf: {runtime.note}", err=True)


def _last_measured() -> str | None:
    """When measured kernels were last written to the user's cache; None: never."""
    times = [path.stat().st_mtime for path in (cache_root() / "kernels").glob("*.txt")]
    return datetime.fromtimestamp(max(times)).isoformat(" ", "minutes") if times else None


def _server_text(fields: dict[str, Any]) -> str:
    """The server that commands use, what it was made from, and what it lacks."""
    path, made_from = fields["llama_server"], fields["llama_server_from"]
    lacks = fields["llama_server_lacks"]
    origin = f" ({made_from})" if made_from else ""
    return f"{path or 'none built'}{origin}" + (f"; lacks {', '.join(lacks)}" if lacks else "")


def _kernels_text(plugged: dict[str, Any]) -> str:
    if not plugged["instructions"]:
        return f"llama.cpp's own ({plugged['reason']})"
    lines = [f"{plugged['instructions']} for {', '.join(plugged['operations'])}"]
    if not plugged["patched"]:
        lines.append("not fused, which takes libraries with patches/")
    return "; ".join([*lines, *plugged["left to ggml"]])


def _choices_lines(plugged: dict[str, Any]) -> list[str]:
    """What was measured of the kernels, in a line; none without kernels that have a choice."""
    if not plugged["instructions"]:
        return []
    chosen = sorted({str(choice["kernel"]) for choice in plugged["choices"] if choice["kernel"]})
    if not chosen:
        return ["measured kernels: none yet; they are measured while a model runs"]
    return [
        f"measured kernels: {', '.join(chosen)} (of {plugged['choices measured']}; "
        "`mtp-gguf kernels measure FILE` measures anew)"
    ]


def _fields() -> dict[str, Any]:
    from mtp_gguf.native.libraries.devices import devices  # noqa: PLC0415
    from mtp_gguf.native.libraries.exact import kernels  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.native.libraries.loaded import loaded_versions  # noqa: PLC0415
    from mtp_gguf.native.runtime import llama_cpp, plugged_kernels, runtime  # noqa: PLC0415

    built = find_build()
    stated = os.environ.get(VARIABLE)
    server = stated or (str(built.server) if built else None)
    lacks = []
    unusable = None
    if server:
        try:
            lacks = ask(Path(server)).lacking
        except ServerError as error:
            unusable = str(error)
    missing = [runtime.note] if runtime.note else []
    if server is None:
        missing.append("a llama-server with patches/: `mtp-gguf build-server` builds it")
    if unusable:
        missing.append(unusable)
    machine = this_machine(kernels())
    features = llama_cpp.llama_print_system_info().decode().strip(" |")
    return {
        "version": version("mtp-gguf"),
        "libraries": {
            "kind": runtime.kind,
            "folder": str(runtime.folder),
            "reason": runtime.reason,
            "llama.cpp": loaded_versions(),
        },
        "kernels": machine.kernels,
        "plugged_kernels": {
            "instructions": plugged_kernels.instructions,
            "reason": plugged_kernels.reason,
            "patched": plugged_kernels.patched,
            "operations": plugged_kernels.operations(),
            "left to ggml": plugged_kernels.left_to_ggml(),
            "choices": [asdict(choice) for choice in plugged_kernels.choices()],
            "choices measured": _last_measured(),
        },
        "cpu_features": features,
        "cpu": machine.cpu,
        "cores": machine.cores,
        "devices": [asdict(device) for device in devices()],
        "llama_server": server,
        "llama_server_from": built.origin if built and not stated else None,
        "llama_server_lacks": lacks,
        "missing": missing,
    }
