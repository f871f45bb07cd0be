"""What `mtp-gguf convert` converts: a checkpoint on disk or on the hub, or a GGUF in 16 bits."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.model import Model, open_model
from mtp_gguf.gguf_tools.remote import hub_gguf
from mtp_gguf.gguf_tools.resolve import names_gguf

from .local_model import local_model
from .options import DraftOptions, check_revision
from .progress import byte_progress

if TYPE_CHECKING:
    from mtp_gguf.convert.checkpoint import Checkpoint
    from mtp_gguf.convert.plan import Plan, Request
    from mtp_gguf.convert.plan_gguf import Donor


@dataclass(frozen=True)
class Planned:
    """The files to write, the weights they are made from, and the source files."""

    plans: tuple["Plan", ...]
    weights: "Checkpoint"
    sources: list[Path]


def is_gguf(model: str) -> bool:
    """Whether `model` names a GGUF file rather than a folder or a hub id."""
    if hub_gguf(model):
        return names_gguf(model)
    return model.endswith(".gguf") and not Path(model).is_dir()


@contextmanager
def planned(
    model: str, revision: str | None, mtp_from: str | None, request: "Request"
) -> Iterator[Planned]:
    """Plan the conversion of `model` and keep its files open during the context.

    mtp_from: another model, from which the head is taken.
    """
    if is_gguf(model):
        if request.mmproj is not None:
            raise typer.BadParameter(
                "--mmproj needs the original checkpoint: a GGUF of a language model has no vision "
                "tower"
            )
        if revision or request.tokenizer_pre:
            raise typer.BadParameter("--revision and --tokenizer-pre are for checkpoints")
        found = local_model(model, drafts=False)
        with open_model(found.path) as opened, ExitStack() as stack:
            yield _planned_gguf(opened, mtp_from, request, stack)
        return
    check_revision(model, revision)
    if mtp_from and is_gguf(mtp_from):
        raise RequestError(
            f"--from: expected a checkpoint like {model}, found the GGUF {mtp_from}; convert "
            f"without --from, then: mtp-gguf graft OUTPUT --from {mtp_from}"
        )
    from mtp_gguf.convert.plan_checkpoint import make_plans  # noqa: PLC0415  (NumPy and gguf)
    from mtp_gguf.convert.resolve import model_name  # noqa: PLC0415
    from mtp_gguf.convert.resolve import open_model as open_checkpoint  # noqa: PLC0415

    vision = request.mmproj is not None
    with open_checkpoint(model, revision, request.head, mtp_from, vision=vision) as checkpoint:
        plans = make_plans(checkpoint, replace(request, model_name=model_name(model)))
        yield Planned(plans, checkpoint, checkpoint.files())


@contextmanager
def local_weights(conversion: Planned) -> Iterator["Checkpoint"]:
    """Yield the weights; a head on the hub is fetched into a temporary folder at the output."""
    from mtp_gguf.convert.hub_checkpoint import (  # noqa: PLC0415
        remote_head_bytes,
        with_local_head,
    )

    missing = remote_head_bytes(conversion.weights)
    if not missing:
        yield conversion.weights
        return
    beside = conversion.plans[0].shards[0].path.parent
    with tempfile.TemporaryDirectory(prefix=".mtp-gguf-", dir=beside) as folder:
        with byte_progress("fetch the head", missing) as progress:
            whole = with_local_head(conversion.weights, Path(folder) / "mtp.safetensors", progress)
        with whole:
            yield whole


def _planned_gguf(
    model: Model, mtp_from: str | None, request: "Request", stack: ExitStack
) -> Planned:
    from mtp_gguf.convert.plan_gguf import make_gguf_plans  # noqa: PLC0415  (NumPy and gguf)

    draft, files = None, []
    if request.draft:
        asked = request.draft
        options = DraftOptions(True, asked.size, asked.corpus, asked.ids_file)
        draft, files = options.ranked_for(model), options.files
    donor = _donor(model, mtp_from, request, stack) if mtp_from else None
    made = make_gguf_plans(model, request, draft, donor)
    sources = [*model.paths, *files]
    if donor is not None:
        sources += donor.checkpoint.files() if donor.checkpoint else donor.model.paths
    return Planned(made.plans, made.weights, sources)


def _donor(base: Model, mtp_from: str, request: "Request", stack: ExitStack) -> "Donor":
    """Open the model `mtp_from` as a donor of the head for `base`."""
    from mtp_gguf.convert.blueprint import HeadChoice  # noqa: PLC0415
    from mtp_gguf.convert.head_donor import plan_head  # noqa: PLC0415
    from mtp_gguf.convert.plan import Request  # noqa: PLC0415
    from mtp_gguf.convert.plan_gguf import Donor  # noqa: PLC0415
    from mtp_gguf.convert.resolve import open_donor  # noqa: PLC0415

    if is_gguf(mtp_from):
        return Donor(stack.enter_context(open_model(Path(mtp_from))))
    checkpoint = stack.enter_context(open_donor(mtp_from))
    pre = base.first.scalar("tokenizer.ggml.pre")
    asked = Request(
        quant="F16",
        head=HeadChoice.BLOCK,
        head_type=request.head_type,
        tokenizer_pre=pre if isinstance(pre, str) else None,
        output=Path("head.gguf"),
    )
    head = plan_head(checkpoint, asked, Path("head.gguf"), mtp_from)
    targets = {t.spec.name: t.target for t in head.plan.tensors if t.target is not None}
    return Donor(head.preview, targets, checkpoint)
