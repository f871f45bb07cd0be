"""Plans the conversion of a checkpoint on disk or on the hub, or of a GGUF in 16 bits."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mtp_gguf.gguf_tools.errors import OptionError, RequestError
from mtp_gguf.gguf_tools.hub.remote import RemoteSource, hub_gguf, hub_model
from mtp_gguf.gguf_tools.hub.resolve import local_gguf, names_gguf
from mtp_gguf.gguf_tools.model import Model, open_model
from mtp_gguf.gguf_tools.progress import Progress

from .checkpoints.checkpoint import Checkpoint
from .families.target_model import HeadChoice
from .heads.gguf_draft import rank_for_gguf
from .heads.head_donor import plan_head, pre_tokenizer_of
from .options import check_revision
from .plans.plan import Plan, Request
from .plans.plan_checkpoint import make_plans
from .plans.plan_gguf import Donor, make_gguf_plans
from .resolve import model_name, open_headers
from .resolve import open_model as open_checkpoint


@dataclass(frozen=True)
class Planned:
    """The files to write, the weights they are made from, and the local source files."""

    plans: tuple[Plan, ...]
    weights: Checkpoint
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
    request: Request,
    stream: bool | None,
    progress: Progress,
) -> Iterator[Planned]:
    """Plan the conversion of `model` and keep its files open during the context.

    mtp_from: another model, from which the head is taken. stream: read weights on the hub there;
    None to do so if the disk lacks room for them.
    """
    if stream and (is_gguf(model) or hub_model(model) is None):
        raise OptionError("--stream needs a checkpoint on the hub, OWNER/NAME")
    if is_gguf(model):
        if request.mmproj is not None:
            raise OptionError(
                "--mmproj needs the original checkpoint: a GGUF of a language model has no vision "
                "tower"
            )
        if revision or request.tokenizer_pre:
            raise OptionError("--revision and --tokenizer-pre are for checkpoints")
        found = local_gguf(model, with_head=False, say=progress.download)
        with open_model(found.path) as opened, ExitStack() as stack:
            yield _planned_gguf(opened, mtp_from, request, stack)
        return
    check_revision(model, revision)
    if mtp_from and is_gguf(mtp_from):
        raise RequestError(
            f"--from: expected a checkpoint like {model}, found the GGUF {mtp_from}; convert "
            f"without --from, then: mtp-gguf graft OUTPUT --from {mtp_from}"
        )
    vision = request.mmproj is not None
    with open_checkpoint(
        model, revision, request.head, mtp_from, vision=vision, say=progress.download, stream=stream
    ) as checkpoint:
        plans = make_plans(checkpoint, replace(request, model_name=model_name(model)))
        yield Planned(plans, checkpoint, checkpoint.files())


def _planned_gguf(
    model: Model, mtp_from: str | None, request: Request, stack: ExitStack
) -> Planned:
    draft, files = None, []
    if request.draft:
        draft, files = rank_for_gguf(model, request.draft), request.draft.files
    donor = _donor(model, mtp_from, request, stack) if mtp_from else None
    plans, weights = make_gguf_plans(model, request, draft, donor)
    sources = [*model.paths, *files]
    if donor is not None:
        sources += donor.checkpoint.files() if donor.checkpoint else donor.model.paths
    return Planned(plans, weights, sources)


def _donor(base: Model, mtp_from: str, request: Request, stack: ExitStack) -> Donor:
    """Open the model `mtp_from` as a donor of the head for `base`."""
    if is_gguf(mtp_from):
        return Donor(stack.enter_context(open_model(Path(mtp_from))))
    checkpoint = stack.enter_context(open_headers(mtp_from, HeadChoice.BLOCK))
    asked = Request(
        quant="F16",
        head=HeadChoice.BLOCK,
        head_type=request.head_type,
        tokenizer_pre=pre_tokenizer_of(base),
        output=Path("head.gguf"),
    )
    plan, preview = plan_head(checkpoint, asked, Path("head.gguf"), mtp_from)
    targets = {t.spec.name: t.target for t in plan.tensors if t.target is not None}
    return Donor(preview, targets, checkpoint)
