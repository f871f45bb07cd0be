"""What `serve` needs to know about a model: its file, its head, its default depth."""

import math
from dataclasses import dataclass
from pathlib import Path

from mtp_gguf.gguf_tools.errors import FormatError, RequestError
from mtp_gguf.gguf_tools.files.loadable import load_faults
from mtp_gguf.gguf_tools.heads.acceptance import read_stored
from mtp_gguf.gguf_tools.heads.drafters import Drafter
from mtp_gguf.gguf_tools.heads.drafters import misfits as drafter_misfits
from mtp_gguf.gguf_tools.heads.fastmtp import EMBEDDING_TENSOR, DraftLayout
from mtp_gguf.gguf_tools.heads.head import HeadReport
from mtp_gguf.gguf_tools.heads.head_files import heads_beside
from mtp_gguf.gguf_tools.heads.nextn import BLOCKS
from mtp_gguf.gguf_tools.hub.sources import what_is_at
from mtp_gguf.gguf_tools.model import open_model as open_gguf_model
from mtp_gguf.gguf_tools.vision import FILE_PREFIX, VisionTower, misfits

_SMALL = 1.5e9  # weights


class NoHeadError(RequestError):
    """The model can be served, but no head is found that it can draft with."""


@dataclass(frozen=True)
class ModelFile:
    """A GGUF model by its headers.

    path: the file passed to llama.cpp, the first shard. alone: a complete head without a trunk.
    embedding: shape of the token embedding, (width, vocabulary). weights: number of weights,
    including all experts. nbytes: of their data. faults: why llama.cpp would crash on it; empty if
    nothing is found. tower: the vision tower, if it is an mmproj file. drafter: the one in it, if
    it is no MTP head. acceptance: what the file states of its own head. attends_only: no layer has
    a recurrent state.
    """

    path: Path
    head: HeadReport
    alone: bool
    architecture: str
    embedding: tuple[int, ...]
    weights: int
    nbytes: int = 0
    faults: tuple[str, ...] = ()
    tower: VisionTower | None = None
    drafter: Drafter | None = None
    acceptance: str | None = None
    attends_only: bool = False

    def fits(self, other: "ModelFile") -> bool:
        """Whether one can be the head of the other, judging by the headers."""
        return (self.architecture, self.embedding) == (other.architecture, other.embedding)


@dataclass(frozen=True)
class ServedModel:
    """A model to serve.

    head_file: the file with its head; None if it cannot draft. mmproj: that with its vision tower;
    None if it sees no pictures.
    """

    file: ModelFile
    head_file: ModelFile | None
    mmproj: Path | None = None

    @property
    def separate_head(self) -> Path | None:
        """The file to pass as a draft model; None if the head is in the model's own file."""
        other = self.head_file is not None and self.head_file is not self.file
        return self.head_file.path if self.head_file and other else None

    @property
    def acceptance(self) -> str | None:
        """What the file of the head states of its acceptance with this model; None if nothing."""
        if self.head_file is None or self.head_file is self.file:
            return self.file.acceptance if self.head_file else None
        with open_gguf_model(self.file.path) as trunk, open_gguf_model(self.head_file.path) as head:
            return read_stored(head, trunk).text

    @property
    def draft_layout(self) -> DraftLayout | None:
        """Layout of the head's draft vocabulary; None if it has none."""
        draft = self.head_file.head.draft if self.head_file else None
        return draft.layout if draft else None

    @property
    def draft_depth(self) -> int:
        """The default of `--spec-draft-n-max` for servers that cannot choose it.

        It is 1 for mixtures of experts, where every further token reads further experts, and for
        small models, where a draft costs as much as it can save; otherwise 2. Measured with stock
        llama-server and a head that is right 80 % of the time: 37 / 36 / 31 tokens per second at
        depth 1 / 2 / 3 for a 0.8B model, 10.2 / 10.4 / 9.7 for a 4B model.
        """
        moe = self.file.architecture != "qwen35"  # all others are mixtures of experts
        return 1 if moe or self.file.weights < _SMALL else 2


def open_model(path: Path) -> ModelFile:
    """Read the headers of a GGUF model, given any of its shards; FormatError if it is damaged."""
    if not path.is_file():
        raise FormatError(f"{path}: expected a GGUF file, found {what_is_at(path)}")
    with open_gguf_model(path) as model:
        report = model.report
        embedding = model.tensors.get(EMBEDDING_TENSOR)
        return ModelFile(
            path=model.paths[0],
            head=report,
            alone=report.ready and model.head.is_alone,
            architecture=str(model.architecture),
            embedding=embedding.shape if embedding else (),
            faults=tuple(load_faults(model)),
            weights=sum(math.prod(tensor.shape) for tensor in model.tensors.values()),
            nbytes=sum(tensor.nbytes for tensor in model.tensors.values()),
            tower=model.tower,
            drafter=model.drafter,
            acceptance=read_stored(model).text,
            attends_only=model.attends_only,
        )


