"""`mtp-gguf doctor`."""

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_gguf.convert.heads.acceptance import AcceptanceCheck, check_acceptance
from mtp_gguf.gguf_tools.doctor import Diagnosis, Finding, Severity, diagnose, with_tower
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.hub.remote import hub_model
from mtp_gguf.gguf_tools.hub.resolve import names_gguf, open_any_model
from mtp_gguf.gguf_tools.machine.processors import computing_threads
from mtp_gguf.gguf_tools.machine.shell import quoted
from mtp_gguf.gguf_tools.machine.text import human_bytes, printable
from mtp_gguf.gguf_tools.machine.text_files import whole_texts
from mtp_gguf.gguf_tools.model import Model

from .console import CONSOLE
from .local_model import local_model
from .options import AsJson, GpuLayers, usable_gpu_layers
from .progress import reports_errors

if TYPE_CHECKING:
    from mtp_gguf.bench.explain import Explanation
    from mtp_gguf.native.libraries.kernel_share import KernelShare

_FAULTY = 1
_CONTEXT = 8192  # tokens that the memory is estimated for
_TEMP = 0.8
_WITHOUT_HEAD = {"architecture", "no-head"}  # codes of faults with which a model runs
# Version of the JSON: 2 renamed the key of the repairing command to `fix`.
_FORMAT = 2


@reports_errors
def doctor(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="GGUF (any shard) or checkpoint folder; also OWNER/NAME[:QUANT] "
            "or hf://OWNER/NAME/FILE on the hub, https://….",
        ),
    ],
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="FILE",
            help="Also examine the head in this GGUF, which may be on the hub.",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Measure the head against the original: folder, OWNER/NAME or a GGUF.",
        ),
    ] = None,
    mmproj: Annotated[
        Path | None,
        typer.Option("--mmproj", metavar="FILE", help="Examine this vision tower, too."),
    ] = None,
    load: Annotated[
        bool,
        typer.Option(
            "--load",
            help="Load the model and draft once, in a subprocess that may crash (downloads a model "
            "on the hub).",
        ),
    ] = False,
    context: Annotated[
        int | None,
        typer.Option("-c", "--ctx", min=1, help="Examine for N tokens of context (default: 8192)."),
    ] = None,
    depth: Annotated[
        int,
        typer.Option("--depth", min=1, max=16, help="Estimate the memory for drafts of N tokens."),
    ] = 3,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Run the model; explain why drafting does not pay: causes, figures, fixes.",
        ),
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", help="Measure on this text (default: a built-in text)."
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temp", min=0.0, max=100.0, help=f"Explain for this temperature (default: {_TEMP})."
        ),
    ] = None,
    gpu_layers: GpuLayers = 0,
    as_json: AsJson = False,
) -> None:
    """Report whether a model can draft, and if not, why and how to fix it.

    Also reports what it drafts with and the memory that drafting takes. The exit code is 1 if a
    fault was found, else 0. Warnings are about heads that draft badly. A model without a head is
    examined with the head in a file beside it, if there is only one. --from also measures what the
    file alone does not show: norms not raised by 1, swapped halves of eh_proj, the head of another
    fine-tune. --load also reads all weights and runs the model, with a head or without, to find
    NaN and infinity, files that crash llama.cpp, and heads with a low acceptance rate, such as that
    of a base model on its fine-tune. --explain measures acceptance and cost on a text, and prints
    each cause for which drafting does not pay with the figures behind it and the command that fixes
    it.

    For a session file (--session) it prints what the file holds, and whether its checksums hold.

    **Examples**

    mtp-gguf doctor model.gguf

    mtp-gguf doctor model.gguf --from Qwen/Qwen3.5-9B --json

    mtp-gguf doctor trunk.gguf --head mtp-trunk.gguf

    mtp-gguf doctor model.gguf --mmproj mmproj-model.gguf

    mtp-gguf doctor download.gguf --load

    mtp-gguf doctor model.gguf --explain --text notes.txt --temp 0.6
    """
    folder, on_hub, share, check, tried = Path(model), hub_model(model), None, None, False
    if (load or explain) and (folder.is_dir() or on_hub):
        raise typer.BadParameter("--load and --explain are for GGUF files")
    for option, given in (("--text", text), ("--temp", temperature)):
        if given is not None and not explain:
            raise typer.BadParameter(f"{option} is for --explain")
    if folder.is_file() and _reports_session(folder, as_json=as_json):
        return
    if load or explain or (head is None and folder.is_file()):  # with the only head beside it
        found = local_model(model, head)
        folder, model = found.path, str(found.path)
        head = None if found.head is None else str(found.head)
    if folder.is_dir() or on_hub:
        if head or source or mmproj:
            raise typer.BadParameter("--head, --from and --mmproj are for GGUF files")
        from mtp_gguf.convert.checkpoints import doctor_checkpoint  # noqa: PLC0415  (NumPy)

        if on_hub:
            diagnosis = doctor_checkpoint.diagnose_hub_checkpoint(*on_hub)
        else:
            diagnosis = doctor_checkpoint.diagnose_checkpoint(folder)
    else:
        with open_any_model(model) as opened:
            with open_any_model(head) if head else nullcontext() as separate:
                diagnosis = _examined(opened, separate, source, context or _CONTEXT, depth)
            if mmproj is not None:
                with open_any_model(str(mmproj)) as tower:
                    diagnosis = with_tower(diagnosis, opened, tower)
            share = _kernel_share(opened) if diagnosis.can_draft else None
        if (load or explain) and diagnosis.drafter:
            raise RequestError(
                f"{head or model}: expected an MTP head for --load and --explain, found another "
                f"drafter ({diagnosis.drafter.name}); mtp-gguf serve MODEL --head FILE runs it"
            )
        tried = _can_run(diagnosis) if load else explain and diagnosis.can_draft
        if tried:
            separate_head = Path(head) if head else None
            diagnosis, check = _tried(diagnosis, folder, separate_head, measured=not explain)
    explanation = None
    if explain:
        temp = _TEMP if temperature is None else temperature
        usage = (text, temp, context or 0, gpu_layers)
        explanation = _explained(diagnosis, folder, Path(head) if head else None, *usage)
    if as_json:
        fields = _fields(diagnosis)
        fields["kernels"] = dataclasses.asdict(share) if share else None
        fields["measured_acceptance"] = check.fields() if check else None
        if explanation is not None:
            fields["explain"] = explanation.fields()
        typer.echo(json.dumps(fields, indent=1))
    else:
        for line in _report(diagnosis):
            typer.echo(printable(line))
        if share:
            typer.echo(f"kernels: {share.text}")
        if tried and _can_run(diagnosis):
            typer.echo(f"loaded: it runs{' and drafts' if diagnosis.can_draft else ''}")
        if check:
            typer.echo(printable(f"measured now: {check.text}"))
        for line in explanation.lines() if explanation else ():
            typer.echo(printable(line))
    if not diagnosis.is_sound:
        raise typer.Exit(_FAULTY)


