"""Plans the mmproj file of a checkpoint, with the bytes of `convert_hf_to_gguf.py --mmproj`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.format import TensorSpec, Value, ValueType, lay_out
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME, F16, F32, TensorType
from mtp_gguf.gguf_tools.vision import ARCHITECTURE, FILE_PREFIX, PART, PATCHES, POSITIONS

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.source_rows import SourceRows
from ..families.target_model import HeadChoice
from ..families.vision import vision_tower
from .general import file_stem, general_metadata
from .plan import FILE_TYPE_KEY, Plan, PlannedTensor, Request, Shard
from .precision import FILE_TYPES, unknown_name
from .recipe import Target

MMPROJ_TYPES = ("F16", "BF16", "F32", "Q8_0")
_VERSION_KEY = "general.quantization_version"


def parse_mmproj_type(name: str) -> TensorType:
    """The type of this name, ignoring case; RequestError lists those of mmproj files."""
    if name.upper() not in MMPROJ_TYPES:
        raise RequestError(f"--mmproj: {unknown_name(name, MMPROJ_TYPES)}")
    return BY_NAME[name.upper()]


def plan_mmproj(checkpoint: Checkpoint, request: Request) -> Plan:
    """The plan of the mmproj file; CheckpointError if the checkpoint has no whole tower."""
    assert request.mmproj is not None
    tower = vision_tower(checkpoint)
    rows = SourceRows(checkpoint)
    for target in tower.targets:
        rows.check(target)
    file_type = FILE_TYPES[request.mmproj.name]
    metadata = general_metadata(
        checkpoint.folder, request.model_name, tower.targets, file_type, "mmproj"
    )
    version, label = metadata.pop(_VERSION_KEY), metadata.pop(FILE_TYPE_KEY)
    metadata = {
        "general.architecture": Value(ValueType.STRING, ARCHITECTURE),
        **metadata,
        FILE_TYPE_KEY: label,
        **tower.hparams,
        _VERSION_KEY: version,
    }
    tensors = tuple(
        PlannedTensor(TensorSpec(t.name, t.shape, _type(t, request.mmproj)), PART, t)
        for t in tower.targets
    )
    specs = [tensor.spec for tensor in tensors]
    shard = Shard(_path(request, metadata), tensors, lay_out(metadata, specs))
    notes = tuple(_notes(specs, request.mmproj))
    return Plan(request.mmproj.name, (shard,), {}, notes, draft=None, imatrix=None)


def _type(target: Target, wanted: TensorType) -> TensorType:
    """The type of a tensor in a file of the type `wanted`, as llama.cpp's converter chooses it."""
    if target.name.startswith(PATCHES):
        return F16 if wanted is F16 else F32
    if len(target.shape) == 1 or target.name == POSITIONS:
        return F32
    return wanted if target.shape[0] % wanted.block_length == 0 else F16


def _notes(specs: Sequence[TensorSpec], wanted: TensorType) -> Iterator[str]:
    length = wanted.block_length
    narrow = [spec for spec in specs if spec.type is F16 and spec.shape[0] % length]
    if narrow:
        yield (
            f"{len(narrow)} tensors have rows that are not a multiple of {length} and fall back "
            f"to F16 (first: {narrow[0].name}, rows of {narrow[0].shape[0]})"
        )


def _path(request: Request, metadata: dict[str, Value]) -> Path:
    """The output: beside the model's file and named after it, or by GGUF's naming convention."""
    assert request.mmproj is not None
    output = request.output or Path()
    if output.is_dir():
        unsized = {k: v for k, v in metadata.items() if k != "general.size_label"}
        return output / f"{FILE_PREFIX}{file_stem(unsized, request.mmproj.name)}.gguf"
    if request.head is HeadChoice.VISION:
        return output
    return output.with_name(f"{FILE_PREFIX}{output.stem}.gguf")