def choose_head(model: ModelFile, named: Path | None) -> ServedModel:
    """Find the head of `model`: the `named` file, its own, or the only one beside it.

    NoHeadError if there is none, or more than one to choose from. RequestError if the model is only
    a head, or the named file is not its head.
    """
    if model.drafter:
        raise RequestError(
            f"{model.path}: contains only a drafter ({model.drafter.text}); serve its model, and "
            "name this file with --head"
        )
    if model.alone:
        raise RequestError(
            f"{model.path}: contains only a head; serve its model, "
            "and name this file with --head unless it is beside the model"
        )
    if named and named.is_file() and named.samefile(model.path) and model.head.ready:
        return ServedModel(model, model)
    if named:
        head = open_model(named)
        if head.drafter:
            with open_gguf_model(named) as file, open_gguf_model(model.path) as trunk:
                for misfit in drafter_misfits(head.drafter, file.head, trunk.head):
                    raise RequestError(f"{named} ({head.drafter.name}): {misfit}")
            return ServedModel(model, head)
        if not head.head.ready:
            raise RequestError(f"{named}: cannot draft: {head.head.reason}")
        if head.head.shared:
            with open_gguf_model(named) as file, open_gguf_model(model.path) as trunk:
                file.head.check_fit(trunk.head)
        elif not head.fits(model):
            raise RequestError(
                f"{named}: expected the head of a model with {_described(model)}, found "
                f"{_described(head)}"
            )
        return ServedModel(model, head)
    if model.architecture in BLOCKS and not BLOCKS[model.architecture].graph:
        raise NoHeadError(
            f"{model.path}: llama.cpp at the version of this package does not draft with "
            f"{model.architecture}; with a llama-server that does, name the head with --head: a "
            "file of its own, or this file if it has one"
        )
    if model.head.ready:
        return ServedModel(model, model)
    beside = _heads_beside(model)
    if len(beside) > 1:
        names = ", ".join(head.path.name for head in beside)
        raise NoHeadError(
            f"{model.path}: several heads are beside it ({names}); choose one with --head"
        )
    if not beside:
        other = "; or name a file that has its head with --head"
        raise NoHeadError(
            f"{model.path}: {model.head.reason}{other if model.architecture in BLOCKS else ''}"
        )
    return ServedModel(model, beside[0])


def choose_mmproj(model: ModelFile, named: Path | None) -> tuple[Path | None, str]:
    """Find the vision tower of `model`: the `named` file, or the only one beside it.

    Returns None if there is none, and a note if there are several to choose from. RequestError if
    the named one cannot be used.
    """
    if named:
        file = open_model(named)
        if file.tower is None:
            raise RequestError(
                f"{named}: expected an mmproj file, found architecture {file.architecture}"
            )
        for fault in _unusable(file.tower, model):
            raise RequestError(f"{named}: {fault}")
        return file.path, ""
    beside = []
    for path in sorted(model.path.parent.glob(f"{FILE_PREFIX}*.gguf")):
        try:
            file = open_model(path)
        except FormatError:  # naming it explicitly reports the error
            continue
        if file.tower is not None and not _unusable(file.tower, model):
            beside.append(file.path)
    if len(beside) > 1:
        names = ", ".join(path.name for path in beside)
        return None, f"several vision towers are beside it ({names}); choose one with --mmproj"
    return (beside[0] if beside else None), ""


def _unusable(tower: VisionTower, model: ModelFile) -> list[str]:
    """Why the vision tower cannot be served with the model."""
    width = model.embedding[0] if model.embedding else None
    return [*tower.faults, *misfits(tower, model.architecture, width)]


def check_loads(served: ServedModel) -> None:
    """RequestError for files that would end llama-server instead of being refused by it."""
    for file in (served.file, served.head_file or served.file):
        for fault in file.faults:
            raise RequestError(f"{file.path}: {fault}; llama-server would crash on it")


def _heads_beside(model: ModelFile) -> list[ModelFile]:
    """Head-only files beside the model that fit it."""
    with open_gguf_model(model.path) as opened:
        return [open_model(path) for path in heads_beside(opened)]


def _described(model: ModelFile) -> str:
    return f"architecture {model.architecture} and embedding {list(model.embedding)}"