def _kernel_share(model: Model) -> "KernelShare | None":
    """Return what our kernels compute of a local file; None if llama.cpp cannot be loaded."""
    from mtp_gguf.native.errors import NativeError  # noqa: PLC0415

    try:
        from mtp_gguf.native.libraries.kernel_share import kernel_share  # noqa: PLC0415  (loads llama.cpp)
    except NativeError:
        return None
    return kernel_share(model.tensors.values())


def _reports_session(path: Path, *, as_json: bool) -> bool:
    """Report on a session file; False if it is none."""
    from mtp_gguf.native.sessions.session_file import check_session, is_session  # noqa: PLC0415  (NumPy)

    if not is_session(path):
        return False
    from . import session_report  # noqa: PLC0415

    header = check_session(path)
    if as_json:
        typer.echo(json.dumps(session_report.fields(header), indent=1))
        return True
    for line in session_report.lines(header):
        typer.echo(line)
    return True


def _examined(
    model: Model, separate: Model | None, source: str | None, context: int, depth: int
) -> Diagnosis:
    diagnosis = diagnose(model, separate, context, depth)
    if source is None or diagnosis.head is None:
        return diagnosis
    measured = _measured(separate or model, source)
    guessed = {"norm-not-raised", "norm-raised-twice"}  # now known
    remaining = tuple(f for f in diagnosis.findings if f.code not in guessed)
    if measured:
        return dataclasses.replace(
            diagnosis, head=None, runs_with=(), memory=None, findings=(*measured, *remaining)
        )
    return dataclasses.replace(diagnosis, findings=remaining)


def _measured(model: Model, source: str) -> tuple[Finding, ...]:
    """Compare the head of a model with that of its original, a GGUF or a checkpoint."""
    from mtp_gguf.convert.checkpoints.checkpoint_side import CheckpointSide  # noqa: PLC0415
    from mtp_gguf.convert.checkpoints.doctor_checkpoint import measure_head  # noqa: PLC0415
    from mtp_gguf.convert.families.target_model import HeadChoice  # noqa: PLC0415  (NumPy)
    from mtp_gguf.convert.heads.converted_head import fetched, open_source  # noqa: PLC0415
    from mtp_gguf.gguf_tools.compare import GgufSide  # noqa: PLC0415
    from mtp_gguf.quantize import ggml  # noqa: PLC0415

    if names_gguf(source):
        with open_any_model(source) as original:
            side = GgufSide(original, ggml.dequantize)
            return tuple(measure_head(model, side, source, ggml.dequantize))
    with (
        tempfile.TemporaryDirectory(prefix="mtp-gguf-") as folder,
        open_source(source, None) as checkpoint,
        fetched(checkpoint, folder, CONSOLE) as whole,
    ):
        converted = CheckpointSide(whole, HeadChoice.BLOCK)
        return tuple(measure_head(model, converted, source, ggml.dequantize))


def _can_run(diagnosis: Diagnosis) -> bool:
    """Whether the model drafts, or lacks nothing but a head."""
    faults = {f.code for f in diagnosis.findings if f.severity is Severity.FAULT}
    return diagnosis.can_draft or (bool(faults) and faults <= _WITHOUT_HEAD)


