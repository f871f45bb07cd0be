"""Head-only files beside a model, by the names that publishers give them.

ggml-org names them `mtp-MODEL-TYPE.gguf`, Unsloth `MTP/mtp-MODEL-TYPE.gguf`, and
`MTP/mtp-MODEL-shared-TYPE.gguf` if they take embedding and output from the trunk.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from ..errors import FormatError, RequestError
from ..model import Model, open_model, shard_names, whole_name
from .drafters import Drafter, misfits
from .nextn import ARCHITECTURES

PREFIX = "mtp-"
FOLDER = "MTP"  # Unsloth's, beside the models
_TYPE = re.compile(r"[-.]((?:UD-)?(?:I?Q|TQ|B?F|MXFP|NVFP)\d\w*)$", re.IGNORECASE)
_SHARED = "-shared"


def type_in_name(path: PurePath) -> str | None:
    """The quantization in a file's name, such as Q4_K_M or UD-Q4_K_XL; None if it has none."""
    match = _TYPE.search(_stem(path))
    return match[1] if match else None


def model_name(path: PurePath) -> str:
    """The name of the model that a file is of, without quantization, shard and sidecar prefix."""
    return _TYPE.sub("", _stem(path)).removeprefix(PREFIX).removesuffix(_SHARED)


def is_shared_name(path: PurePath) -> bool:
    """Whether a head-only file has, by its name, no embedding and output of its own."""
    return _TYPE.sub("", _stem(path)).endswith(_SHARED)


def sidecar_name(model: PurePath, head_type: str, *, shared: bool) -> str:
    """The name that publishers give a head-only file.

    model: the file of the whole model. head_type: the type of most of the head's matrices.
    """
    return f"{PREFIX}{model_name(model)}{_SHARED if shared else ''}-{head_type}.gguf"


def heads_beside(model: Model) -> list[Path]:
    """The head-only files that fit a local model, in its folder or in the folder `MTP` there.

    Those that are named after the model, if there are any; of two that differ in `-shared` only,
    the one that also has embedding and output.
    """
    folder = model.paths[0].parent
    candidates = [
        path
        for place in (folder, folder / FOLDER)
        for path in sorted(place.glob(f"{PREFIX}*.gguf"))
    ]
    return _preferred([path for path in candidates if is_head_of(path, model)], model.paths[0])


def _stem(path: PurePath) -> str:
    return PurePath(whole_name(Path(path.name))).stem


def models_beside(head: Model) -> list[Path]:
    """The models that a local head-only file fits, in its folder and above the folder `MTP`.

    First shards only; those with a head of their own are left out.
    """

    def fits(model: Model) -> bool:
        if model.report.ready or model.architecture != head.architecture or model.head.is_alone:
            return False
        head.head.check_fit(model.head)
        return True

    return _fitting_beside(head, fits)


def trunks_beside(file: Model, drafter: Drafter) -> list[Path]:
    """The models that a local drafter fits, in its folder; first shards only."""

    def fits(model: Model) -> bool:
        alone = model.tower is not None or (model.report.ready and model.head.is_alone)
        return not alone and not misfits(drafter, file.head, model.head)

    return _fitting_beside(file, fits)


def _fitting_beside(file: Model, fits: Callable[[Model], bool]) -> list[Path]:
    """The other models in the folder of a local file, and above the folder `MTP`, that fit."""
    folder = file.paths[0].parent
    places = [folder, folder.parent] if folder.name == FOLDER else [folder]
    paths = [path for place in places for path in sorted(place.glob("*.gguf"))]
    found = []
    for path in [path for path in paths if path != file.paths[0]]:
        with suppress(FormatError, RequestError):
            if shard_names(str(path))[0] == str(path):
                with open_model(path) as model:
                    if fits(model):
                        found.append(path)
    return found


def _preferred(heads: Sequence[Path], model: Path) -> list[Path]:
    name = model_name(model).lower()
    named = [path for path in heads if model_name(path).lower() == name] or list(heads)
    whole = {path.name for path in named if not is_shared_name(path)}
    return [
        path
        for path in named
        if not is_shared_name(path) or path.name.replace(_SHARED, "") not in whole
    ]


def is_head_of(path: Path, model: Model) -> bool:
    """Whether a file contains only a complete head, and one that fits the model."""
    if model.architecture not in ARCHITECTURES:
        return False
    with suppress(FormatError, RequestError), open_model(path) as head:
        if head.report.ready and head.head.is_alone:
            head.head.check_fit(model.head)
            return True
    return False
