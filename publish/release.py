"""The files of a release and the record of what is done of it.

A release is a folder: GGUFs of a checkpoint in several types, its vision tower, and a model card.
`release.json` in it records each step, so that a second call goes on where the first one stopped.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from mtp_gguf.convert.checkpoints.checkpoint import Checkpoint, is_vision
from mtp_gguf.convert.families.target_model import HeadChoice
from mtp_gguf.convert.heads.acceptance import poor_text, record_acceptance
from mtp_gguf.convert.plans.plan import Plan, Request
from mtp_gguf.convert.plans.plan_checkpoint import make_plans
from mtp_gguf.convert.resolve import model_name
from mtp_gguf.gguf_tools.doctor import Severity, diagnose
from mtp_gguf.gguf_tools.errors import OutputError, RequestError
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.files.tensor_types import F16
from mtp_gguf.gguf_tools.heads.acceptance import read_stored
from mtp_gguf.gguf_tools.hub.remote import open_remote_model
from mtp_gguf.gguf_tools.hub.sources import version_of
from mtp_gguf.gguf_tools.imatrix import Imatrix
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.progress import Progress
from mtp_gguf.gguf_tools.vision import PART

RECORD = "release.json"
_FORMAT = 1
_CONTEXT, _DEPTH = 4096, 3  # of drafting, for doctor's estimate of memory


@dataclass(frozen=True)
class Release:
    """What is to be published of a model.

    source: the checkpoint, as the user named it. folder: where the files are, or would be. plans:
    one for each type, then that of the head alone, if it is wanted, then that of the vision tower,
    if the model has one.
    """

    source: str
    folder: Path
    checkpoint: Checkpoint
    plans: tuple[Plan, ...]

    @property
    def paths(self) -> list[Path]:
        """All files in the order of the plans."""
        return [shard.path for plan in self.plans for shard in plan.shards]

    @property
    def models(self) -> list[Plan]:
        """The plans of language models, without those of the head or the vision tower alone."""
        return [plan for plan in self.plans if plan.has_trunk]

    @property
    def has_tower(self) -> bool:
        """Whether the last plan is that of the vision tower."""
        return any(tensor.part == PART for tensor in self.plans[-1].tensors)

    @property
    def has_sidecar(self) -> bool:
        """Whether there is a plan of the head alone."""
        return len(self.models) + self.has_tower < len(self.plans)

    @property
    def identity(self) -> str:
        """Stands for everything that the files are made from."""
        found = sha256()
        for plan in self.plans:
            for shard in plan.shards:
                found.update(shard.path.name.encode() + shard.layout.header)
        for source in sorted(map(version_of, self.checkpoint.sources)):
            found.update(source.encode())
        return found.hexdigest()


def plan_release(
    source: str,
    checkpoint: Checkpoint,
    types: Sequence[str],
    folder: Path,
    *,
    imatrix: Imatrix | None,
    sidecar: str | None,
    split: int,
    measured: bool = False,
) -> Release:
    """Plan the files of a release; nothing is written and no weights are read.

    types: keys of FILE_TYPES, one for each file of the language model. sidecar: that of a file
    with the head alone. split: the most bytes of tensors in a file. measured: reserve keys for the
    acceptance. RequestError if the checkpoint has no MTP head.
    """
    tower = any(is_vision(name) for name in checkpoint.tensors)
    request = Request(
        quant=types[0],
        also=tuple(types[1:]),
        head=HeadChoice.WITH_TRUNK,
        imatrix=imatrix,
        mmproj=F16 if tower else None,
        sidecar=sidecar,
        split_max_size=split,
        model_name=model_name(source),
        output=folder if folder.is_dir() else Path(),  # a folder that does not exist has no files
        measured=measured,
    )
    plans = make_plans(checkpoint, request)
    if not any(tensor.part == "head" for tensor in plans[0].tensors):
        raise RequestError(
            f"{source}: expected a checkpoint with an MTP head, found none; convert it with "
            "mtp-gguf convert --from MODEL, which takes the head of another"
        )
    return Release(source, folder, checkpoint, plans)


@dataclass
class Record:
    """The steps of a release that are done, on disk.

    identity: of the release. converted: sizes of the files. diagnosed: what doctor found in each.
    repository: the one on the hub that has no other files. uploaded: the SHA-256 of each file that
    is there, or was about to be. measured: the table of quality and acceptance, with what it was
    measured on. acceptance: what each file states, as `Acceptance.fields` has it.
    """

    path: Path
    identity: str
    converted: dict[str, int] = field(default_factory=dict)
    diagnosed: dict[str, list[str]] = field(default_factory=dict)
    repository: str = ""
    uploaded: dict[str, str] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    acceptance: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        """Write the record; it is replaced as a whole."""
        fields: dict[str, Any] = {"format": _FORMAT, **vars(self)}
        del fields["path"]
        new = self.path.with_name(f".{self.path.name}.new")
        try:
            new.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
            os.replace(new, self.path)
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from None


def open_record(release: Release) -> Record:
    """The record in the release's folder; a new one if that belongs to other files."""
    path = release.folder / RECORD
    new = Record(path, release.identity)
    try:
        fields = parse_json(path.read_text(encoding="utf-8"))
        if fields.pop("format") == _FORMAT and fields["identity"] == new.identity:
            return Record(path, **fields)
    except FileNotFoundError:
        return new
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # a record that cannot be used means that everything is done again
    return new


def is_converted(release: Release, record: Record) -> bool:
    """Whether all files are there, as the record has them."""
    return all(
        path.is_file() and record.converted.get(path.name) == path.stat().st_size
        for path in release.paths
    )


def diagnose_files(release: Release, record: Record, repository: str | None = None) -> None:
    """Examine each model that the record has no findings of; RequestError for one with a fault.

    repository: where the files are, on the hub; None if they are in the folder.
    """
    for plan in release.models:
        path = plan.shards[0].path
        if path.name in record.diagnosed:
            continue
        place = f"hf://{repository}/{path.name}" if repository else str(path)
        with open_remote_model(place) if repository else open_model(path) as model:
            found = diagnose(model, None, _CONTEXT, _DEPTH).findings
        if faults := [f.text for f in found if f.severity is Severity.FAULT]:
            raise RequestError(f"{place}: doctor: {faults[0]}; it is not published")
        record.diagnosed[path.name] = [f.text for f in found if f.severity is Severity.WARNING]
        record.save()


def measure_files(
    release: Release, record: Record, least: float, progress: Progress, *, force: bool
) -> None:
    """Record the acceptance of each model that is here, measured unless its file states it.

    RequestError, if not `force`, for a head whose first drafts are accepted less often than
    `least`. What cannot be measured is said and left out.
    """
    for plan in (plan for plan in release.plans if plan.is_measured):
        path = plan.shards[0].path
        trunk = None if plan.has_trunk else release.models[0].shards[0].path
        if not path.is_file() or not (trunk or path).is_file():
            continue
        with open_model(path) as model, open_model(trunk or path) as whole:
            stated = read_stored(model, whole if trunk else None).acceptance
        if stated is None:
            check = record_acceptance(path, progress, least, trunk)
            if check.measured is None:
                progress.say(f"{path}: {check.text}")
                continue
            stated, cause = check.measured, check.warning
        else:
            cause = poor_text(path, stated, least) if stated.share < least else None
        if cause and not force:
            raise RequestError(
                f"{path}: {cause}; it is not published; --force publishes it all the same"
            )
        record.acceptance[path.name] = stated.fields()
        record.save()