def _tried(
    diagnosis: Diagnosis, model: Path, head: Path | None, *, measured: bool
) -> tuple[Diagnosis, AcceptanceCheck | None]:
    """The diagnosis after the model has been run, with what came of it, and the acceptance.

    measured: also measure the acceptance rate.
    """
    from mtp_gguf.native.checks.trial import try_model  # noqa: PLC0415

    failure = try_model(model, head)
    if failure is None and measured and diagnosis.can_draft:
        check = check_acceptance(head or model, CONSOLE, trunk=model if head else None)
        findings = (*diagnosis.findings, *_stale(check, model))
        return dataclasses.replace(diagnosis, findings=findings), check
    if failure is None:
        return diagnosis, None
    finding = Finding("does-not-run", Severity.FAULT, failure)
    findings = (finding, *diagnosis.findings)
    refused = dataclasses.replace(
        diagnosis, head=None, runs_with=(), memory=None, findings=findings, acceptance=None
    )
    return refused, None


def _explained(
    diagnosis: Diagnosis,
    path: Path,
    head: Path | None,
    text: Path | None,
    temperature: float,
    context: int,
    gpu_layers: int,
) -> "Explanation":
    """Return the causes why drafting does not pay; without a head that runs, those of the file."""
    from mtp_gguf.bench.explain import Usage, explain_model  # noqa: PLC0415  (loads llama.cpp)

    contents = None if text is None else "\n".join(whole_texts([text]))
    if diagnosis.can_draft:
        gpu_layers = usable_gpu_layers(gpu_layers)
    usage = Usage(context, gpu_layers, computing_threads())
    return explain_model(diagnosis, path, head, contents, temperature, usage)


def _stale(check: AcceptanceCheck, model: Path) -> Iterator[Finding]:
    """A warning if most first drafts are rejected, although the file is valid."""
    if not check.warning:
        return
    name = quoted(model)
    if check.list_is_poor:
        fix = f"mtp-gguf fastmtp add {name} --corpus FILES --in-place"
        yield Finding("draft-vocabulary", Severity.WARNING, check.warning, fix)
        return
    fix = f"mtp-gguf train-head {name} --text FILES"
    yield Finding("stale-head", Severity.WARNING, check.warning, fix)


def _report(diagnosis: Diagnosis) -> Iterator[str]:
    tower = diagnosis.tower
    if diagnosis.drafter:
        yield f"{diagnosis.path}: {'can draft' if diagnosis.can_draft else 'cannot be used'}"
        yield f"drafter: {diagnosis.drafter.text}"
    elif tower and diagnosis.head is None and diagnosis.is_sound:
        yield f"{diagnosis.path}: {tower.text}"
    else:
        yield f"{diagnosis.path}: {'can draft' if diagnosis.can_draft else 'cannot draft'}"
        if diagnosis.head:
            yield f"head: {diagnosis.head}"
        if tower and diagnosis.is_sound:
            yield f"sees pictures: {tower.text}"
    if diagnosis.can_draft and diagnosis.in_use:
        yield f"draft vocabulary: {diagnosis.in_use.text}"
    if diagnosis.acceptance and diagnosis.acceptance.text:
        yield f"acceptance: {diagnosis.acceptance.text}"
    for command in diagnosis.runs_with:
        yield f"runs with: {command}"
    memory = diagnosis.memory
    if memory:
        parts = [f"head {human_bytes(memory.head)}"]
        if memory.draft_rows:
            parts.append(f"draft vocabulary {human_bytes(memory.draft_rows)} (in process)")
        parts.append(f"cache {human_bytes(memory.cache)}")
        parts.append(f"{memory.copies} state copies of {human_bytes(memory.state_copy)}")
        yield (
            f"extra memory at {memory.context} positions, depth {memory.depth}: "
            f"{human_bytes(memory.total)} ({', '.join(parts)})"
        )
        if memory.state_log != memory.state_copy:
            yield (
                f"on a CPU with our patches: {human_bytes(memory.total_by_replay)}, a log of "
                f"{human_bytes(memory.state_log)} in place of each state copy"
            )
        if memory.whole_rows:
            yield (
                f"in process on a GPU: {human_bytes(memory.whole_rows)} more for a second copy of "
                f"the vocabulary's rows, {human_bytes(memory.embedding_rows)} if the whole trunk "
                "is on the same GPU; a draft vocabulary saves most of it"
            )
    for finding in diagnosis.findings:
        yield f"{finding.severity.value}: {finding.text}"
        if finding.fix:
            yield f"  fix: {finding.fix}"


def _fields(diagnosis: Diagnosis) -> dict[str, Any]:
    fields = {"format": _FORMAT, **dataclasses.asdict(diagnosis)}
    fields["can_draft"] = diagnosis.can_draft
    fields["acceptance"] = diagnosis.acceptance.fields() if diagnosis.acceptance else None
    if diagnosis.memory:
        fields["memory"]["total"] = diagnosis.memory.total
        fields["memory"]["total_by_replay"] = diagnosis.memory.total_by_replay
    return fields
