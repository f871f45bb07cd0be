"""Vision towers (mmproj files): what they are, and which models they fit.

llama.cpp keeps the encoder of pictures in a file of its own, of the architecture `clip`. Its output
replaces token embeddings, so its width must be the language model's.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .errors import FormatError
from .files.format import GgufFile, TensorInfo
from .heads.nextn import HYBRIDS
from .machine.text import first_of

ARCHITECTURE = "clip"
FILE_PREFIX = "mmproj-"
PART = "vision tower"
TENSOR_PREFIXES = ("v.", "mm.")
PROJECTOR = "qwen3vl_merger"  # that of Qwen3.5 (PROJECTOR_TYPE_QWEN3VL in clip-impl.h)

# The tensors of Qwen3.5's tower. Those of a block and of the merger have a weight and a bias; the
# names on the left are Hugging Face's.
BLOCK = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
MERGER = {"merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"}
PATCHES = "v.patch_embd.weight"
SECOND_PATCHES = f"{PATCHES}.1"  # of the second frame of a video
PATCH_BIAS = "v.patch_embd.bias"
POSITIONS = "v.position_embd.weight"
_MOST = {"projection_dim": 1 << 20, "block_count": 512}


@dataclass(frozen=True)
class VisionTower:
    """The vision tower in an mmproj file.

    projector: llama.cpp's name of its kind. width: embedding length of the models that it fits.
    blocks: number of layers. types: number of matrices by tensor type. faults: why it cannot be
    used, one sentence each.
    """

    projector: str
    width: int
    blocks: int
    types: Mapping[str, int]
    faults: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The tower in a few words."""
        return (
            f"vision tower (mmproj), projector {self.projector}, {self.blocks} layers, for models "
            f"with embeddings of {self.width}"
        )


def read_tower(file: GgufFile, tensors: Mapping[str, TensorInfo]) -> VisionTower | None:
    """The vision tower of an mmproj file; None for every other file."""
    if file.keys.get("general.architecture") != ARCHITECTURE:
        return None
    projector = _text(file, "projector_type") or _text(file, "vision.projector_type") or "unknown"
    kinds = Counter(t.type.name for t in tensors.values() if len(t.shape) > 1)
    types = dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0])))
    try:
        width, blocks = (_size(file, key) for key in ("projection_dim", "block_count"))
    except FormatError as error:
        return VisionTower(projector, 0, 0, types, (str(error),))
    # Towers of other families are only described.
    faults = _faults(tensors, width, blocks) if projector == PROJECTOR else ()
    return VisionTower(projector, width, blocks, types, tuple(faults))


def misfits(tower: VisionTower, architecture: str | None, width: int | None) -> list[str]:
    """Why the tower does not fit a language model, one sentence each; empty if it does.

    width: the model's embedding length.
    """
    found = []
    if architecture == "qwen3next":  # its positions are plain numbers: no M-RoPE
        return ["qwen3next models take no pictures"]
    if architecture in HYBRIDS and tower.projector != PROJECTOR:
        found.append(
            f"expected the projector {PROJECTOR} for {architecture}, found {tower.projector}"
        )
    if tower.width != width:
        found.append(
            f"expected the vision tower of a model with embeddings of {width}, found one for "
            f"{tower.width}"
        )
    return found


def _faults(tensors: Mapping[str, TensorInfo], width: int, blocks: int) -> Iterator[str]:
    names = [*(f"v.blk.{i}.{part}" for i in range(blocks) for part in BLOCK.values())]
    pairs = [f"{name}.{kind}" for name in (*names, *MERGER.values()) for kind in ("weight", "bias")]
    wanted = (PATCHES, SECOND_PATCHES, PATCH_BIAS, POSITIONS, *pairs)
    missing = [name for name in wanted if name not in tensors]
    if missing:
        yield f"the vision tower is incomplete: {first_of(missing)} missing"
        return
    rows = tensors["mm.2.weight"].shape[-1]
    if rows != width:
        yield (
            f"mm.2.weight: expected {width} rows by {ARCHITECTURE}.vision.projection_dim, found "
            f"{rows}"
        )


def _text(file: GgufFile, key: str) -> str | None:
    found = file.scalar(f"{ARCHITECTURE}.{key}")
    return found if isinstance(found, str) else None


def _size(file: GgufFile, key: str) -> int:
    """A positive number of the metadata, which a file of any origin may lack."""
    full = f"{ARCHITECTURE}.vision.{key}"
    found = file.integer(full)
    if found is None or not 0 < found <= _MOST[key]:
        raise FormatError(f"{full}: expected a number from 1 to {_MOST[key]}, found {found}")
    return found
