"""What `mtp-gguf convert` converts: a checkpoint on disk or on the hub, or a GGUF in 16 bits."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.model import Model, open_model
from mtp_gguf.gguf_tools.remote import RemoteSource, hub_gguf, hub_model
from mtp_gguf.gguf_tools.resolve import names_gguf

from .local_model import announce_download, local_model
from .options import DraftOptions, check_revision

if TYPE_CHECKING:
    from mtp_gguf.convert.checkpoint import Checkpoint
    from mtp_gguf.convert.plan import Plan, Request
    from mtp_gguf.convert.plan_gguf import Donor


@dataclass(frozen=True)
class Planned:
    """The files to write, the weights they are made from, and the local source files."""

    plans: tuple["Plan", ...]
    weights: "Checkpoint"
    sources: list[Path]

    @property
    def resumes(self) -> bool:
        """Whether what is written stays after an interruption, because weights are on the hub."""
        return any(isinstance(t.source, RemoteSource) for t in self.weights.tensors.values())


def is_gguf(model: str) -> bool:
    """Whether `model` names a GGUF file rather than a folder or a hub id."""
    if hub_gguf(model):
        return names_gguf(model)
    return model.endswith(".gguf") and not Path(model).is_dir()


@contextmanager
def planned(
    model: str,
    revision: str | None,
    mtp_from: str | None,
    request: "Request",
    stream: bool | None,
) -> Iterator[Planned]:
    """Plan the conversion of `model` and keep its files open during the context.

    mtp_from: another model, from which the head is taken. stream: read weights on the hub there;
    None to do so if the disk lacks room for them.
    """
    if stream and (is_gguf(model) or hub_model(model) is None):
        raise typer.BadParameter("--stream needs a checkpoint on the hub, OWNER/NAME")
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
    with open_checkpoint(
        model,
        revision,
        request.head,
        mtp_from,
        vision=vision,
        say=announce_download,
        stream=stream,
    ) as checkpoint:
        plans = make_plans(checkpoint, replace(request, model_name=model_name(model)))
        yield Planned(plans, checkpoint, checkpoint.files())


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
    from mtp_gguf.convert.resolve import open_headers  # noqa: PLC0415

    if is_gguf(mtp_from):
        return Donor(stack.enter_context(open_model(Path(mtp_from))))
    checkpoint = stack.enter_context(open_headers(mtp_from, HeadChoice.BLOCK))
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
