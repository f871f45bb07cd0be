"""What serving takes to know of a model: its file, its head, how deep to draft."""

import math
from dataclasses import dataclass
from pathlib import Path

from mtp_gguf.gguf_tools.errors import FormatError, RequestError
from mtp_gguf.gguf_tools.fastmtp import EMBEDDING_TENSOR, DraftLayout
from mtp_gguf.gguf_tools.head import HeadReport
from mtp_gguf.gguf_tools.model import open_model as open_gguf_model

_SMALL = 1.5e9  # weights


@dataclass(frozen=True)
class ModelFile:
    """A GGUF model by its headers.

    path: the file that llama.cpp is given, the first shard. alone: a whole head without a trunk.
    embedding: shape of the token embedding, (width, vocabulary). weights: number of weights, all
    experts counted.
    """

    path: Path
    head: HeadReport
    alone: bool
    architecture: str
    embedding: tuple[int, ...]
    weights: int

    def fits(self, other: "ModelFile") -> bool:
        """Whether one can be the head of the other, as far as headers tell."""
        return (self.architecture, self.embedding) == (other.architecture, other.embedding)


@dataclass(frozen=True)
class ServedModel:
    """A model to be served: `head_file` is the file with its head, None where it cannot draft."""

    file: ModelFile
    head_file: ModelFile | None

    @property
    def head_beside(self) -> Path | None:
        """The file to be given to llama.cpp as a draft model, where the head has its own."""
        other = self.head_file is not None and self.head_file is not self.file
        return self.head_file.path if self.head_file and other else None

    @property
    def draft_layout(self) -> DraftLayout | None:
        """How the head's draft vocabulary is stored; None where it has none."""
        draft = self.head_file.head.draft if self.head_file else None
        return draft.layout if draft else None

    @property
    def draft_depth(self) -> int:
        """A `--spec-draft-n-max` to begin with.

        1 for mixtures of experts, whose every further token brings further experts to be read, and
        for small models, where a step of drafting costs as much as it can save: llama-server with
        a head that is right 80 % of the time gave 37 / 36 / 31 tokens a second at depth 1 / 2 / 3
        with a 0.8B model and 10.2 / 10.4 / 9.7 with a 4B one. Else 2.
        """
        moe = self.file.architecture == "qwen35moe"
        return 1 if moe or self.file.weights < _SMALL else 2


def open_model(path: Path) -> ModelFile:
    """Look at a GGUF model; any shard stands for the whole. FormatError when it is not sound."""
    if not path.is_file():
        raise FormatError(
            f"{path}: expected a GGUF file, found {'a folder' if path.is_dir() else 'none'}"
        )
    with open_gguf_model(path) as model:
        report = model.head.report
        embedding = model.tensors.get(EMBEDDING_TENSOR)
        return ModelFile(
            path=model.paths[0],
            head=report,
            alone=report.ready and model.head.is_alone,
            architecture=str(model.architecture),
            embedding=embedding.shape if embedding else (),
            weights=sum(math.prod(tensor.shape) for tensor in model.tensors.values()),
        )


def choose_head(model: ModelFile, named: Path | None) -> ServedModel:
    """Find the head that `model` drafts with: the `named` file, its own, or one beside it.

    RequestError says what is missing, or which files there are to choose from.
    """
    if model.alone:
        raise RequestError(
            f"{model.path}: is a head alone; serve the model that it belongs to, "
            "and it is found beside it or named with --head"
        )
    if named:
        head = open_model(named)
        if not head.head.ready:
            raise RequestError(f"{named}: cannot draft: {head.head.reason}")
        if not head.fits(model):
            raise RequestError(
                f"{named}: expected the head of a model with {_says(model)}, found {_says(head)}"
            )
        return ServedModel(model, head)
    if model.head.ready:
        return ServedModel(model, model)
    beside = _heads_beside(model)
    if len(beside) > 1:
        names = ", ".join(head.path.name for head in beside)
        raise RequestError(
            f"{model.path}: several heads stand beside it ({names}): choose with --head"
        )
    if not beside:
        raise RequestError(
            f"{model.path}: cannot draft: {model.head.reason}; --no-draft serves it without, "
            "--head names a file that has its head"
        )
    return ServedModel(model, beside[0])


def _heads_beside(model: ModelFile) -> list[ModelFile]:
    """Heads alone that fit the model, by the name that publishers give them."""
    found = []
    for path in sorted(model.path.parent.glob("mtp-*.gguf")):
        try:
            head = open_model(path)
        except FormatError:  # another's file; whoever means it names it and is told
            continue
        if head.alone and head.head.ready and head.fits(model):
            found.append(head)
    return found


def _says(model: ModelFile) -> str:
    return f"architecture {model.architecture} and embedding {list(model.embedding)}"
